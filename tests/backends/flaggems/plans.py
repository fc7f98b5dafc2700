# SPDX-License-Identifier: Apache-2.0
"""What test_launch asks of launch plans, answered in a process where kernels are compiled."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.backends.flaggems import pretend
from vllm_fl.backends.flaggems import launch, register_ops
from vllm_fl.backends.flaggems.launch import Planned, planned


def calls() -> dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """Name to (the op, what makes arguments at new addresses)."""
    ops = {impl.op_name: impl.fn for impl in register_ops.backend.implementations}

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def rope(**settings: Any) -> tuple[Any, ...]:
        positions = torch.zeros(5, dtype=torch.int64)
        query, key, _ = rows(5, 4 * 128 + 256).split([512, 128, 128], dim=-1)
        cache = rows(64, settings.get("rotary_dim", 128))
        return positions, query, key, 128, cache, settings.get("neox", True)

    return {
        "silu": (ops["silu_and_mul"], lambda: (rows(32, 8192),)),
        "silu, 3-D": (ops["silu_and_mul"], lambda: (rows(2, 3, 64),)),
        "silu, slice": (ops["silu_and_mul"], lambda: (rows(5, 192)[:, :128],)),
        "gelu": (ops["gelu_and_mul"], lambda: (rows(7, 256), "tanh")),
        "rms": (ops["rms_norm"], lambda: (rows(32, 4096), rows(4096), 1e-6)),
        "rms, tuned": (ops["rms_norm"], lambda: (rows(3, 7168), rows(7168), 1e-6)),
        "fused": (
            ops["fused_add_rms_norm"],
            lambda: (rows(32, 4096), rows(32, 4096), rows(4096), 1e-6),
        ),
        "rope": (ops["rotary_embedding"], rope),
        "rope, gptj": (ops["rotary_embedding"], lambda: rope(neox=False)),
        "rope, partial": (ops["rotary_embedding"], lambda: rope(rotary_dim=64)),
    }


def plan_holders() -> list[Planned]:
    """Every planned function of the backend."""
    modules = {impl.fn.__globals__["__name__"]: impl.fn.__globals__ for impl in impls()}
    return [v for g in modules.values() for v in g.values() if isinstance(v, Planned)]


def impls() -> Any:
    return register_ops.backend.implementations


def last_launches(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The launches of one call, with addresses told as (which tensor, offset)."""
    pretend.launches.clear()
    result = op(*args)
    results = result if isinstance(result, tuple) else (result,)
    owners = [t for t in (*args, *results) if isinstance(t, torch.Tensor)]
    starts = {t.data_ptr(): i for i, t in reversed(list(enumerate(owners)))}
    told = []
    for name, grid, stream, function, addresses in pretend.launches:
        told.append((name, grid, stream, function, [_told(a, starts, owners) for a in addresses]))
    return told, [(r.shape, r.stride(), r.dtype) for r in results if r is not None], results


def _told(value: Any, starts: dict[int, int], owners: list[torch.Tensor]) -> Any:
    if not isinstance(value, int) or value < 1 << 20:
        return value
    for start, which in starts.items():
        size = owners[which].untyped_storage().nbytes()
        if start <= value < start + size:
            return which, value - start
    return "an address inside"


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """All calls go through FlagGems."""
    kept = [(p, dict(p._plans)) for p in plan_holders()]
    for holder, plans in kept:
        holder._plans = dict.fromkeys(plans, False)
    try:
        yield
    finally:
        for holder, plans in kept:
            holder._plans = plans


