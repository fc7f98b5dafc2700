# SPDX-License-Identifier: Apache-2.0
"""Writes into the paged cache, as the attention backends call for them.

FlashAttention's backend looks the CUDA kernel's function up under a name of its own, Triton's has
a kernel in vLLM's tree. Both run inside the opaque operator of the cache update, where the platform
has one. FlashInfer, FLEX_ATTENTION and AITER call torch's operator itself: no function, no place.
"""

from __future__ import annotations

from typing import Any

from ...ops.cache import FP8, UNQUANTIZED
from .serve import TRITON, FunctionSpec

__all__ = ["CONCAT_AND_CACHE_MLA", "RESHAPE_AND_CACHE_FLASH", "TRITON_RESHAPE_AND_CACHE_FLASH"]


def attention_is_traced() -> bool:
    """Whether a compiler sees what attention does: the platform has no opaque operator for it."""
    from vllm.platforms import current_platform

    return not current_platform.opaque_attention_op()


def _stored(kv_cache_dtype: str) -> bool:
    """Whether the op stores what vLLM calls so, in the form that this platform's kernels read."""
    if kv_cache_dtype in UNQUANTIZED:
        return True
    from vllm.platforms import current_platform

    return kv_cache_dtype in FP8 and not current_platform.is_fp8_fnuz()


def _pages(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    interleaved_v_pack_factor: int = 0,
) -> tuple[Any, ...] | None:
    if interleaved_v_pack_factor or key_cache.dim() != 4 or not _stored(kv_cache_dtype):
        return None
    caches = (key_cache, value_cache)
    return key, value, *caches, slot_mapping, kv_cache_dtype, k_scale, v_scale


def _latent(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    scale: Any,
    skip_scale: bool = False,
) -> tuple[Any, ...] | None:
    if skip_scale or not _stored(kv_cache_dtype):
        return None
    return kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale


RESHAPE_AND_CACHE_FLASH = FunctionSpec(
    op="reshape_and_cache_flash",
    path="vllm._custom_ops:reshape_and_cache_flash",
    callers=(
        "vllm.v1.attention.backends.fa_utils",
        "vllm.v1.attention.backends.flash_attn",
    ),
    arguments=_pages,
    writes=("key_cache", "value_cache"),
    needs=("_C_cache_ops.reshape_and_cache_flash",),
    traced=attention_is_traced,
    cpu=False,
)

TRITON_RESHAPE_AND_CACHE_FLASH = FunctionSpec(
    op="reshape_and_cache_flash",
    path="vllm.v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash",
    callers=(
        "vllm.v1.attention.backends.rocm_attn",
        "vllm.v1.attention.backends.rocm_segmented_attn",
        "vllm.v1.attention.backends.triton_attn",
    ),
    arguments=_pages,
    writes=("key_cache", "value_cache"),
    needs=(TRITON,),
    traced=attention_is_traced,
    cpu=False,
)

CONCAT_AND_CACHE_MLA = FunctionSpec(
    op="concat_and_cache_mla",
    path="vllm._custom_ops:concat_and_cache_mla",
    arguments=_latent,
    writes=("kv_cache",),
    needs=("_C_cache_ops.concat_and_cache_mla",),
    traced=attention_is_traced,
    cpu=False,
)
