# SPDX-License-Identifier: Apache-2.0
"""Many random calls of our CPU kernels against their contracts: sizes, strides, offsets, dtypes.

As a program, in a process of its own for each instruction set (ATEN_CPU_CAPABILITY), it prints
which one ran, and what was wrong, as JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from vllm_fl.backends.vendor.cpu.fl import backend, kernels
from vllm_fl.backends.vendor.cpu.impl_fl import (  # noqa: F401  (importing marks them)
    activation,
    normalization,
    qk_norm_rope,
    rotary,
)
from vllm_fl.ops import CONTRACTS
from vllm_fl.testing import outputs_of, worst_errors

IMPLS = {impl.op_name: impl for impl in backend.implementations}
BY_NAME = {contract.name: contract for contract in CONTRACTS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(rng: random.Random, dtype: torch.dtype, leading: tuple[int, ...], width: int) -> Any:
    """Normally distributed rows: padded, offset in memory, and with leading dimensions
    permuted, each or not."""
    pad = rng.choice((0, 0, 1, 7, 16))
    offset = rng.choice((0, 0, 1, 3))
    order = list(range(len(leading)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    shape = [leading[i] for i in order]
    size = width + pad
    for n in shape:
        size *= n
    memory = torch.randn(
        size + offset, generator=torch.Generator().manual_seed(rng.getrandbits(31))
    )
    wide = memory.to(dtype)[offset:].view(*shape, width + pad)
    return wide.permute(*[order.index(i) for i in range(len(order))], len(order))[..., :width]


def leading(rng: random.Random) -> tuple[int, ...]:
    """Zero to three leading dimensions, now and then an empty one."""
    return tuple(rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(rng.randrange(4)))


def width(rng: random.Random) -> int:
    """Sizes around the vectors', and ordinary ones."""
    return rng.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 61, 64, 65, 127, 128, 200, 576, 1031))


