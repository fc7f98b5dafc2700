# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, the blocks of tokens, the experts, their activation and their sum.

vLLM's layers run all of it inside one opaque operator (`vllm::moe_forward`), so no compiler sees
these calls. `fused_experts` is what a few models call from forwards that are traced.
"""

from __future__ import annotations

from typing import Any

from ...ops.moe_experts import ACTIVATIONS
from .serve import TRITON, FunctionSpec, always

__all__ = [
    "APPLY_MOE_ACTIVATION",
    "FUSED_EXPERTS",
    "GROUPED_TOPK",
    "MOE_ALIGN_BLOCK_SIZE",
    "MOE_SUM",
    "TOPK_SIGMOID",
    "TOPK_SOFTMAX",
]


# ------------------------------------------------------------------------------------ routing


def _topk_softmax(
    topk_weights: Any,
    topk_ids: Any,
    token_expert_indices: Any,
    gating_output: Any,
    renormalize: bool = False,
    e_score_correction_bias: Any = None,
    is_padding: Any = None,
) -> tuple[Any, ...] | None:
    topk = topk_weights.shape[1]
    return gating_output, topk, renormalize, e_score_correction_bias, is_padding


def _topk_sigmoid(
    topk_weights: Any,
    topk_ids: Any,
    token_expert_indices: Any,
    gating_output: Any,
    renormalize: bool = False,
    e_score_correction_bias: Any = None,
    routed_scaling_factor: float = 1.0,
    is_padding: Any = None,
) -> tuple[Any, ...] | None:
    """All experts as one group, which is always among the best; padding is for `_masked`."""
    topk, bias = topk_weights.shape[1], e_score_correction_bias
    return gating_output, topk, renormalize, 1, 1, "sigmoid", routed_scaling_factor, bias


def _choice(result: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> None:
    """Row numbers (token_expert_indices) stay unwritten: nobody reads them."""
    weights, ids = result
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)


def _masked(
    result: Any,
    topk_weights: Any,
    topk_ids: Any,
    *given: Any,
    is_padding: Any = None,
    **named: Any,
) -> None:
    """As `_choice`; rows of padding choose nobody, as in topk_softmax."""
    _choice(result, topk_weights, topk_ids)
    if len(given) > _PADDING_AT:
        is_padding = given[_PADDING_AT]
    if is_padding is not None:
        topk_weights.masked_fill_(is_padding[:, None], 0.0)
        topk_ids.masked_fill_(is_padding[:, None], -1)


_PADDING_AT = 5
"""Where vLLM's topk_sigmoid has is_padding, behind topk_ids."""


def _grouped_topk(
    hidden_states: Any,
    gating_output: Any,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Any = None,
) -> tuple[Any, ...] | None:
    settings = (topk, renormalize, num_expert_group, topk_group)
    scoring = (scoring_func, routed_scaling_factor, e_score_correction_bias)
    return gating_output, *settings, *scoring


TOPK_SOFTMAX = FunctionSpec(
    op="topk_softmax",
    path="vllm._custom_ops:topk_softmax",
    arguments=_topk_softmax,
    finish=_choice,
    needs=("_moe_C.topk_softmax",),
    cpu=False,
)

TOPK_SIGMOID = FunctionSpec(
    op="grouped_topk",
    path="vllm._custom_ops:topk_sigmoid",
    arguments=_topk_sigmoid,
    finish=_masked,
    needs=("_moe_C.topk_sigmoid",),
    stand_in=True,
    cpu=False,
)

GROUPED_TOPK = FunctionSpec(
    op="grouped_topk",
    path="vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk",
    arguments=_grouped_topk,
    needs=(TRITON,),
    cpu=False,
)


# ------------------------------------------------------------------------------------- blocks


def _align(
    topk_ids: Any,
    block_size: int,
    num_experts: int,
    expert_map: Any = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[Any, ...] | None:
    if return_scatter_idx:
        return None
    return topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts


MOE_ALIGN_BLOCK_SIZE = FunctionSpec(
    op="moe_align_block_size",
    path="vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size",
    callers=(
        "vllm.model_executor.layers.fused_moe.fused_moe",
        "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe",
        "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
        "vllm.model_executor.layers.fused_moe.experts.mxfp8_native_moe",
        "vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe",
        "vllm.model_executor.layers.fused_moe.experts.rdna3_moe",
        "vllm.model_executor.layers.fused_moe.experts.triton_moe",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
        "compressed_tensors_moe_wna16_rdna3",
    ),
    arguments=_align,
    needs=("_moe_C.moe_align_block_size",),
    cpu=False,
)


# ------------------------------------------------------------------------------------ experts


def _experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any = None,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Any = None,
    quant_config: Any = None,
) -> tuple[Any, ...] | None:
    name = "silu" if activation is None else activation.value
    bias = (None, None)
    if quant_config is not None:
        if quant_config.quant_dtype is not None or not _unquantized(quant_config):
            return None
        bias = (quant_config.w1_bias, quant_config.w2_bias)
    if name not in ACTIVATIONS:
        return None
    routed = (topk_weights, topk_ids, name, apply_router_weight_on_input)
    return hidden_states, w1, w2, *routed, global_num_experts, expert_map, *bias


