# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by vLLM's CPU kernel.

It rotates in place, and wrongly without a word where heads are a dimension of their own, or
where positions or the cache are views. It takes the number of tokens from the positions and
writes past the end of a shorter query or key. In bfloat16 and neox style, vectors that are not
aligned end the process: a rotary_dim of 20, 36, 40, 72 or 100, a head_size of 36 or 100. A
position beyond the cache reads foreign memory: no guard can tell, because none reads data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cpu import backend
from .common import ALIGNMENT, VECTOR, fits, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    rotary_dim, head_size = facts["rotary_dim"], facts["head_size"]
    if not 0 < rotary_dim <= head_size:
        return f"rotary_dim {rotary_dim} is not within 1 and head_size {head_size}"
    if not facts["is_neox"]:
        return rotary_dim % 2 == 0 or f"rotary_dim {rotary_dim} is odd"
    if rotary_dim % (2 * VECTOR):
        return f"rotary_dim {rotary_dim} is not a multiple of {2 * VECTOR} (neox style)"
    if head_size % VECTOR:
        return f"head_size {head_size} is not a multiple of {VECTOR} (neox style)"
    return True


def _supports_heads(
    name: str, x: torch.Tensor, tokens: int, head_size: int, is_neox: bool
) -> bool | str:
    shape = x.shape
    dims, width = len(shape), shape[-1]
    if dims < 2 or x.numel() != tokens * width:
        return f"{name} has shape {list(shape)} for {tokens} positions"
    if width % head_size:
        return f"{name} has rows of {width}, which is no multiple of head_size {head_size}"
    strides = x.stride()
    pitch = strides[-2]
    if dims == 2:
        regular = strides[1] == 1 and pitch >= width and not (is_neox and pitch % VECTOR)
    else:  # is_contiguous says nothing about the stride of a dimension of size 1
        regular = pitch == width and x.is_contiguous()
    return regular or f"{name} has strides {list(strides)} for shape {list(shape)}"


def _supports(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> bool | str:
    dtype = query.dtype
    if not fits(query):
        return tensor_reason(query)
    if cos_sin_cache.dtype is not dtype:
        return f"cos_sin_cache is {cos_sin_cache.dtype}, query is {dtype}"
    if positions.dtype is not torch.int64:
        return f"positions are {positions.dtype}, not int64"
    if not (positions.is_contiguous() and cos_sin_cache.is_contiguous()):
        return "positions or cos_sin_cache is not contiguous"
    tokens = positions.numel()
    if cos_sin_cache.dim() != 2 or (tokens and not cos_sin_cache.shape[0]):
        return f"cos_sin_cache has shape {list(cos_sin_cache.shape)}"
    verdict = _supports_heads("query", query, tokens, head_size, is_neox)
    if verdict is not True or key is None:
        return verdict
    if key.dtype is not dtype:
        return f"key is {key.dtype}, query is {dtype}"
    return _supports_heads("key", key, tokens, head_size, is_neox)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where the kernel's stores would end the process. Not a matter for the guard:
    only the address tells, and fake tensors have none."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


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
    """In place on query and key: (tokens, heads * head_size). Returns both.

    They may be one tensor, which is turned once, but must not overlap otherwise."""
    q, k = query, None if key is query else key
    if is_neox:
        q, k = _aligned(q), None if k is None else _aligned(k)
    torch.ops._C.rotary_embedding(positions, q, k, head_size, cos_sin_cache, is_neox)
    if q is not query:
        query.copy_(q)
    if key is not None and k is not None and k is not key:
        key.copy_(k)
    return query, key
