# SPDX-License-Identifier: Apache-2.0
"""The paged key-value cache by torch_npu's `npu_scatter_pa_kv_cache`.

Its default layout is NZ, in which a cache of vLLM's shape is garbage without a word: the layout
is named in every call. Negative slots, which vLLM pads with, are not documented: their tokens are
taken out before. How many are left depends on the data, so a graph cannot hold this op; a caller
that captures one slices its tokens beforehand.

concat_and_cache_mla has no operator here: `npu_kv_rmsnorm_rope_cache` normalizes and rotates too,
and writes two caches where vLLM's is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .....ops.cache import UNQUANTIZED
from ..ascend import backend
from .common import fits, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    dtype = facts["kv_cache_dtype"]
    return dtype in UNQUANTIZED or f"kv_cache_dtype '{dtype}' is quantized"


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
    if not fits(key):
        return tensor_reason(key)
    others = {"value": value, "key_cache": key_cache, "value_cache": value_cache}
    for name, x in others.items():
        if x.dtype is not key.dtype:
            return f"{name} is {x.dtype}, key is {key.dtype}"
    for name in ("key_cache", "value_cache"):
        if not others[name].is_contiguous():
            return f"{name} is not contiguous (blocks, block_size, heads, head_size)"
    return True


@backend.implements(
    supports=_supports, supports_layer=_supports_layer, mutates=("key_cache", "value_cache")
)
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
    """In place on the caches: (blocks, block_size, heads, head_size). Returns both."""
    tokens = slot_mapping.shape[0]
    real = (slot_mapping >= 0).nonzero().flatten()
    if real.numel() and key_cache.numel():
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key[:tokens][real].contiguous(),
            value[:tokens][real].contiguous(),
            key_cache,
            value_cache,
            slot_mapping[real].contiguous(),
            cache_mode="Norm",
        )
    return key_cache, value_cache
