# SPDX-License-Identifier: Apache-2.0
"""FlagGems' operators on a GPU: are they right, and what do they cost beside the vendor's?

    PYTHONPATH=$HOME/site:. python benchmarks/gpu/flaggems.py OUT [--seconds 520]

writes OUT.json and OUT.md. Three things for every op that FlagGems serves:

right   each case of its contract, in each dtype: refused, or within the contract's tolerance at
        the first call (through FlagGems' Python) and at the third (by a launch plan)
host    microseconds that a call takes the CPU outside of graphs, 32 tokens: through FlagGems,
        by its launch plan, and the vendor's kernel
GPU     microseconds of a call in a CUDA graph of 20, for several token counts, beside a kernel
        that does nothing

Every process is forked from one that registered and explained all operators: that none of it
initialised CUDA is shown by their working.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from flaggems_inputs import TOKENS, inputs

from vllm_fl.backends.flaggems import flaggems
from vllm_fl.backends.flaggems.launch import Planned
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.ops import CONTRACTS, OpContract

CONTRACT_OF: dict[str, OpContract] = {contract.name: contract for contract in CONTRACTS}
CALLS_IN_A_GRAPH = 20
HOST_TOKENS = 32
WORKERS = 12
DEVICE = "cuda"


def served() -> dict[str, list[OpImpl]]:
    """Op to its implementations from FlagGems and from the device's vendor, those that are
    available."""
    manager = get_default_manager()
    device = manager.device
    found: dict[str, list[OpImpl]] = {}
    for op, impls in manager.registry.snapshot().impls_by_op.items():
        if any(i.impl_id == flaggems.backend.impl_id for i in impls):
            wanted = [i for i in impls if i.impl_id != "reference.torch"]
            found[op] = [i for i in wanted if i.availability(device)]
    return found


def refusals() -> dict[str, str]:
    """Op to the reason why FlagGems is not available for it."""
    device = get_default_manager().device
    return {
        i.op_name: getattr(i.availability(device), "reason", "")
        for i in flaggems.backend.implementations
        if not i.availability(device)
    }


def to_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values in the same strides, on the GPU."""
    return tuple(_moved(a) if isinstance(a, torch.Tensor) else a for a in args)


def _moved(x: torch.Tensor) -> torch.Tensor:
    if x.untyped_storage().nbytes() == x.numel() * x.element_size() or not x.numel():
        return x.to(DEVICE)
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    whole = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(bytes_.to(DEVICE).untyped_storage())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def loaded(impl: OpImpl) -> Callable[..., Any]:
    """The function, its kernels imported."""
    assert impl.backend is not None
    impl.backend.load()
    return impl.fn


def verdict(contract: OpContract, impl: OpImpl, args: tuple[Any, ...]) -> Any:
    """What the guards say."""
    facts = contract.signature.facts_of(*args) if contract.signature.facts else {}
    said = True if impl.supports_layer is None else impl.supports_layer(facts)
    return impl.supports(*args) if said is True and impl.supports is not None else said


# ---------------------------------------------------------------------------------- right


def check(op: str, dtype_name: str, pipe: Any) -> None:
    """Send (case, outcome, what) for each case of a dtype; in a process of its own."""
    from vllm_fl.testing import worst_errors

    contract, dtype = CONTRACT_OF[op], getattr(torch, dtype_name)
    [impl] = [i for i in flaggems.backend.implementations if i.op_name == op]
    fn = loaded(impl)
    limits = contract.tolerances[dtype]
    for case in contract.cases_for(dtype):

        def arguments(case: Any = case) -> tuple[Any, ...]:
            return case.make(dtype, torch.Generator().manual_seed(0))

        said = verdict(contract, impl, to_device(arguments()))
        if said is not True:
            pipe.send((case.name, "refused", str(said)))
            continue
        worst: list[float] = []
        try:
            for _ in range(3):
                out = fn(*to_device(arguments()))
                torch.cuda.synchronize()
                outs = out if isinstance(out, tuple) else (out,)
                back = tuple(o if o is None else o.cpu() for o in outs)
                errors = worst_errors(contract, back, arguments())
                worst = [max(pair) for pair in zip(errors, worst or errors, strict=True)]
        except Exception as error:
            pipe.send((case.name, "raised", f"{type(error).__name__}: {str(error)[:300]}"))
            if "CUDA" in str(error):
                break  # the context is lost
            continue
        right = all(e <= limits.for_output(i) for i, e in enumerate(worst))
        pipe.send((case.name, "right" if right else "WRONG", [round(e, 4) for e in worst]))


