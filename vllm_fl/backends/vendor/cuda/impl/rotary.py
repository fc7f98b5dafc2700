# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by vLLM's CUDA kernel, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cuda import backend
from .common import apart, fits, short, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    rotary_dim, head_size = facts["rotary_dim"], facts["head_size"]
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        return f"rotary_dim {rotary_dim} is not even and within 2 and head_size {head_size}"
    return True


def _supports_heads(name: str, x: torch.Tensor, tokens: int, head_size: int) -> bool | str:
    """The kernel takes (tokens, heads * head_size) or (tokens, heads, head_size), each row of
    heads dense; rows may lie apart."""
    shape, strides = x.shape, x.stride()
    if x.dim() not in (2, 3) or shape[0] != tokens:
        return f"{name} has shape {list(shape)} for {tokens} positions"
    if strides[-1] != 1 or (tokens > 1 and strides[0] < x.numel() // tokens):
        return f"{name} has strides {list(strides)} for shape {list(shape)}"
    if x.dim() == 2:
        return shape[1] % head_size == 0 or f"{name} has rows of {shape[1]}, heads of {head_size}"
    dense = shape[2] == head_size and (shape[1] == 1 or strides[1] == head_size)
    return dense or f"{name} has shape {list(shape)} and strides {list(strides)}"


def _supports(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> bool | str:
    if not fits(query):
        return tensor_reason(query)
    elsewhere = apart(query, positions=positions, key=key, cos_sin_cache=cos_sin_cache)
    if elsewhere is not None:
        return elsewhere
    if head_size < 1 or cos_sin_cache.dim() != 2 or not 0 < cos_sin_cache.shape[1] <= head_size:
        return f"cos_sin_cache has shape {list(cos_sin_cache.shape)} for heads of {head_size}"
    if cos_sin_cache.dtype is not query.dtype:
        return f"cos_sin_cache is {short(cos_sin_cache.dtype)}, query is {short(query.dtype)}"
    if positions.dtype is not torch.int64:
        return f"positions are {short(positions.dtype)}, not int64"
    if positions.dim() != 1 or not (positions.is_contiguous() and cos_sin_cache.is_contiguous()):
        return "positions are not one dense dimension, or cos_sin_cache is not contiguous"
    tokens = positions.numel()
    if not tokens:
        return "there are no tokens: the launch would be empty, which CUDA refuses"
    verdict = _supports_heads("query", query, tokens, head_size)
    if verdict is not True or key is None:
        return verdict
    if not key.numel() or query.numel() % key.numel():  # the kernel raises
        return f"{query.numel()} elements of query are no multiple of key's {key.numel()}"
    if key.dtype is not query.dtype:
        return f"key is {short(key.dtype)}, query is {short(query.dtype)}"
    return _supports_heads("key", key, tokens, head_size)


@backend.calling("_C.rotary_embedding").implements(
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
    """In place on query and key: (tokens, heads * head_size) or (tokens, heads, head_size)."""
    torch.ops._C.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key
