# SPDX-License-Identifier: Apache-2.0
"""The key-value cache: the contracts' own reference, in place.

A copy of the cache for each layer and step is more than any device has room for.
"""

from __future__ import annotations

import torch

from ....ops.cache import write_latent, write_pages
from ..reference import backend


@backend.implements(mutates=("key_cache", "value_cache"))
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
    """Write the rows, and return the caches that were given."""
    write_pages(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    return key_cache, value_cache


@backend.implements(mutates=("kv_cache",))
def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Write the rows, and return the cache that was given."""
    write_latent(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)
    return kv_cache
