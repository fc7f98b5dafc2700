# SPDX-License-Identifier: Apache-2.0
"""Quantization of activations, and the product of FP8 blocks.

Linear layers call the quantization from forwards that a compiler traces, experts from inside an
opaque operator, and both find one function: it is served where nothing is compiled. The product
stands in an opaque operator of its own.
"""

from __future__ import annotations

from typing import Any

from .serve import TRITON, FunctionSpec, always

__all__ = [
    "PER_TOKEN_GROUP_QUANT_FP8",
    "PER_TOKEN_QUANT_INT8",
    "SCALED_FP8_QUANT",
    "SCALED_INT8_QUANT",
    "W8A8_BLOCK_FP8_MATMUL",
]


def _other_fp8() -> bool:
    """Whether this platform's FP8 is not the one of the ops (float8_e4m3fn)."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def _scaled_fp8(
    input: Any,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    group_shape: Any = None,
) -> tuple[Any, ...] | None:
    if _other_fp8() or (output is not None and num_token_padding is not None):
        return None
    groups = None if group_shape is None else list(group_shape)
    return input, scale, num_token_padding, scale_ub, use_per_token_if_dynamic, groups


def _with_scale(
    result: Any,
    input: Any,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    group_shape: Any = None,
) -> tuple[Any, Any]:
    values, computed = result
    kept = values if output is None else output.copy_(values)
    return kept, computed if scale is None else scale


def _group_fp8(
    x: Any,
    group_size: int,
    eps: float = 1e-10,
    dtype: Any = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Any = None,
    use_ue8m0: bool | None = None,
) -> tuple[Any, ...] | None:
    if _other_fp8():
        return None
    if use_ue8m0 is None:
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        use_ue8m0 = is_deep_gemm_e8m0_used()
    return x, group_size, eps, dtype, column_major_scales, tma_aligned_scales, use_ue8m0


def _into_out_q(
    result: Any,
    x: Any,
    group_size: int,
    eps: float = 1e-10,
    dtype: Any = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Any = None,
    use_ue8m0: bool | None = None,
) -> tuple[Any, Any]:
    values, scales = result
    return values if out_q is None else out_q.copy_(values), scales


def _scaled_int8(
    input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True
) -> tuple[Any, ...] | None:
    """Dynamic and symmetric; the other forms have no contract."""
    return (input,) if scale is None and azp is None and symmetric else None


def _without_azp(result: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
    values, scale = result
    return values, scale.reshape(-1, 1), None


def _token_int8(x: Any) -> tuple[Any, ...] | None:
    return (x,)


def _blocks(
    A: Any, B: Any, As: Any, Bs: Any, block_size: Any, output_dtype: Any = None
) -> tuple[Any, ...] | None:
    """vLLM's default is float16, and scales of other dtypes than float32 are its own business."""
    import torch

    if _other_fp8() or not (As.dtype is Bs.dtype is torch.float32):
        return None
    return A, B, As, Bs, list(block_size), torch.float16 if output_dtype is None else output_dtype


SCALED_FP8_QUANT = FunctionSpec(
    op="scaled_fp8_quant",
    path="vllm._custom_ops:scaled_fp8_quant",
    arguments=_scaled_fp8,
    finish=_with_scale,
    needs=(
        "_C.static_scaled_fp8_quant",
        "_C.dynamic_scaled_fp8_quant",
        "_C.dynamic_per_token_scaled_fp8_quant",
    ),
    traced=always,
    cpu=False,
)

PER_TOKEN_GROUP_QUANT_FP8 = FunctionSpec(
    op="per_token_group_quant_fp8",
    path="vllm.model_executor.layers.quantization.utils.fp8_utils:per_token_group_quant_fp8",
    callers=(
        "vllm.model_executor.kernels.linear.scaled_mm.flashinfer",
        "vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe",
        "vllm.model_executor.layers.fused_moe.utils",
        "vllm.model_executor.models.deepseek_v2",
        "vllm.models.deepseek_v32.attention",
        "vllm.models.deepseek_v32.nvidia.attention",
        "vllm.models.dots3_note.nvidia.vision_moe",
        "vllm.models.hy_v4.nvidia.attention",
    ),
    arguments=_group_fp8,
    finish=_into_out_q,
    needs=(TRITON,),
    traced=always,
    cpu=False,
)

SCALED_INT8_QUANT = FunctionSpec(
    op="dynamic_per_token_quant_int8",
    path="vllm._custom_ops:scaled_int8_quant",
    arguments=_scaled_int8,
    finish=_without_azp,
    needs=("_C.static_scaled_int8_quant", "_C.dynamic_scaled_int8_quant"),
    traced=always,
    cpu=False,
)

PER_TOKEN_QUANT_INT8 = FunctionSpec(
    op="dynamic_per_token_quant_int8",
    path="vllm.model_executor.layers.quantization.utils.int8_utils:per_token_quant_int8",
    callers=(
        "vllm.model_executor.layers.fused_moe.utils",
        "vllm.model_executor.layers.quantization.utils.marlin_utils",
    ),
    arguments=_token_int8,
    needs=(TRITON,),
    traced=always,
    cpu=False,
)

W8A8_BLOCK_FP8_MATMUL = FunctionSpec(
    op="w8a8_block_fp8_matmul",
    path="vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm",
    arguments=_blocks,
    needs=(TRITON,),
    cpu=False,
)