def gated(rng: random.Random, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of a gated activation."""
    return (rows(rng, dtype, leading(rng), 2 * width(rng)) * rng.choice((1, 1, 20)),)


def norm(rng: random.Random, dtype: torch.dtype, count: int) -> tuple[Any, ...]:
    """Arguments of a norm of one tensor or two: with and without a weight, of any dtype."""
    lead, hidden = leading(rng), width(rng)
    weight = None
    if rng.random() < 0.8:
        weight = rows(rng, rng.choice((dtype, dtype, *DTYPES)), (), hidden)
    variance_size = rng.choice((None, None, rng.randint(1, hidden)))
    return (*(rows(rng, dtype, lead, hidden) for _ in range(count)), weight, 1e-5, variance_size)


def gemma(rng: random.Random, dtype: torch.dtype, count: int) -> tuple[Any, ...]:
    """Arguments of Gemma's norms: always a weight, and the whole row's variance."""
    lead, hidden = leading(rng), width(rng)
    weight = rows(rng, rng.choice((dtype, dtype, *DTYPES)), (), hidden)
    return (*(rows(rng, dtype, lead, hidden) for _ in range(count)), weight, 1e-5)


def rope(rng: random.Random, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of rotary_embedding: slices of one projection, heads apart or not."""
    tokens, heads, kv_heads = rng.choice((0, 1, 4, 7)), rng.choice((1, 3, 9)), rng.choice((1, 2))
    head_size = rng.choice((2, 6, 16, 36, 64, 80, 128))
    rotary_dim = 2 * rng.randint(1, head_size // 2)
    widths = [heads * head_size, kv_heads * head_size]
    query, key = rows(rng, dtype, (tokens,), sum(widths)).split(widths, dim=-1)
    if rng.random() < 0.4:
        query, key = query.unflatten(-1, (-1, head_size)), key.unflatten(-1, (-1, head_size))
    cache = rows(rng, rng.choice((dtype, dtype, *DTYPES)), (50,), rotary_dim).clamp(-1, 1)
    index = rng.choice((torch.int64, torch.int32))
    positions = torch.tensor([rng.randrange(50) for _ in range(tokens)], dtype=index)
    key = key if rng.random() < 0.8 else None
    return positions, query, key, head_size, cache, rng.random() < 0.5


def norm_rope(rng: random.Random, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of fused_qk_norm_rope: any heads, weights of the projection's dtype or float32."""
    tokens, head_dim = rng.choice((0, 1, 4, 7)), rng.choice((2, 7, 16, 36, 61, 64, 80, 128, 256))
    heads = (rng.choice((1, 3, 8)), rng.choice((1, 2)), rng.choice((0, 1, 2)))
    qkv = rows(rng, dtype, (tokens,), sum(heads) * head_dim)
    of_weight = rng.choice((dtype, torch.float32))
    weights = (rows(rng, of_weight, (), head_dim) for _ in range(2))
    rotary_dim = 2 * rng.randint(1, head_dim // 2)
    cache = rows(rng, dtype, (50,), rotary_dim).clamp(-1, 1)
    index = rng.choice((torch.int64, torch.int32))
    positions = torch.tensor([rng.randrange(50) for _ in range(tokens)], dtype=index)
    return qkv, *heads, head_dim, 1e-5, *weights, cache, rng.random() < 0.5, positions


COLUMNS = ", the last not 1"
"""What a guard says of rows that are columns, which some cases have: it must refuse them."""

MAKERS = {
    "silu_and_mul": gated,
    "mul_and_silu": gated,
    "gelu_and_mul": lambda rng, dtype: (*gated(rng, dtype), rng.choice(("none", "tanh"))),
    "rms_norm": lambda rng, dtype: norm(rng, dtype, 1),
    "fused_add_rms_norm": lambda rng, dtype: norm(rng, dtype, 2),
    "gemma_rms_norm": lambda rng, dtype: gemma(rng, dtype, 1),
    "fused_add_gemma_rms_norm": lambda rng, dtype: gemma(rng, dtype, 2),
    "rotary_embedding": rope,
    "fused_qk_norm_rope": norm_rope,
}


def complaint(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> str | None:
    """What is wrong with the kernel's answer to a call, or None."""
    impl, contract = IMPLS[op], BY_NAME[op]
    assert impl.supports is not None
    verdict = impl.supports(*args)
    if verdict is not True:
        return f"refused: {verdict}"
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    found = outputs_of(impl.fn(*args))
    errors = worst_errors(contract, found, before)
    # A CPU's kernels round where the reference does, and where that costs more than the contract's
    # tolerance (an activation that is subnormal in float16), they may be as far off as it is.
    references = worst_errors(contract, contract.reference(*before), before)
    for i, error in enumerate(errors):
        if not error <= max(contract.tolerances[dtype].for_output(i), references[i] + 1):
            return f"off by {errors} ulps, the reference by {references}"
    names = contract.signature.parameter_names
    for name, now, then in zip(names, args, before, strict=False):
        if isinstance(now, torch.Tensor) and name not in impl.mutates and not same(now, then):
            return f"{name} was written"
    return None


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def describe(args: tuple[Any, ...]) -> str:
    """Shapes and strides, for a report."""
    return ", ".join(
        f"{a.dtype}{list(a.shape)}/{list(a.stride())}" if isinstance(a, torch.Tensor) else str(a)
        for a in args
    )


def check(count: int, seed: int) -> list[str]:
    """The complaints about `count` random calls of each op in each dtype."""
    found = []
    for op, make in MAKERS.items():
        for dtype in DTYPES:
            rng = random.Random(f"{op} {dtype} {seed}")
            for _ in range(count):
                args = make(rng, dtype)
                wrong = complaint(op, dtype, args)
                if wrong:
                    found.append(f"{op}({describe(args)}): {wrong}")
            for case in BY_NAME[op].cases_for(dtype):
                wrong = complaint(op, dtype, case.make(dtype, torch.Generator().manual_seed(seed)))
                if wrong and not wrong.endswith(COLUMNS):
                    found.append(f"{op}, {case.name}, {dtype}: {wrong}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    complaints = check(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"capability": kernels.cpu_capability(), "complaints": complaints}))
