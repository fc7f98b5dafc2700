# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by vLLM's CPU kernel.

It rotates in place, and wrongly without a word where heads are a dimension of their own, or
where positions or the cache are views; a transposed query or, in bfloat16 and neox style, a
rotary_dim of 20, 36, 40, 72 or 100 ends the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cpu import backend
from .common import DTYPES, dtype_reason

_NEOX_STEP = 16


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    rotary_dim, head_size = facts["rotary_dim"], facts["head_size"]
    if rotary_dim > head_size:
        return f"rotary_dim {rotary_dim} is above head_size {head_size}"
    if facts["is_neox"] and rotary_dim % _NEOX_STEP:
        return f"rotary_dim {rotary_dim} is not a multiple of {_NEOX_STEP} (neox style)"
    return True


def _supports_heads(name: str, x: torch.Tensor, positions: torch.Tensor) -> bool | str:
    if x.dim() != positions.dim() + 1:
        return f"{name} has {x.dim()} dimensions for {positions.dim()}-D positions"
    if not x.is_contiguous() and (x.dim() != 2 or x.stride(1) != 1):
        return f"{name} has strides {list(x.stride())}"
    return True


def _supports(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> bool | str:
    dtype = query.dtype
    if dtype not in DTYPES:
        return dtype_reason(dtype)
    if cos_sin_cache.dtype is not dtype:
        return f"cos_sin_cache is {cos_sin_cache.dtype}, query is {dtype}"
    if positions.dtype is not torch.int64:
        return f"positions are {positions.dtype}, not int64"
    if not (positions.is_contiguous() and cos_sin_cache.is_contiguous()):
        return "positions or cos_sin_cache is not contiguous"
    verdict = _supports_heads("query", query, positions)
    if verdict is not True or key is None:
        return verdict
    if key.dtype is not dtype:
        return f"key is {key.dtype}, query is {dtype}"
    return _supports_heads("key", key, positions)


@backend.implements(
    supports=_supports,
    supports_layer=_supports_layer,
    mutates=("query", "key"),
    batch_invariant=True,
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In place on query and key: (tokens, heads * head_size). Returns both."""
    torch.ops._C.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key
