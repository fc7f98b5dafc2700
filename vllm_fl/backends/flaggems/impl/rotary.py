# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by FlagGems, never in place.

Its in-place kernel loads both halves of a head in each lane and stores without a barrier: a
race between warps (FlagGems issue #5142). The other one writes new tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import fits, tensor_reason

kernels = backend.kernels


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    rotary_dim, head_size = facts["rotary_dim"], facts["head_size"]
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        return f"rotary_dim {rotary_dim} is not even and within 1 and head_size {head_size}"
    return True


def _supports_heads(name: str, x: torch.Tensor, tokens: int, head_size: int) -> bool | str:
    shape = x.shape
    if len(shape) < 2 or shape[0] != tokens or shape[-1] % head_size:
        return f"{name} has shape {list(shape)} for {tokens} positions and heads of {head_size}"
    return True


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
    if cos_sin_cache.stride(-1) != 1:
        return "cos_sin_cache is not contiguous"
    tokens = positions.numel()
    verdict = _supports_heads("query", query, tokens, head_size)
    if verdict is not True or key is None:
        return verdict
    return _supports_heads("key", key, tokens, head_size)


@planned
def _rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cache: torch.Tensor,
    is_neox: bool,
) -> Any:
    """query and key: (tokens, heads, rotary_dim)."""
    cos, sin = cache.chunk(2, dim=-1)
    return kernels.apply_rotary_pos_emb(
        query, key, cos, sin, position_ids=positions, rotary_interleaved=not is_neox
    )


def _heads(x: torch.Tensor, head_size: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, head_size)) if x.dim() == 2 else x


def _assembled(turned: torch.Tensor, like: torch.Tensor, head_size: int) -> torch.Tensor:
    """The rotated channels, and behind them those that are kept, in the shape of `like`."""
    rotary_dim = turned.shape[-1]
    if rotary_dim != head_size:
        kept = _heads(like, head_size)[..., rotary_dim:]
        turned = torch.cat((turned, kept), dim=-1)
    return turned.contiguous().view(like.shape)  # the kernel keeps the order of dimensions


@backend.implements(
    symbols=("apply_rotary_pos_emb",),
    supports=_supports,
    supports_layer=_supports_layer,
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
    """query, key: (tokens, heads * head_size) or (tokens, heads, head_size) -> new tensors."""
    if not query.numel():
        return query.clone(), None if key is None else key.clone()
    rotary_dim = cos_sin_cache.shape[-1]
    q = _heads(query, head_size)[..., :rotary_dim]
    # The kernel wants a key: without one, the query's first head is turned twice.
    k = q[:, :1] if key is None else _heads(key, head_size)[..., :rotary_dim]
    turned_q, turned_k = _rotate(positions.flatten(), q, k, cos_sin_cache, is_neox)
    rotated = _assembled(turned_q, query, head_size)
    return rotated, None if key is None else _assembled(turned_k, key, head_size)