def check_all(ops: list[str], until: float) -> dict[str, Any]:
    """All cases of all ops, a process for each op and dtype."""
    context = multiprocessing.get_context("fork")
    waiting = [
        (op, str(dtype).removeprefix("torch."))
        for op in ops
        for dtype in CONTRACT_OF[op].tolerances
    ]
    running: dict[tuple[str, str], tuple[Any, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < WORKERS:
            task = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=check, args=(*task, there))
            process.start()
            there.close()
            running[task] = process, here
            found.setdefault(task[0], {})[task[1]] = {}
        for task, (process, here) in list(running.items()):
            cases = found[task[0]][task[1]]
            try:
                while here.poll(0.01):
                    name, outcome, what = here.recv()
                    cases[name] = (outcome, what)
            except EOFError:
                process.join()
                if process.exitcode:
                    cases["(process)"] = ("died", f"exit code {process.exitcode}")
                del running[task]
                continue
            if time.monotonic() > until:
                process.kill()
                cases["(process)"] = ("died", "out of time")
                del running[task]
        if time.monotonic() > until:
            for op, dtype in waiting:
                found.setdefault(op, {})[dtype] = {"(process)": ("died", "out of time")}
            waiting = []
    return found


# ----------------------------------------------------------------------------------- cost


def host_us(call: Callable[[], Any], calls: int = 400) -> float:
    """The least of five means."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def gpu_us(call: Callable[[], Any]) -> float:
    """The median of replays of a graph of 20 calls, for one call."""
    from triton.testing import do_bench

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_A_GRAPH):
            call()
    return do_bench(graph.replay, warmup=20, rep=100, return_mode="median") * 1e3 / CALLS_IN_A_GRAPH


def planned_of(fn: Callable[..., Any]) -> list[Planned]:
    """The planned functions in the module of an implementation."""
    return [v for v in fn.__globals__.values() if isinstance(v, Planned)]


def without_plans(fn: Callable[..., Any], measure: Callable[[], float]) -> float:
    """Measure while every call goes through FlagGems."""
    kept = [(p, p._plans) for p in planned_of(fn)]
    for holder, plans in kept:
        holder._plans = dict.fromkeys(plans, False)
    try:
        return measure()
    finally:
        for holder, plans in kept:
            holder._plans = plans


def measure_all(impls: dict[str, list[OpImpl]], until: float, pipe: Any) -> None:
    """Send rows of costs; in a process of its own, with the GPU to itself."""
    import triton

    @triton.jit
    def nothing(x):
        pass

    something = torch.zeros(1, device=DEVICE)
    pipe.send({"op": "(empty kernel)", "gpu_us": gpu_us(lambda: nothing[(1,)](something))})
    for op, candidates in impls.items():
        for tokens in TOKENS:
            for impl in candidates:
                if time.monotonic() > until:
                    pipe.send({"op": op, "tokens": tokens, "error": "out of time"})
                    continue
                pipe.send({"op": op, "tokens": tokens, "impl": impl.impl_id} | _cost(impl, tokens))
    pipe.send(None)


def _cost(impl: OpImpl, tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        fn, args = loaded(impl), inputs(impl.op_name, tokens, DEVICE)
        said = verdict(CONTRACT_OF[impl.op_name], impl, args)
        if said is not True:
            return {"refused": str(said)}

        def call() -> Any:
            return fn(*args)

        row["gpu_us"] = gpu_us(call)
        if tokens == HOST_TOKENS:
            row["host_us"] = host_us(call)
            if impl.impl_id == flaggems.backend.impl_id:
                plans = [p for holder in planned_of(fn) for p in holder._plans.values()]
                row["plans"] = sum(not isinstance(p, bool) for p in plans)
                row["host_us_through_flaggems"] = without_plans(fn, lambda: host_us(call, 100))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


# ---------------------------------------------------------------------------------- report


def about() -> dict[str, Any]:
    """Versions; asked in a child, because the device's name initialises it."""

    def name(pipe: Any) -> None:
        pipe.send(torch.cuda.get_device_name())

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=name, args=(there,))
    process.start()
    there.close()
    device = here.recv()
    process.join()
    packages = ("torch", "triton", "flag-gems", "vllm", "vllm-fl")
    return {
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {p: _version(p) for p in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:
        return "none"


def markdown(report: dict[str, Any]) -> str:
    """The tables."""
    about, lines = report["about"], []
    packages = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    lines += [f"{about['device']}, {packages}, {about['date']}.", ""]
    lines += [f"Not available: {op}: {why}." for op, why in report.get("not_available", {}).items()]
    lines += [""] if report.get("not_available") else []
    lines += ["| op | dtype | right | refused | wrong or raised |", "|---|---|---|---|---|"]
    for op, dtypes in report["right"].items():
        for dtype, cases in dtypes.items():
            count = Counter(outcome for outcome, _ in cases.values())
            bad = {n: w for n, (o, w) in cases.items() if o not in ("right", "refused")}
            shown = "; ".join(f"{n}: {w}" for n, w in bad.items()) or "none"
            lines.append(f"| {op} | {dtype} | {count['right']} | {count['refused']} | {shown} |")
    lines += ["", "Host microseconds a call, 32 tokens, bfloat16, outside of graphs.", ""]
    lines += ["| op | through FlagGems | by launch plan | vendor |", "|---|---|---|---|"]
    rows = [r for r in report["cost"] if r.get("tokens") == HOST_TOKENS]
    for op in dict.fromkeys(r["op"] for r in rows):
        mine, others = _pick(rows, op)
        cells = (mine.get("host_us_through_flaggems"), mine.get("host_us"), others.get("host_us"))
        lines.append(
            f"| {op} | " + " | ".join(_cell(c, mine, i) for i, c in enumerate(cells)) + " |"
        )
    empty = next((r["gpu_us"] for r in report["cost"] if r["op"] == "(empty kernel)"), None)
    lines += [
        "",
        f"GPU microseconds a call in a graph, FlagGems / vendor; an empty kernel: {empty}.",
    ]
    head = " | ".join(str(t) for t in TOKENS)
    lines += ["", f"| op | {head} |", "|---" * (len(TOKENS) + 1) + "|"]
    for op in dict.fromkeys(r["op"] for r in rows):
        cells = []
        for tokens in TOKENS:
            mine, others = _pick([r for r in report["cost"] if r.get("tokens") == tokens], op)
            cells.append(
                f"{_cell(mine.get('gpu_us'), mine, 0)} / {_cell(others.get('gpu_us'), others, 1)}"
            )
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _pick(rows: list[dict[str, Any]], op: str) -> tuple[dict[str, Any], dict[str, Any]]:
    mine = [r for r in rows if r["op"] == op and r.get("impl") == flaggems.backend.impl_id]
    others = [
        r for r in rows if r["op"] == op and r.get("impl") not in (None, flaggems.backend.impl_id)
    ]
    return (mine or [{}])[0], (others or [{}])[0]


def _cell(value: float | None, row: dict[str, Any], place: int) -> str:
    if value is not None:
        return f"{value:.2f}"
    return (row.get("refused") or row.get("error") or "-")[:60] if place < 2 else "-"


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="OUT.json and OUT.md are written")
    parser.add_argument("--seconds", type=float, default=520, help="in all")
    parser.add_argument("--ops", nargs="*", help="only these")
    args = parser.parse_args()
    start = time.monotonic()
    manager = get_default_manager()
    manager.ensure_initialized()
    explained = [str(manager.explain(op)) for op in manager.registry.list_operators()]
    impls = {op: i for op, i in served().items() if not args.ops or op in args.ops}
    ready = [op for op, i in impls.items() if flaggems.backend.impl_id in {x.impl_id for x in i}]
    assert "flag_gems" not in sys.modules and not torch.cuda.is_initialized()
    report: dict[str, Any] = {
        "about": about(),
        "not_available": refusals(),
        "explained": len(explained),
        "right": check_all(ready, start + 0.6 * args.seconds),
        "cost": [],
    }
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=measure_all, args=(impls, start + 0.97 * args.seconds, there)
    )
    process.start()
    there.close()
    try:
        while (row := here.recv()) is not None:
            report["cost"].append(row)
    except EOFError:
        report["cost"].append({"op": "(process)", "error": "it died"})
    process.join()
    # Nothing above initialised CUDA here: that is why all those forks worked.
    report["cuda_in_parent"] = torch.cuda.is_initialized()
    report["seconds"] = round(time.monotonic() - start, 1)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    args.out.with_suffix(".md").write_text(text)
    print(
        text, f"{report['seconds']} s; CUDA initialised in the parent: {report['cuda_in_parent']}"
    )


if __name__ == "__main__":
    main()