def microseconds(call: Callable[[], Any], repeats: int = 200) -> float:
    """The least host time of a call."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def report() -> dict[str, Any]:
    """Everything that test_launch looks at."""
    pretend.load()
    said: dict[str, Any] = {"same": {}, "results": {}, "host_us": {}}
    for name, (op, make) in calls().items():
        for _ in range(2):
            op(*make())
        there, layout, _ = last_launches(op, make())
        with without_plans():
            expected, wanted, _ = last_launches(op, make())
        said["same"][name] = there == expected and bool(there)
        args = make()
        results = last_launches(op, args)[2]
        written = [any(r is a for a in args) for r in results]
        said["results"][name] = layout == wanted and all(written) == (name == "fused")
    said["without_a_plan"] = [
        p.__name__ for p in plan_holders() for plan in p._plans.values() if isinstance(plan, bool)
    ]
    for name in ("silu", "rms", "fused"):
        op, make = calls()[name]
        call = functools.partial(op, *make())
        fast = microseconds(call)
        with without_plans():
            said["host_us"][name] = (microseconds(call), fast)
    said.update(refusals(), **limits(), uncompiled=uncompiled())
    return said


def uncompiled() -> dict[str, bool]:
    """Whether what guards refuse, and an interpreter does, fails to compile."""
    ops = {impl.op_name: impl.fn for impl in register_ops.backend.implementations}
    one, slots = torch.ones(1), torch.arange(5)

    def fails(op: str, *args: Any) -> bool:
        try:
            ops[op](*args)
        except Exception as error:
            return type(error).__name__ == "CompilationError"
        return False

    def latent(rank: int) -> tuple[Any, ...]:
        rows = (torch.zeros(5, rank), torch.zeros(5, 16))
        return *rows, torch.zeros(4, 8, rank + 16), slots, "auto", one

    def groups(topk: int) -> tuple[Any, ...]:
        return torch.zeros(5, 16), topk, True, 4, 2, "sigmoid", 1.0, torch.zeros(16)

    return {
        "rank 37": fails("concat_and_cache_mla", *latent(37)),
        "rank 32": fails("concat_and_cache_mla", *latent(32)),
        "top 6": fails("grouped_topk", *groups(6)),
        "top 4": fails("grouped_topk", *groups(4)),
    }


def refusals() -> dict[str, Any]:
    """Functions that a plan would get wrong."""
    kernels = register_ops.backend.kernels
    x, weight = torch.zeros(4, 64), torch.zeros(64)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm_forward(x, (64,), weight, 1e-6)

    def refused(function: Callable[..., Any], *args: Any) -> bool:
        subject = planned(function)
        for _ in range(3):
            subject(*args)
        return list(subject._plans.values()) == [False]

    return {
        "refused": {
            "copies an argument": refused(norm, torch.zeros(4, 128)[:, :64], weight),
            "allocates inside": refused(lambda x, w: norm(x, w)[0], x, weight),
            "reads a value": refused(lambda x, w: (float(x[0, 0]), norm(x, w))[1], x, weight),
            "returns a view": refused(lambda x, w: (norm(x, w)[0][1:], *norm(x, w)), x, weight),
            "no launch": refused(lambda x, w: x, x, weight),
        }
    }


def limits() -> dict[str, Any]:
    """When plans are not used, and how many are kept."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    kernels = register_ops.backend.kernels

    @planned
    def norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
        through.append(x)
        return kernels.rms_norm_forward(x, (x.shape[-1],), weight, 1e-6)

    through: list[torch.Tensor] = []
    aligned, weight = torch.zeros(4, 64), torch.zeros(64)
    shifted = torch.zeros(4 * 64 + 1)[1:].view(4, 64)
    for x in (aligned, shifted, torch.zeros(5, 64)):
        for _ in range(3):
            norm(x, weight)
    layouts = sum(not isinstance(plan, bool) for plan in norm._plans.values())

    def hook(*args: Any) -> None:
        called.append(args)

    called: list[Any] = []
    through.clear()
    knobs.runtime.launch_enter_hook.add(hook)
    norm(aligned, weight)
    knobs.runtime.launch_enter_hook.remove(hook)
    with_a_hook = "called" if through else "forgotten"
    through.clear()
    norm(aligned, weight)
    assert not through
    plan = next(iter(norm._plans.values()))
    plan._device = 1
    norm(aligned, weight)
    on_another_device = "through flaggems" if through else "launched"
    launch.PLANS_KEPT, limit = 4, launch.PLANS_KEPT
    for tokens in range(10, 20):
        norm(torch.zeros(tokens, 64), weight)
    kept, launch.PLANS_KEPT = len(norm._plans), limit
    norm.forget()
    driver.active.get_current_target = lambda: GPUTarget("hip", "gfx942", 64)
    for _ in range(3):
        norm(aligned, weight)
    on_hip = "no plan" if list(norm._plans.values()) == [False] else "a plan"
    return {
        "layouts": layouts,
        "with_a_hook": with_a_hook,
        "on_another_device": on_another_device,
        "kept": kept,
        "limit": 4,
        "on_hip": on_hip,
    }
