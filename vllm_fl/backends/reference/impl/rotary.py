# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in plain PyTorch."""

from __future__ import annotations

import torch

from ..reference import backend


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, is_neox: bool
) -> torch.Tensor:
    if x.numel() == 0:  # view(0, -1, ...) is ambiguous
        return x.clone()
    rotary_dim = 2 * cos.shape[-1]
    heads = x.view(cos.shape[0], -1, head_size)
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


@backend.implements()
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query, key: (tokens, heads * head_size) or (tokens, heads, head_size) -> new tensors of
    the same shapes; cos_sin_cache: (max_position, rotary_dim)."""
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
    rotated = _rotate(query, cos, sin, head_size, is_neox)
    return rotated, None if key is None else _rotate(key, cos, sin, head_size, is_neox)
