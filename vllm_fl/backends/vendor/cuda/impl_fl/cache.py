# SPDX-License-Identifier: Apache-2.0
"""Writing the key-value cache by our GPU kernel, in place: heads and slots at any distances. A slot
that is negative, or not within the cache, is left out. Quantized caches are for others."""

from __future__ import annotations

import torch

from ..fl import backend, kernels


def _supports(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> bool | str:
    return kernels.supports_reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


@backend.implements(supports=_supports, mutates=("key_cache", "value_cache"), batch_invariant=True)
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: the rows of key and value go to their slots. Returns the caches."""
    return kernels.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )
