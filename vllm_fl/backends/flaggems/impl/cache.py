# SPDX-License-Identifier: Apache-2.0
"""Writes into the paged cache by FlagGems.

reshape_and_cache_flash reads no strides but those of blocks and of tokens: into a cache whose
heads come before its rows (HND) it writes without a word where other rows lie. Both the string
for the cache's dtype and the scales are ignored: an fp8 cache is filled with bare casts.
concat_and_cache_mla cannot do blocks of columns that are no power of two, up to 512.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import converts_to_fp8, dtype_name, fits, tensor_reason

kernels = backend.kernels

_UNQUANTIZED = frozenset({"auto", "float16", "half", "bfloat16", "float32", "float"})
_FP8 = {"fp8": "fp8", "fp8_e4m3": "fp8e4m3", "fp8_e5m2": "fp8e5m2"}
"""vLLM's name to FlagGems'."""
_COLUMNS = 512


def _supports_pages_layer(facts: Mapping[str, Any]) -> bool | str:
    name = facts["kv_cache_dtype"]
    return name in _UNQUANTIZED or f"kv_cache_dtype '{name}': scales would be ignored"


def _supports_pages(
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
    heads, head_size = key.shape[1:]
    packed = (heads * head_size, head_size, 1)
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if cache.dtype is not rows.dtype:
            return f"{name}_cache is {dtype_name(cache)}, {name} is {dtype_name(rows)}"
        if _strides(rows)[1:] != packed[1:]:
            return f"the heads of {name} are not packed: strides {list(rows.stride())}"
        if _strides(cache)[1:] != packed:
            return f"the rows of {name}_cache are not packed: strides {list(cache.stride())}"
    if key_cache.stride(0) != value_cache.stride(0):
        return "the blocks of key_cache and value_cache have different strides"
    return slot_mapping.is_contiguous() or "slot_mapping is not contiguous"


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides, with those of dimensions of size 1 as in a packed tensor."""
    strides, packed = list(x.stride()), 1
    for dim in reversed(range(x.dim())):
        if x.shape[dim] == 1:
            strides[dim] = packed
        packed = strides[dim] * x.shape[dim]
    return tuple(strides)


@planned
def _write_pages(*args: Any) -> None:
    kernels.reshape_and_cache_flash(*args)


@backend.implements(
    symbols=("reshape_and_cache_flash",),
    supports=_supports_pages,
    supports_layer=_supports_pages_layer,
    mutates=("key_cache", "value_cache"),
    batch_invariant=True,
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
    """In place on the caches, (blocks, block_size, heads, head_size) with packed rows."""
    if slot_mapping.numel() and key_cache.numel():
        _write_pages(key, value, key_cache, value_cache, slot_mapping, "auto", k_scale, v_scale)
    return key_cache, value_cache


def _supports_latent_layer(facts: Mapping[str, Any]) -> bool | str:
    name, rank = facts["kv_cache_dtype"], facts["kv_lora_rank"]
    if name not in _UNQUANTIZED and name not in _FP8:
        return f"kv_cache_dtype '{name}' is not known to it"
    if rank < _COLUMNS and rank & (rank - 1):
        return f"kv_lora_rank {rank} is neither a power of two nor {_COLUMNS} or more"
    return True


def _supports_latent(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> bool | str:
    if not fits(kv_c):
        return tensor_reason(kv_c)
    wanted = torch.uint8 if kv_cache_dtype in _FP8 else kv_c.dtype
    if kv_cache.dtype is not wanted:
        return f"kv_cache is {dtype_name(kv_cache)}, not {str(wanted).removeprefix('torch.')}"
    if kv_cache_dtype in _FP8 and not converts_to_fp8(kv_c.device):
        return "Triton converts to FP8 on compute capability 8.9 and later"
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (kv_c, k_pe, kv_cache)):
        return "the columns of kv_c, k_pe or kv_cache are not packed"
    if kv_cache.device != kv_c.device:
        return f"kv_cache is on {kv_cache.device}, kv_c on {kv_c.device}"
    return slot_mapping.is_contiguous() or "slot_mapping is not contiguous"


@planned
def _write_latent(*args: Any) -> None:
    kernels.concat_and_cache_mla(*args)


@backend.implements(
    symbols=("concat_and_cache_mla",),
    supports=_supports_latent,
    supports_layer=_supports_latent_layer,
    mutates=("kv_cache",),
    batch_invariant=True,
)
def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    """In place on kv_cache, (blocks, block_size, rank + rope), of kv_c's dtype or of bytes."""
    if slot_mapping.numel() and kv_cache.numel():
        name = _FP8.get(kv_cache_dtype, "auto")
        _write_latent(kv_c, k_pe, kv_cache, slot_mapping, name, scale)
    return kv_cache