def _unquantized(quant_config: Any) -> bool:
    return not (
        quant_config.use_fp8_w8a8
        or quant_config.use_int8_w8a8
        or quant_config.use_int8_w8a16
        or quant_config.use_int4_w4a16
        or quant_config.ocp_mx_scheme
    )


FUSED_EXPERTS = FunctionSpec(
    op="fused_experts",
    path="vllm.model_executor.layers.fused_moe.fused_moe:fused_experts",
    callers=(
        "vllm.model_executor.layers.fused_moe",
        "vllm.model_executor.models.arctic",
        "vllm.model_executor.models.minicpm",
        "vllm.model_executor.models.moondream3",
    ),
    arguments=_experts,
    needs=(TRITON,),
    traced=always,
    cpu=False,
)


def _sum(
    input: Any, output: Any, topk_ids: Any = None, expert_map: Any = None
) -> tuple[Any, ...] | None:
    return input, topk_ids, expert_map


def _into_output(result: Any, input: Any, output: Any, *_: Any, **__: Any) -> None:
    output.copy_(result)


MOE_SUM = FunctionSpec(
    op="moe_sum",
    path="vllm._custom_ops:moe_sum",
    arguments=_sum,
    finish=_into_output,
    needs=("_moe_C.moe_sum",),
    cpu=False,
)


# --------------------------------------------------------------------------------- activation
#
# Between their two products the experts call kernels of the extension, by way of one function.
# A policy that names an implementation of an activation is about the layer; these stand in where
# the kernel is missing. Rows that topk_ids, expert_map and valid_token_counts leave out are
# computed like the others, and nobody reads them.


def _limits(config: Any, limit: Any, alpha: float, beta: float) -> tuple[Any, float, float]:
    if config is None:
        return limit, alpha, beta
    return config.clamp_limit, config.alpha, config.beta


def _silu(
    activation: Any,
    output: Any,
    input: Any,
    *,
    clamp_limit: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation_config: Any = None,
    topk_ids: Any = None,
    expert_map: Any = None,
    valid_token_counts: Any = None,
) -> tuple[Any, ...] | None:
    limit, _, _ = _limits(activation_config, clamp_limit, alpha, beta)
    return (input,) if activation.value == "silu" and limit is None else None


def _gelu(
    activation: Any,
    output: Any,
    input: Any,
    *,
    clamp_limit: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation_config: Any = None,
    topk_ids: Any = None,
    expert_map: Any = None,
    valid_token_counts: Any = None,
) -> tuple[Any, ...] | None:
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation.value)
    return None if approximate is None else (input, approximate)


def _clamped_silu(
    activation: Any,
    output: Any,
    input: Any,
    *,
    clamp_limit: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation_config: Any = None,
    topk_ids: Any = None,
    expert_map: Any = None,
    valid_token_counts: Any = None,
) -> tuple[Any, ...] | None:
    limit, alpha, beta = _limits(activation_config, clamp_limit, alpha, beta)
    if limit is None:
        return None
    if activation.value == "silu":
        return input, limit, 1.0, 0.0
    return (input, limit, alpha, beta) if activation.value == "swigluoai_uninterleave" else None


def _swigluoai(
    activation: Any,
    output: Any,
    input: Any,
    *,
    clamp_limit: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation_config: Any = None,
    topk_ids: Any = None,
    expert_map: Any = None,
    valid_token_counts: Any = None,
) -> tuple[Any, ...] | None:
    return (input,) if activation.value == "swigluoai" else None


def _activated(result: Any, activation: Any, output: Any, *_: Any, **__: Any) -> Any:
    return output.copy_(result)


_ACTIVATION_CALLERS = (
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.modular_kernel",
    "vllm.model_executor.layers.fused_moe.experts.cutlass_moe",
    "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16_rdna3",
    "vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_moe",
    "vllm.models.dots3_note.nvidia.vision_moe",
)

APPLY_MOE_ACTIVATION = (
    FunctionSpec(
        op="silu_and_mul",
        path="vllm.model_executor.layers.fused_moe.activation:apply_moe_activation",
        callers=_ACTIVATION_CALLERS,
        arguments=_silu,
        finish=_activated,
        needs=("_C.silu_and_mul",),
        stand_in=True,
        cpu=False,
    ),
    FunctionSpec(
        op="gelu_and_mul",
        path="vllm.model_executor.layers.fused_moe.activation:apply_moe_activation",
        callers=_ACTIVATION_CALLERS,
        arguments=_gelu,
        finish=_activated,
        needs=("_C.gelu_and_mul", "_C.gelu_tanh_and_mul"),
        stand_in=True,
        cpu=False,
    ),
    FunctionSpec(
        op="silu_and_mul_with_clamp",
        path="vllm.model_executor.layers.fused_moe.activation:apply_moe_activation",
        callers=_ACTIVATION_CALLERS,
        arguments=_clamped_silu,
        finish=_activated,
        needs=("_C.silu_and_mul_with_clamp",),
        stand_in=True,
        cpu=False,
    ),
    FunctionSpec(
        op="swigluoai_and_mul",
        path="vllm.model_executor.layers.fused_moe.activation:apply_moe_activation",
        callers=_ACTIVATION_CALLERS,
        arguments=_swigluoai,
        finish=_activated,
        needs=("_C.swigluoai_and_mul",),
        stand_in=True,
        cpu=False,
    ),
)
