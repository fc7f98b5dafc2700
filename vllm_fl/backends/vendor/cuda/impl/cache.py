# SPDX-License-Identifier: Apache-2.0
"""Writing the key-value cache by vLLM's CUDA kernels, in place."""

from __future__ import annotations

import torch

from .....ops.cache import UNQUANTIZED
from ..cuda import backend
from .common import apart, fits, short, tensor_reason

_E4M3 = (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_E5M2 = (torch.uint8, torch.float8_e5m2, torch.float8_e5m2fnuz)
_QUANTIZED = {"fp8": _E4M3, "fp8_e4m3": _E4M3, "fp8_e5m2": _E5M2}
"""The kernels' kinds of caches, and what their elements may be."""


def _kind(kv_cache_dtype: str) -> str:
    """As the kernels call it: "auto" where the cache has the dtype of the rows."""
    return "auto" if kv_cache_dtype in UNQUANTIZED else kv_cache_dtype


def _form(x: torch.Tensor) -> str:
    return f"{short(x.dtype)}{list(x.shape)}"


def _supports_slots(
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    rows: torch.dtype,
    cache: torch.dtype,
    scales: dict[str, torch.Tensor],
    counts: tuple[int, ...],
) -> bool | str:
    """What both ops ask.

    Args:
        rows, cache: dtypes of what is written, and of where.
        counts: how many scales there may be.
    """
    if slot_mapping.dtype is not torch.int64 or slot_mapping.dim() != 1:
        return f"slot_mapping is {_form(slot_mapping)}, not int64 of one dimension"
    known = (*sorted(UNQUANTIZED), *_QUANTIZED)
    if kv_cache_dtype not in known:
        return f"kv_cache_dtype '{kv_cache_dtype}' is not one of {', '.join(known)}"
    if cache not in _QUANTIZED.get(kv_cache_dtype, (rows,)):
        return f"the cache is {short(cache)}, kv_cache_dtype '{kv_cache_dtype}', rows {short(rows)}"
    if kv_cache_dtype in _QUANTIZED:
        for name, scale in scales.items():
            if scale.dtype is not torch.float32 or scale.numel() not in counts:
                return f"{name} is {_form(scale)}, not {' or '.join(map(str, counts))} of float32"
    return slot_mapping.is_contiguous() or "slot_mapping is not contiguous"


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
    others = {"value": value, "key_cache": key_cache, "value_cache": value_cache,
              "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale}  # fmt: skip
    if (elsewhere := apart(key, **others)) is not None:
        return elsewhere
    if key.dim() != 3 or value.shape != key.shape or value.dtype is not key.dtype:
        return f"key is {_form(key)}, value is {_form(value)}"
    heads, head_size = key.shape[1:]
    if key_cache.dim() != 4 or key_cache.shape[2:] != key.shape[1:]:
        return f"the cache is {_form(key_cache)}, key is {_form(key)}"
    if value_cache.shape != key_cache.shape or value_cache.dtype is not key_cache.dtype:
        return f"the caches are {_form(key_cache)} and {_form(value_cache)}"
    if slot_mapping.numel() > key.shape[0]:
        return f"there are {slot_mapping.numel()} slots for {key.shape[0]} keys"
    if key.stride(2) != 1 or value.stride(2) != 1:
        return "a head of key or value is not dense"
    if key_cache.stride() != value_cache.stride():
        return "the caches differ in their strides"
    for name, x in (("key", key), ("value", value)):
        if heads > 1 and x.stride(1) != head_size:
            return f"the heads of {name} are {x.stride(1)} elements apart"
    if key_cache.stride(3) != 1:
        return "a head of the caches is not dense"
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    counts = (1,) if heads == 1 else (1, heads)
    dtypes = key.dtype, key_cache.dtype
    return _supports_slots(slot_mapping, kv_cache_dtype, *dtypes, scales, counts)


@backend.calling("_C_cache_ops.reshape_and_cache_flash").implements(
    supports=_supports_pages, mutates=("key_cache", "value_cache"), batch_invariant=True
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
    """In place: the rows of key and value go to their slots. Returns the caches."""
    if not slot_mapping.numel():  # an empty launch is an error
        return key_cache, value_cache
    kind = _kind(kv_cache_dtype)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kind, k_scale, v_scale
    )
    return key_cache, value_cache


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
    others = {"k_pe": k_pe, "kv_cache": kv_cache, "slot_mapping": slot_mapping, "scale": scale}
    if (elsewhere := apart(kv_c, **others)) is not None:
        return elsewhere
    if kv_c.dim() != 2 or k_pe.dim() != 2 or k_pe.dtype is not kv_c.dtype:
        return f"kv_c is {_form(kv_c)}, k_pe is {_form(k_pe)}"
    if kv_cache.dim() != 3 or kv_cache.shape[2] != kv_c.shape[1] + k_pe.shape[1]:
        return f"the cache is {_form(kv_cache)}, kv_c is {_form(kv_c)}, k_pe is {_form(k_pe)}"
    if slot_mapping.numel() > min(kv_c.shape[0], k_pe.shape[0]):
        return f"there are {slot_mapping.numel()} slots for {kv_c.shape[0]} rows"
    if kv_c.stride(-1) != 1 or k_pe.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        return "a row of kv_c, k_pe or the cache is not dense"
    dtypes = kv_c.dtype, kv_cache.dtype
    return _supports_slots(slot_mapping, kv_cache_dtype, *dtypes, {"scale": scale}, (1,))


@backend.calling("_C_cache_ops.concat_and_cache_mla").implements(
    supports=_supports_latent, mutates=("kv_cache",), batch_invariant=True
)
def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    """In place: each token's latent and key go to its slot. Returns the cache."""
    if not slot_mapping.numel():  # an empty launch is an error
        return kv_cache
    torch.ops._C_cache_ops.concat_and_cache_mla(
        kv_c, k_pe, kv_cache, slot_mapping, _kind(kv_cache_dtype), scale
    )
    return kv_cache
