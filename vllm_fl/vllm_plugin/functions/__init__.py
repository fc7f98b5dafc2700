# SPDX-License-Identifier: Apache-2.0
"""The vLLM functions that are served, one file per family."""

from __future__ import annotations

from . import attention, cache, moe, quantization, sampling
from .serve import FunctionSpec

__all__ = ["FUNCTIONS", "FunctionSpec"]

FUNCTIONS: tuple[FunctionSpec, ...] = (
    sampling.APPLY_REPETITION_PENALTIES,
    sampling.APPLY_PENALTIES,
    sampling.APPLY_TOP_K_TOP_P,
    cache.RESHAPE_AND_CACHE_FLASH,
    cache.TRITON_RESHAPE_AND_CACHE_FLASH,
    cache.CONCAT_AND_CACHE_MLA,
    attention.MERGE_ATTN_STATES,
    attention.TRITON_MERGE_ATTN_STATES,
    moe.TOPK_SOFTMAX,
    moe.TOPK_SIGMOID,
    moe.GROUPED_TOPK,
    moe.MOE_ALIGN_BLOCK_SIZE,
    moe.FUSED_EXPERTS,
    moe.MOE_SUM,
    *moe.APPLY_MOE_ACTIVATION,
    quantization.SCALED_FP8_QUANT,
    quantization.PER_TOKEN_GROUP_QUANT_FP8,
    quantization.SCALED_INT8_QUANT,
    quantization.PER_TOKEN_QUANT_INT8,
    quantization.W8A8_BLOCK_FP8_MATMUL,
)
