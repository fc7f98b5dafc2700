# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, run on the CPU, against their contracts and against themselves.

    python -m tests.backends.vendor.cuda.emulated.check LIBRARY

In a process of its own, because the library stands in for vllm_fl._C_cuda. Prints the complaints as
JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import vllm_fl
from tests.backends.helpers import at_offset, bits, randn
from tests.backends.vendor.cpu import native_checks
from vllm_fl.backends.vendor.cuda import fl, register_ops  # noqa: F401 (importing marks them)
from vllm_fl.testing import outputs_of, worst_errors

DTYPES = native_checks.DTYPES
SIZES = (64, 80, 128, 200, 576, 1024, 1031, 2048, 4096, 4104, 7168, 8200, 16384, 40000)
"""A part of a warp, a warp, blocks of all sizes, rows that vectors do not fill, and long rows."""

CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"norm_vectors": (1, 2, 4), "norm_warp": (0, 1), "norm_warp_rows": (1, 8)},
    "fused_add_rms_norm": {"norm_vectors": (1, 2, 4), "norm_warp": (0, 1)},
    "gemma_rms_norm": {"norm_vectors": (1, 2, 4), "norm_warp": (0, 1)},
    "silu_and_mul": {"gated_threads": (64, 512)},
    "rotary_embedding": {"rotary_threads": (32, 512)},
    "fused_qk_norm_rope": {"fused_threads": (32, 256)},
}
"""What a launch may choose: no bit of a result may depend on it."""


def load(library: Path) -> Any:
    """The library as vllm_fl._C_cuda."""
    spec = importlib.util.spec_from_file_location("vllm_fl._C_cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["vllm_fl._C_cuda"] = module
    vllm_fl._C_cuda = module  # type: ignore[attr-defined]
    return module


def against_contracts(count: int, seed: int) -> Iterator[str]:
    """Random calls, and every case of every contract."""
    native_checks.IMPLS = {impl.op_name: impl for impl in fl.backend.implementations}
    yield from native_checks.check(count, seed)
    for dtype in DTYPES:
        contract = native_checks.BY_NAME["reshape_and_cache_flash"]
        for case in contract.cases_for(dtype):
            args = case.make(dtype, torch.Generator().manual_seed(seed))
            wrong = native_checks.complaint(contract.name, dtype, args)
            if wrong and not (wrong.startswith("refused") and "fp8" in case.name):
                yield f"{contract.name}, {case.name}, {dtype}: {wrong}"


def calls(dtype: torch.dtype, size: int) -> dict[str, tuple[Any, ...]]:
    """Nine tokens of some size; the tokens come first."""
    tokens = 3 if size > 2000 else 9
    x, residual, weight = randn((tokens, size), dtype), randn((tokens, size), dtype, 1), None
    weight = randn((size,), dtype, 2)
    head = max(2, size // 16 // 2 * 2)
    qkv, positions = randn((tokens, 8 * head), dtype, 3), torch.arange(tokens) * 5 % 50
    angles = randn((50, head), dtype, 4).clamp(-1, 1)
    found: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-6, None),
        "fused_add_rms_norm": (x, residual, weight, 1e-6, None),
        "gemma_rms_norm": (x, weight, 1e-6),
        "silu_and_mul": (x if size % 2 == 0 else x[:, 1:],),
    }
    if size <= 4104:
        query, key = qkv[:, : 4 * head], qkv[:, 4 * head : 6 * head]
        found["rotary_embedding"] = (positions, query, key, head, angles, size % 16 == 0)
        norms = weight[:head], weight[-head:]
        found["fused_qk_norm_rope"] = (
            qkv, 4, 2, 2, head, 1e-6, *norms, angles, size % 16 == 0, positions,
        )  # fmt: skip
    return found


def rounded_once() -> Iterator[str]:
    """Half precision is half an ulp off and the error of float32, which is a hundredth."""
    for dtype, size in product((torch.bfloat16, torch.float16), SIZES):
        for op, args in calls(dtype, size).items():
            before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
            found = outputs_of(native_checks.IMPLS[op].fn(*args))
            errors = worst_errors(native_checks.BY_NAME[op], found, before)
            if max(errors) > 0.51:
                yield f"{op} {size} {dtype}: off by {errors} ulps"


def ran(op: str, args: tuple[Any, ...], offset: int = 0) -> list[torch.Tensor]:
    """The outputs' bits, of copies of the arguments, at an odd address or not."""
    copies = []
    for a in args:
        if isinstance(a, torch.Tensor):
            a = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a)
            if offset and a.is_contiguous():
                a = at_offset(a, offset)
        copies.append(a)
    found = native_checks.IMPLS[op].fn(*copies)
    return [bits(out.clone()) for out in (found if isinstance(found, tuple) else (found,))]


