# SPDX-License-Identifier: Apache-2.0
"""The norms of query and key and their rotary embedding in one pass by our CPU kernel: a head is
read once and written once, where it lies in the projection.

What it gives is what our kernels of the two ops give one after the other, bit for bit. A position
beyond the cache raises IndexError before anything is written."""

from __future__ import annotations

import torch

from ..fl import backend, kernels


def _supports(
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
) -> bool | str:
    return kernels.supports_fused_qk_norm_rope(
        qkv,
        num_heads_q,
        num_heads_k,
        num_heads_v,
        head_dim,
        eps,
        q_weight,
        k_weight,
        cos_sin_cache,
        is_neox,
        position_ids,
    )


@backend.implements(supports=_supports, mutates=("qkv",), batch_invariant=True)
def fused_qk_norm_rope(
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
) -> torch.Tensor:
    """In place on qkv: (tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim)."""
    return kernels.fused_qk_norm_rope(
        qkv,
        num_heads_q,
        num_heads_k,
        num_heads_v,
        head_dim,
        eps,
        q_weight,
        k_weight,
        cos_sin_cache,
        is_neox,
        position_ids,
    )
