# SPDX-License-Identifier: Apache-2.0
"""What `kernels.py` measures: the ops, the sizes that models have, and the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = [
    "COMPILED",
    "FUSED",
    "HIDDEN",
    "QK",
    "QUICK",
    "TOKENS",
    "Point",
    "batch_arguments",
    "points",
    "separate",
]

HIDDEN = (1024, 2048, 4096, 5120, 7168)
TOKENS = (1, 2, 8, 32, 128, 512, 2048, 8192, 32768)
THREE = (32, 512, 8192)
QUICK = ((4096, 7168), (1, 32, 512, 8192, 32768))
COMPILED = {(4096, t) for t in THREE} | {("32/8", t) for t in THREE}
"""The sizes and tokens, in bfloat16, for which torch.compile takes part."""

HEAD = 128
MAX_POSITION = 4096
EPSILON = 1e-6
FUSED = "fused_qk_norm_rope"
QK = "rms_norm of heads"


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a table.

    Attributes:
        group: the table: an op's name, or that of a use of it.
        op: what is bound.
        dtype: by name.
        size: the hidden size, or "query heads/key heads".
        tokens: rows of the input.
        moved: bytes that a call has to read and to write.
        make: positional arguments on the device that torch's device context names.
    """

    group: str
    op: str
    dtype: str
    size: int | str
    tokens: int
    moved: int
    make: Callable[[], tuple[Any, ...]]


def twin(x: torch.Tensor) -> torch.Tensor:
    """A copy in the same strides: a slice of wider rows stays one."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _half(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def _weight(size: int, dtype: torch.dtype) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(size, dtype=dtype)


# ---------------------------------------------------------------------------- rows of a hidden size


def _norm(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(tokens, hidden, dtype=dtype), _weight(hidden, dtype), EPSILON


def _fused_add(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x, residual = (torch.randn(tokens, hidden, dtype=dtype) for _ in range(2))
    return x, residual, _weight(hidden, dtype), EPSILON


def _gated(tokens: int, hidden: int, dtype: torch.dtype, *more: Any) -> tuple[Any, ...]:
    return torch.randn(tokens, 2 * hidden, dtype=dtype), *more


_ROWS: dict[str, tuple[Callable[..., tuple[Any, ...]], int]] = {
    "silu_and_mul": (_gated, 3),
    "fused_add_rms_norm": (_fused_add, 4),
    "rms_norm": (_norm, 2),
}
"""Op to its arguments and to the rows of the hidden size that a call reads and writes."""

_FEWER: dict[str, tuple[Callable[..., tuple[Any, ...]], int, tuple[Any, ...]]] = {
    "gelu_and_mul": (_gated, 3, ("tanh",)),
    "mul_and_silu": (_gated, 3, ()),
    "gemma_rms_norm": (_norm, 2, ()),
    "fused_add_gemma_rms_norm": (_fused_add, 4, ()),
}


# ------------------------------------------------------------------------------- heads of attention


def _projection(
    tokens: int, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A projection to query, key and value, and these three as slices of it."""
    widths = [heads[0] * HEAD, heads[1] * HEAD, heads[1] * HEAD]
    qkv = torch.randn(tokens, sum(widths), dtype=dtype)
    return qkv, list(qkv.split(widths, dim=-1))


