# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (https://arxiv.org/abs/2104.09864), and its form for positions in
time, height and width (https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single
from .inputs import MAX_POSITION, cos_sin_cache, rows, with_special

__all__ = ["CONTRACTS", "MROTARY_EMBEDDING", "ROTARY_EMBEDDING"]

# --------------------------------------------------------------------------- the references
#
# Equal to vLLM's forward_native bit for bit, with contiguous results.


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, is_neox: bool
) -> torch.Tensor:
    """cos, sin: (tokens, rotary_dim / 2)."""
    if x.numel() == 0:  # reshape(0, -1, ...) is ambiguous
        return x.new_empty(x.shape)
    rotary_dim = 2 * cos.shape[-1]
    heads = x.reshape(cos.shape[0], -1, head_size)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if is_neox:
        first, second = torch.chunk(turned, 2, dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    low, high = first * cos - second * sin, second * cos + first * sin
    if is_neox:
        turned = torch.cat((low, high), dim=-1)
    else:
        turned = torch.stack((low, high), dim=-1).flatten(-2)
    return torch.cat((turned, kept), dim=-1).contiguous().reshape(x.shape)


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
    rotated = _rotate(query, cos, sin, head_size, is_neox)
    return rotated, None if key is None else _rotate(key, cos, sin, head_size, is_neox)


def _of_sections(x: torch.Tensor, section: Sequence[int], interleaved: bool) -> torch.Tensor:
    """Each channel from time, height or width. x: (3, tokens, channels) -> (tokens, channels)."""
    if not interleaved:
        parts = x.split(list(section), dim=-1)
        return torch.cat([part[i] for i, part in enumerate(parts)], dim=-1)
    channel = torch.arange(x.shape[-1], device=x.device)
    height = (channel % 3 == 1) & (channel < 3 * section[1])
    width = (channel % 3 == 2) & (channel < 3 * section[2])
    return torch.where(width, x[2], torch.where(height, x[1], x[0]))


def _mrotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    if positions.dim() == 2:
        if not mrope_section:
            raise ValueError(
                f"positions of shape {list(positions.shape)} need an mrope_section, found "
                f"{mrope_section}"
            )
        cos, sin = (_of_sections(x, mrope_section, mrope_interleaved) for x in (cos, sin))
    return (
        _rotate(query, cos, sin, head_size, is_neox),
        _rotate(key, cos, sin, head_size, is_neox),
    )


# -------------------------------------------------------------------------- fakes and facts


def _fake(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A torch op cannot return None: without a key the second output has no elements.
    return query.new_empty(query.shape), query.new_empty(0 if key is None else key.shape)


def _mrotary_fake(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _facts(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> dict[str, Any]:
    return {"head_size": head_size, "rotary_dim": cos_sin_cache.shape[-1], "is_neox": is_neox}


def _mrotary_facts(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool = False,
) -> dict[str, Any]:
    return {
        **_facts(positions, query, key, head_size, cos_sin_cache, is_neox),
        "mrope_section": None if mrope_section is None else tuple(mrope_section),
        "mrope_interleaved": mrope_interleaved,
    }


# -------------------------------------------------------------------------------- the cases

_HEADS, _KV_HEADS = 3, 2


def _heads(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    leading: tuple[int, ...],
    head_size: int,
    form: str = "",
    special: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key.

    Args:
        form: "split": they are slices of one projection; "heads": heads are a dimension;
            "permuted": and that dimension comes first in memory.
    """
    if form in ("heads", "permuted"):
        layout = form if form == "permuted" else ""
        query, key = (
            rows((*leading, heads, head_size), dtype, generator, scale=scale, layout=layout)
            for heads in (_HEADS, _KV_HEADS)
        )
    else:
        widths = [heads * head_size for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
        qkv = rows((*leading, sum(widths)), dtype, generator, scale=scale)
        query, key, _ = qkv.split(widths, dim=-1)
        if form != "split":
            query, key = (t.clone(memory_format=torch.contiguous_format) for t in (query, key))
    if special:
        with_special(query)
    return query, key


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    leading: tuple[int, ...] = (5,),
    index: torch.dtype = torch.int64,
    repeated: bool = False,
    head_size: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    key: bool = True,
    **settings: Any,
) -> tuple[Any, ...]:
    positions = torch.randint(0, MAX_POSITION, leading, generator=generator).to(index)
    if repeated:
        positions[1:] = positions[0]
    query, k = _heads(dtype, generator, leading=leading, head_size=head_size, **settings)
    cache = cos_sin_cache(rotary_dim or head_size, dtype, generator)
    return positions, query, k if key else None, head_size, cache, is_neox


_ANY: dict[str, dict[str, Any]] = {
    "one token": {"leading": (1,)},
    "zero tokens": {"leading": (0,)},
    "many tokens": {"leading": (33,)},
    "slices of qkv": {"form": "split"},
    "3-D, heads": {"form": "heads"},
    "3-D, heads permuted": {"form": "permuted"},
    "odd size": {"head_size": 36},
    "prime size": {"leading": (7,), "head_size": 2 * 17},
    "repeated positions": {"repeated": True},
    "int32 positions": {"index": torch.int32},
    "tiny values": {"scale": 1e-3},
    "huge values": {"scale": 1e4},
    "inf and nan": {"special": True},
}


def _cases() -> tuple[Case, ...]:
    variants: dict[str, dict[str, Any]] = {
        **_ANY,
        "no key": {"key": False},
        "3-D, a batch": {"leading": (2, 3)},
        "partial": {"rotary_dim": 32},
        "partial, slices of qkv": {"rotary_dim": 32, "form": "split"},
        "odd rotary_dim": {"rotary_dim": 20},
        "one pair": {"rotary_dim": 2},
    }
    return tuple(
        Case(f"{name}, {style}", partial(_inputs, is_neox=style == "neox", **settings))
        for style in ("neox", "gptj")
        for name, settings in variants.items()
    )


def _mrotary_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    leading: tuple[int, ...] = (5,),
    index: torch.dtype = torch.int64,
    repeated: bool = False,
    text: bool = False,
    head_size: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    interleaved: bool = False,
    **settings: Any,
) -> tuple[Any, ...]:
    """text: time, height and width are one, and given once."""
    shape = leading if text else (3, *leading)
    positions = torch.randint(0, MAX_POSITION, shape, generator=generator).to(index)
    if repeated:
        positions[..., 1:] = positions[..., :1]
    query, key = _heads(dtype, generator, leading=leading, head_size=head_size, **settings)
    half = (rotary_dim or head_size) // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    cache = cos_sin_cache(2 * half, dtype, generator)
    return positions, query, key, head_size, cache, is_neox, section, interleaved


def _mrotary_cases() -> tuple[Case, ...]:
    variants: dict[str, dict[str, Any]] = {
        **{f"{name}, sections": settings for name, settings in _ANY.items()},
        "text": {"text": True},
        "text, int32 positions": {"text": True, "index": torch.int32},
        "partial, sections": {"rotary_dim": 32},
        "interleaved": {"interleaved": True},
        "partial, interleaved": {"interleaved": True, "rotary_dim": 32},
        "slices of qkv, interleaved": {"interleaved": True, "form": "split"},
    }
    return tuple(
        Case(f"{name}, {style}", partial(_mrotary_inputs, is_neox=style == "neox", **settings))
        for style in ("neox", "gptj")
        for name, settings in variants.items()
    )


# ------------------------------------------------------- the tolerances and the terms behind

_TOLERANCES = half_and_single(
    half=2.5,
    single=2.5,
    why="two products and their sum, each rounded once, relative to the terms: 2 ulp at most, and "
    "0.5 for the float32 inside an implementation that rounds only at the end",
)


def _terms(x: torch.Tensor, head_size: int, rotary_dim: int, is_neox: bool) -> torch.Tensor:
    """|a| + |b| for each pair (a, b) that is rotated together: what the products add up to."""
    heads = x.abs().reshape(-1, head_size) if x.numel() else x.reshape(0, head_size)
    turned, kept = heads[:, :rotary_dim], heads[:, rotary_dim:]
    if is_neox:
        partner = turned.roll(rotary_dim // 2, dims=-1)
    else:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat((turned + partner, kept), dim=-1).reshape(x.shape)


def _magnitude(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    *_: Any,
) -> tuple[torch.Tensor | None, ...]:
    rotary_dim = cos_sin_cache.shape[-1]
    return tuple(
        None if x is None else _terms(x, head_size, rotary_dim, is_neox) for x in (query, key)
    )


# ---------------------------------------------------------------------------- the contracts

_TOKENS_LEAD = "a query has tokens, and heads or a batch of sequences, before its last dimension"

ROTARY_EMBEDDING = OpContract(
    signature=OpSignature.parse(
        "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
        inplace=("query", "key"),
        facts=_facts,
        fact_names=("head_size", "rotary_dim", "is_neox"),
        summary=(
            "Rotates the first rotary_dim channels of each head by its token's position; "
            "positions: (tokens,) or any shape with as many elements; query and key: "
            "(tokens, heads * head_size) or (tokens, heads, head_size), key may be None; "
            "cos_sin_cache: (max_position, rotary_dim), cosines then sines. "
            "Returns (query, key)."
        ),
    ),
    schema=(
        "(Tensor positions, Tensor query, Tensor? key, SymInt head_size, "
        "Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)"
    ),
    reference=_rotary_embedding,
    fake=_fake,
    arrays={
        "positions": "index[tokens] or index[batch, seq]",
        "query": "T[tokens, heads*head_size] or T[tokens, heads, head_size] or "
        "T[batch, seq, heads*head_size]",
        "key": "(T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size] or "
        "T[batch, seq, kv_heads*head_size])?",
        "cos_sin_cache": "float[max_position, rotary_dim]",
    },
    results=(
        "T[tokens, heads*head_size] or T[tokens, heads, head_size] or "
        "T[batch, seq, heads*head_size]",
        "(T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size] or "
        "T[batch, seq, kv_heads*head_size])?",
    ),
    constraints=("rotary_dim <= head_size", "rotary_dim % 2 == 0"),
    without={"leading shapes": _TOKENS_LEAD},
    batched=("positions", "query", "key"),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
            "the layer's forward",
        ),
    ),
    source="https://arxiv.org/abs/2104.09864",
    cases=_cases(),
    tolerances=_TOLERANCES,
    magnitude=_magnitude,
)

MROTARY_EMBEDDING = OpContract(
    signature=OpSignature.parse(
        "mrotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, "
        "mrope_section, mrope_interleaved=False)",
        inplace=("query", "key"),
        facts=_mrotary_facts,
        fact_names=("head_size", "rotary_dim", "is_neox", "mrope_section", "mrope_interleaved"),
        summary=(
            "Rotates the first rotary_dim channels of each head; positions: (3, tokens), in time, "
            "height and width, each of which turns its section of the rotary_dim / 2 pairs, one "
            "section after the other or in turns (interleaved); or (tokens,), and sections do not "
            "matter. query, key and cos_sin_cache as for rotary_embedding. Returns (query, key)."
        ),
    ),
    schema=(
        "(Tensor positions, Tensor query, Tensor key, SymInt head_size, Tensor cos_sin_cache, "
        "bool is_neox, int[]? mrope_section, bool mrope_interleaved=False) -> (Tensor, Tensor)"
    ),
    reference=_mrotary_embedding,
    fake=_mrotary_fake,
    arrays={
        "positions": "index[tokens] or index[3, tokens]",
        "query": "T[tokens, heads*head_size] or T[tokens, heads, head_size]",
        "key": "T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size]",
        "cos_sin_cache": "float[max_position, rotary_dim]",
    },
    results=(
        "T[tokens, heads*head_size] or T[tokens, heads, head_size]",
        "T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size]",
    ),
    constraints=("rotary_dim <= head_size", "rotary_dim % 2 == 0"),
    without={"leading shapes": _TOKENS_LEAD},
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding",
            "the layer's forward",
        ),
    ),
    source="https://arxiv.org/abs/2409.12191",
    cases=_mrotary_cases(),
    tolerances=_TOLERANCES,
    magnitude=_magnitude,
)

CONTRACTS = (ROTARY_EMBEDDING, MROTARY_EMBEDDING)
