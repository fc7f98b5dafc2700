# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dispatch.types import OpSignature

if TYPE_CHECKING:
    import torch

__all__ = ["ROTARY_EMBEDDING"]


def _rotary_facts(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> dict[str, Any]:
    return {
        "head_size": head_size,
        "rotary_dim": cos_sin_cache.shape[-1],
        "is_neox": is_neox,
    }


ROTARY_EMBEDDING = OpSignature.parse(
    "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
    inplace=("query", "key"),
    facts=_rotary_facts,
    fact_names=("head_size", "rotary_dim", "is_neox"),
    summary=(
        "Rotates the first rotary_dim channels of each head by its token's position; "
        "positions: (tokens,) or any shape with as many elements; query and key: "
        "(tokens, heads * head_size) or (tokens, heads, head_size), key may be None; "
        "cos_sin_cache: (max_position, rotary_dim), cosines then sines. Returns (query, key)."
    ),
)