def _angles(dtype: torch.dtype) -> torch.Tensor:
    """Real cosines and sines: with these, a rotation in place can be repeated for ever."""
    frequencies = 1e6 ** -(torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angles = torch.arange(MAX_POSITION, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def _positions(tokens: int) -> torch.Tensor:
    return torch.randint(0, MAX_POSITION, (tokens,))


def _rope(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    _, (query, key, _) = _projection(tokens, heads, dtype)
    return _positions(tokens), query, key, HEAD, _angles(dtype), True


def _head_norm(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    _, (query, _, _) = _projection(tokens, heads, dtype)
    return query.unflatten(-1, (heads[0], HEAD)), _weight(HEAD, dtype), EPSILON


def _pages(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Slots as a decode step has them (a block for each token), or a prefill (blocks filled)."""
    block = 16
    blocks = tokens + 8 if tokens <= 512 else tokens // block + 8
    _, (_, key, value) = _projection(tokens, heads, dtype)
    caches = (torch.zeros(blocks, block, heads[1], HEAD, dtype=dtype) for _ in range(2))
    order, at = torch.randperm(blocks), torch.arange(tokens)
    slots = order[at] * block + at % block if tokens <= 512 else order[at // block] * block + (
        at % block
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.float32)
    rows = (x.unflatten(-1, (heads[1], HEAD)) for x in (key, value))
    return *rows, *caches, slots, "auto", one, one


def _qk_norm_rope(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    qkv, _ = _projection(tokens, heads, dtype)
    weights = _weight(HEAD, dtype), _weight(HEAD, dtype)
    counts = heads[0], heads[1], heads[1]
    return qkv, *counts, HEAD, EPSILON, *weights, _angles(dtype), True, _positions(tokens)


_HEADS: tuple[tuple[str, str, Callable[..., tuple[Any, ...]], Callable[[int, int], int]], ...] = (
    ("rotary_embedding", "rotary_embedding", _rope, lambda q, k: 2 * (q + k)),
    (FUSED, FUSED, _qk_norm_rope, lambda q, k: 2 * (q + k)),
    (QK, "rms_norm", _head_norm, lambda q, k: 2 * q),
    ("reshape_and_cache_flash", "reshape_and_cache_flash", _pages, lambda q, k: 4 * k),
)
"""Table, op, arguments, and the heads that a token's call reads and writes."""


def separate(
    norm_q: Callable[..., Any],
    norm_k: Callable[..., Any],
    rope: Callable[..., Any],
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_qk_norm_rope` as a model without it computes it: query, key and value, where the
    first two have got memory of their own."""
    widths = [n * head_dim for n in (num_heads_q, num_heads_k, num_heads_v)]
    q, k, v = qkv.split(widths, dim=-1)
    q = norm_q(q.unflatten(-1, (num_heads_q, head_dim)), q_weight, eps).flatten(-2)
    k = norm_k(k.unflatten(-1, (num_heads_k, head_dim)), k_weight, eps).flatten(-2)
    q, k = rope(position_ids, q, k, head_dim, cos_sin_cache, is_neox)
    return q, k, v


def batch_arguments(
    op: str, dtype: str, tokens: int
) -> list[tuple[int | str, Callable[[], tuple[Any, ...]]]]:
    """A call with so many tokens, for each of some sizes; empty where no sizes are known."""
    half = _half(dtype)
    sized: list[tuple[int | str, Callable[[], tuple[Any, ...]]]] = []
    if op in _ROWS:
        make = _ROWS[op][0]
        sized = [(size, partial(make, tokens, size, half)) for size in (*HIDDEN, 576, 1001)]
    if op in _FEWER:
        make, _, more = _FEWER[op]
        return [(size, partial(make, tokens, size, half, *more)) for size in (1024, 7168, 1001)]
    makers = [make for _, name, make, _ in _HEADS if name == op]
    return sized + [
        (f"{q}/{k}", partial(make, tokens, (q, k), half))
        for make in makers
        for q, k in ((32, 8), (16, 8))
    ]


# --------------------------------------------------------------------------------------- the points


def points(quick: bool = False) -> Iterator[Point]:
    """All of them, those that matter most first."""
    hidden, tokens = QUICK if quick else (HIDDEN, TOKENS)
    yield from _rows_points("bfloat16", hidden, tokens)
    head_sizes = ((32, 8),) if quick else ((32, 8), (16, 8))
    yield from _heads_points("bfloat16", head_sizes, tokens)
    if quick:
        return
    yield from _rows_points("float16", (4096,), THREE)
    yield from _heads_points("float16", ((32, 8),), THREE)
    for dtype in ("bfloat16", "float16"):
        for op, (make, rows, more) in _FEWER.items():
            for count in (1, *THREE) if dtype == "bfloat16" else THREE:
                yield _row_point(op, dtype, 4096, count, rows, partial(make, count, 4096), more)


def _row_point(
    op: str,
    dtype: str,
    hidden: int,
    tokens: int,
    rows: int,
    make: Callable[..., tuple[Any, ...]],
    more: tuple[Any, ...] = (),
) -> Point:
    moved = rows * tokens * hidden * _half(dtype).itemsize
    return Point(op, op, dtype, hidden, tokens, moved, partial(make, _half(dtype), *more))


def _rows_points(dtype: str, hidden: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[Point]:
    for op, (make, rows) in _ROWS.items():
        for size in hidden:
            for count in tokens:
                yield _row_point(op, dtype, size, count, rows, partial(make, count, size))


def _heads_points(
    dtype: str, sizes: tuple[tuple[int, int], ...], tokens: tuple[int, ...]
) -> Iterator[Point]:
    for group, op, make, moved_heads in _HEADS:
        for heads in sizes:
            for count in tokens:
                moved = moved_heads(*heads) * count * HEAD * _half(dtype).itemsize
                arguments = partial(make, count, heads, _half(dtype))
                size = f"{heads[0]}/{heads[1]}"
                yield Point(group, op, dtype, size, count, moved, arguments)
