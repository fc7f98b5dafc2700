# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by our GPU kernel: query and key may be slices of one projection, heads a
dimension of their own or not, in both styles and any size.

A position that is not within the cache makes its token NaN: on a GPU nobody waits for an error."""

from __future__ import annotations

import torch

from ..fl import backend, kernels


def _supports(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> bool | str:
    return kernels.supports_rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, is_neox
    )


@backend.implements(supports=_supports, mutates=("query", "key"), batch_invariant=True)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In place on query and key: (tokens, heads * head_size) or (tokens, heads, head_size).

    They may be one tensor, which is turned once, but must not overlap otherwise."""
    return kernels.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
