# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["CONTRACTS", "ROTARY_EMBEDDING"]


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, is_neox: bool
) -> torch.Tensor:
    if x.numel() == 0:  # reshape(0, -1, ...) is ambiguous
        return x.clone()
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
    return torch.cat((turned, kept), dim=-1).reshape(x.shape)


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


def _facts(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> dict[str, Any]:
    return {"head_size": head_size, "rotary_dim": cos_sin_cache.shape[-1], "is_neox": is_neox}


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 5,
    head_size: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    key: bool = True,
    split: bool = False,
    heads_apart: bool = False,
    scale: float = 1.0,
) -> tuple[Any, ...]:
    heads, kv_heads = 3, 2
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    qkv = (scale * torch.randn(tokens, sum(widths), generator=generator)).to(dtype)
    query, k, _ = qkv.split(widths, dim=-1)
    if not split:
        query, k = (t.clone(memory_format=torch.contiguous_format) for t in (query, k))
    if heads_apart:
        query, k = query.view(tokens, heads, head_size), k.view(tokens, kv_heads, head_size)
    half = (rotary_dim or head_size) // 2
    angles = 6.3 * torch.rand(50, half, generator=generator)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    return positions, query, k if key else None, head_size, cache, is_neox


def _cases() -> tuple[Case, ...]:
    variants: dict[str, dict[str, Any]] = {
        "one token": {"tokens": 1},
        "zero tokens": {"tokens": 0},
        "many tokens": {"tokens": 33},
        "no key": {"key": False},
        "slices of qkv": {"split": True},
        "heads as a dimension": {"heads_apart": True},
        "partial": {"rotary_dim": 32},
        "odd rotary_dim": {"rotary_dim": 20},
        "odd head_size": {"head_size": 36},
        "huge values": {"scale": 1e4},
    }
    return tuple(
        Case(f"{name}, {style}", partial(_inputs, is_neox=style == "neox", **settings))
        for style in ("neox", "gptj")
        for name, settings in variants.items()
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
) -> tuple[torch.Tensor | None, ...]:
    rotary_dim = cos_sin_cache.shape[-1]
    return tuple(
        None if x is None else _terms(x, head_size, rotary_dim, is_neox) for x in (query, key)
    )


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
        "positions": "index[tokens]",
        "query": "T[tokens, heads*head_size] or T[tokens, heads, head_size]",
        "key": "(T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size])?",
        "cos_sin_cache": "float[max_position, rotary_dim]",
    },
    results=(
        "T[tokens, heads*head_size] or T[tokens, heads, head_size]",
        "(T[tokens, kv_heads*head_size] or T[tokens, kv_heads, head_size])?",
    ),
    constraints=("rotary_dim <= head_size", "rotary_dim % 2 == 0"),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
            "the layer's forward",
        ),
    ),
    source="https://arxiv.org/abs/2104.09864",
    cases=_cases(),
    tolerances=half_and_single(
        half=2.5,
        single=4,
        why="two products and their sum, each rounded once, relative to the terms: 1.5 ulp, and "
        "up to one more where the sum falls into a lower binade than its terms",
    ),
    magnitude=_magnitude,
)

CONTRACTS = (ROTARY_EMBEDDING,)