def equal(x: list[torch.Tensor], y: list[torch.Tensor]) -> bool:
    """In every bit."""
    return all(torch.equal(one, other) for one, other in zip(x, y, strict=True))


def against_themselves(module: Any) -> Iterator[str]:
    """The same bits at any address, in any batch, and whatever the launch."""
    for dtype, size in product(DTYPES, SIZES):
        for op, args in calls(dtype, size).items():
            whole, what = ran(op, args), f"{op} {size} {dtype}"
            if not equal(ran(op, args, offset=1), whole):
                yield f"{what}: differs at another address"
            tokens = args[0].shape[0]
            for part in (slice(0, 1), slice(1, 3)):
                few = tuple(
                    a[part] if isinstance(a, torch.Tensor) and a.shape[0] == tokens else a
                    for a in args
                )
                if not equal(ran(op, few), [out[part] for out in whole]):
                    yield f"{what}: differs in another batch"
            names = CHOICES[op]
            for values in product(*names.values()):
                for name, value in zip(names, values, strict=True):
                    module.tune(name, value)
                if not equal(ran(op, args), whole):
                    yield f"{what}: differs with {dict(zip(names, values, strict=True))}"
            for name in names:
                module.tune(name, -1)


def pages(module: Any) -> Iterator[str]:
    """The caches hold the same whether a thread copies a key and a value or one of them."""
    for dtype, heads in product(DTYPES, (1, 8)):
        key, value = (randn((9, heads, 128), dtype, seed) for seed in (1, 2))
        caches = (torch.zeros(4, 16, heads, 128, dtype=dtype) for _ in range(2))
        slots = torch.tensor([5, 63, -1, 0, 64, 17, 33, 2, 48])
        one = torch.ones(1)
        args = (key, value, *caches, slots, "auto", one, one)
        whole = ran("reshape_and_cache_flash", args)
        for sides, threads in product((1, 2), (64, 256)):
            module.tune("cache_sides", sides)
            module.tune("cache_threads", threads)
            if not equal(ran("reshape_and_cache_flash", args), whole):
                yield f"reshape_and_cache_flash {heads} {dtype}: differs with {sides}, {threads}"
        module.tune("cache_sides", -1)
        module.tune("cache_threads", -1)


def positions_of_32_bits() -> Iterator[str]:
    """They, and weights of another type, are the general kernel's."""
    for dtype, size in product(DTYPES, (512, 1024, 2048)):
        args = calls(dtype, size)["fused_qk_norm_rope"]
        others = {"positions": (*args[:-1], args[-1].int())}
        if dtype is not torch.float32:
            others["weights"] = (*args[:6], args[6].float(), args[7].float(), *args[8:])
        for what, given in others.items():
            if not equal(ran("fused_qk_norm_rope", given), ran("fused_qk_norm_rope", args)):
                yield f"fused_qk_norm_rope {size} {dtype}: differs with other {what}"


def positions_outside(module: Any) -> Iterator[str]:
    """A position that is not in the cache makes its token NaN, and no other."""
    for dtype in DTYPES:
        qkv, angles = randn((4, 8 * 64), dtype), randn((50, 64), dtype)
        qkv[2, 3] = 1e4  # nothing of it is left over
        positions, weight = torch.tensor([3, 50, -1, 49]), randn((64,), dtype)
        values = qkv[:, 6 * 64 :].clone()
        module.fused_qk_norm_rope(qkv, 4, 2, 2, 64, 1e-6, weight, weight, angles, True, positions)
        nan = qkv[:, : 6 * 64].isnan()
        right = nan[1:3].all() and not nan[[0, 3]].any()
        if not right or not torch.equal(qkv[:, 6 * 64 :], values):
            yield f"fused_qk_norm_rope {dtype}: NaN is where it should not be"
    for dtype, half in product(DTYPES, (32, 9)):
        query, angles = randn((4, 2 * 64), dtype), randn((50, 2 * half), dtype)
        positions = torch.tensor([3, 50, -1, 49])
        module.rotary_embedding(positions, query, None, 64, angles, True)
        nan = query.isnan().view(4, 2, 64)
        if nan[[0, 3]].any() or nan[1:3, :, 2 * half :].any() or not nan[1:3, :, : 2 * half].all():
            yield f"rotary_embedding of {2 * half} of 64 {dtype}: NaN is where it should not be"


def main(library: Path) -> list[str]:
    """All complaints."""
    module = load(library)
    found = list(against_contracts(count=8, seed=5))
    found += [*rounded_once(), *against_themselves(module), *pages(module)]
    return [*found, *positions_of_32_bits(), *positions_outside(module)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]))))
