# SPDX-License-Identifier: Apache-2.0
"""Normalization of rows: by their root mean square (https://arxiv.org/abs/1910.07467), or by
mean and variance (https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..dispatch.types import OpSignature
from .contract import CallSite, OpContract, half_and_single
from .norm_inputs import GATED_CASES, LAYER_NORM_CASES, gemma_cases, rms_cases

__all__ = [
    "CONTRACTS",
    "FUSED_ADD_GEMMA_RMS_NORM",
    "FUSED_ADD_RMS_NORM",
    "GEMMA_RMS_NORM",
    "LAYER_NORM",
    "RMS_NORM",
    "RMS_NORM_GATED",
]

# --------------------------------------------------------------------------- the references
#
# Equal to vLLM's forward_native bit for bit. Their results are contiguous, as the fakes promise:
# PyTorch alone would hand on the strides of a permuted input.


def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x: float32 (or wider). The product is taken in the weight's dtype."""
    head = x if variance_size is None else x[..., :variance_size]
    scaled = x * torch.rsqrt(head.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        scaled = scaled.to(weight.dtype) * weight
    return scaled.to(dtype).contiguous()


def _at_least_single(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.to(torch.float32)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    return _normalize(_at_least_single(x), weight, epsilon, variance_size, x.dtype)


def _fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm is that of the unrounded sum."""
    total = _at_least_single(x) + _at_least_single(residual)
    normed = _normalize(total, weight, epsilon, variance_size, x.dtype)
    return normed, total.to(x.dtype).contiguous()


def _gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _rms_norm(x, _at_least_single(weight) + 1.0, epsilon)


def _fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fused_add_rms_norm(x, residual, _at_least_single(weight) + 1.0, epsilon)


def _rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    if activation not in ("silu", "sigmoid", "swish"):
        raise ValueError(f"activation must be silu, swish or sigmoid, found {activation!r}")
    dtype, x, weight = x.dtype, _at_least_single(x), _at_least_single(weight)
    gate = None
    if z is not None:
        act = torch.sigmoid if activation == "sigmoid" else F.silu
        gate = act(_at_least_single(z))
    if gate is not None and not norm_before_gate:
        x = x * gate
    groups = x if group_size is None else x.unflatten(-1, (-1, group_size))
    scale = torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    out = (groups * scale).reshape(x.shape) * weight
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(dtype).contiguous()


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """In the wider of the dtypes of x and weight."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, epsilon)
    return normed.to(x.dtype).contiguous()


# -------------------------------------------------------------------------- fakes and facts


def _like_x(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _like_x_twice(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _weight_facts(x: torch.Tensor, weight: torch.Tensor | None) -> dict[str, Any]:
    return {
        "hidden_size": x.shape[-1],
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": None if weight is None else weight.numel(),
    }


_WEIGHT_FACTS = ("hidden_size", "weight_dtype", "weight_size")


def _rms_norm_facts(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> dict[str, Any]:
    return {**_weight_facts(x, weight), "variance_size": variance_size}


def _fused_add_rms_norm_facts(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> dict[str, Any]:
    return _rms_norm_facts(x, weight, epsilon, variance_size)


def _gemma_facts(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> dict[str, Any]:
    return _weight_facts(x, weight)


def _fused_add_gemma_facts(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> dict[str, Any]:
    return _weight_facts(x, weight)


def _gated_facts(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> dict[str, Any]:
    return {
        **_weight_facts(x, weight),
        "group_size": group_size,
        "norm_before_gate": norm_before_gate,
        "activation": activation,
    }


def _layer_norm_facts(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> dict[str, Any]:
    return {**_weight_facts(x, weight), "has_bias": bias is not None}


# ------------------------------------------------------- the tolerances and the terms behind

_SQUARES = (
    "float32: a sum of n squares in any blocked order is good to about log2(n) ulp, halved by the "
    "root, and three further roundings"
)
_TWICE = half_and_single(
    half=2.5,
    single=16,
    why="half precision: the scaled value and the product with the weight are each rounded once "
    "(0.5 ulp, the first scaled by up to 2 within a binade and by the weight's rounding); "
    + _SQUARES,
)
_ONCE = half_and_single(
    half=1,
    single=16,
    why="half precision: all is computed in float32 and rounded once (0.5 ulp), and as much again "
    "for a result that float32 puts on the other side of a tie; " + _SQUARES,
)
_WITH_SUM = half_and_single(
    half=(2.5, 1),
    single=(16, 1),
    why="half precision: besides its result, a norm rounds either the scaled value or the sum that "
    "it reads back: two roundings of 1 ulp at most, and 0.5 for the float32 inside; the sum is "
    "rounded once, from a float32 sum; " + _SQUARES,
)
_GATED = half_and_single(
    half=1,
    single=24,
    why="half precision: all is computed in float32 and rounded once (0.5 ulp), and as much again "
    "for a result that float32 puts on the other side of a tie; " + _SQUARES + ", 16 in all; the "
    "gate's exponential is good to about 4 ulp, and it and its sum, quotient and products are "
    "rounded once each: 8 more",
)


def _sum_terms(
    x: torch.Tensor, residual: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The terms of the sum may cancel; the norm has its own size."""
    return None, x.abs() + residual.abs()


def _layer_norm_terms(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor]:
    """x minus the mean may cancel, and so may the sum with the bias."""
    mean = x.mean(dim=-1, keepdim=True)
    deviation = ((x - mean).pow(2).mean(dim=-1, keepdim=True) + epsilon).sqrt()
    terms = (x.abs() + x.abs().mean(dim=-1, keepdim=True)) / deviation
    if weight is not None:
        terms = terms * weight.abs()
    return (terms if bias is None else terms + bias.abs(),)


# ---------------------------------------------------------------------------- the contracts

_LAYERS = "vllm.model_executor.layers.layernorm"
_RMS_NORM_SITES = (CallSite(f"{_LAYERS}:RMSNorm", "the layer's forward"),)
_GEMMA_SITES = (CallSite(f"{_LAYERS}:GemmaRMSNorm", "the layer's forward"),)

RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "rms_norm(x, weight, epsilon, variance_size=None)",
        facts=_rms_norm_facts,
        fact_names=(*_WEIGHT_FACTS, "variance_size"),
        summary=(
            "x / sqrt(mean(x[..., :variance_size]^2) + epsilon) * weight; x: (..., hidden), "
            "weight: (hidden,) or None; the result has x's shape and dtype."
        ),
    ),
    schema="(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    reference=_rms_norm,
    fake=_like_x,
    arrays={"x": "T[..., hidden]", "weight": "float[hidden]?"},
    results=("T[..., hidden]",),
    constraints=("variance_size is None or variance_size <= hidden",),
    batched=("x",),
    call_sites=_RMS_NORM_SITES,
    source="https://arxiv.org/abs/1910.07467",
    cases=rms_cases(1),
    tolerances=_TWICE,
)

FUSED_ADD_RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "fused_add_rms_norm(x, residual, weight, epsilon, variance_size=None)",
        inplace=("x", "residual"),
        facts=_fused_add_rms_norm_facts,
        fact_names=(*_WEIGHT_FACTS, "variance_size"),
        summary="r = x + residual; returns (rms_norm(r, weight, epsilon, variance_size), r).",
    ),
    schema=(
        "(Tensor x, Tensor residual, Tensor? weight, float epsilon, "
        "SymInt? variance_size=None) -> (Tensor, Tensor)"
    ),
    reference=_fused_add_rms_norm,
    fake=_like_x_twice,
    arrays={"x": "T[..., hidden]", "residual": "T[..., hidden]", "weight": "float[hidden]?"},
    results=("T[..., hidden]", "T[..., hidden]"),
    constraints=("variance_size is None or variance_size <= hidden",),
    batched=("x", "residual"),
    call_sites=_RMS_NORM_SITES,
    source="https://arxiv.org/abs/1910.07467",
    cases=rms_cases(2),
    tolerances=_WITH_SUM,
    magnitude=_sum_terms,
)

GEMMA_RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "gemma_rms_norm(x, weight, epsilon)",
        facts=_gemma_facts,
        fact_names=_WEIGHT_FACTS,
        summary=(
            "x / sqrt(mean(x^2) + epsilon) * (1 + weight), rounded to x's dtype only at the end; "
            "x: (..., hidden), weight: (hidden,)."
        ),
    ),
    schema="(Tensor x, Tensor weight, float epsilon) -> Tensor",
    reference=_gemma_rms_norm,
    fake=_like_x,
    arrays={"x": "T[..., hidden]", "weight": "float[hidden]"},
    results=("T[..., hidden]",),
    batched=("x",),
    call_sites=_GEMMA_SITES,
    source="https://arxiv.org/abs/2403.08295",
    cases=gemma_cases(1),
    tolerances=_ONCE,
)

FUSED_ADD_GEMMA_RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "fused_add_gemma_rms_norm(x, residual, weight, epsilon)",
        inplace=("x", "residual"),
        facts=_fused_add_gemma_facts,
        fact_names=_WEIGHT_FACTS,
        summary="r = x + residual; returns (gemma_rms_norm(r, weight, epsilon), r).",
    ),
    schema="(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    reference=_fused_add_gemma_rms_norm,
    fake=_like_x_twice,
    arrays={"x": "T[..., hidden]", "residual": "T[..., hidden]", "weight": "float[hidden]"},
    results=("T[..., hidden]", "T[..., hidden]"),
    batched=("x", "residual"),
    call_sites=_GEMMA_SITES,
    source="https://arxiv.org/abs/2403.08295",
    cases=gemma_cases(2),
    tolerances=_WITH_SUM,
    magnitude=_sum_terms,
)

RMS_NORM_GATED = OpContract(
    signature=OpSignature.parse(
        "rms_norm_gated(x, z, weight, epsilon, group_size=None, norm_before_gate=False, "
        'activation="swish")',
        facts=_gated_facts,
        fact_names=(*_WEIGHT_FACTS, "group_size", "norm_before_gate", "activation"),
        summary=(
            "rms_norm(x * act(z)) * weight, or rms_norm(x) * weight * act(z) with "
            "norm_before_gate; the norm of each group_size channels for itself; act is silu "
            "(swish) or sigmoid; without z only the norm. Rounded only at the end."
        ),
    ),
    schema=(
        "(Tensor x, Tensor? z, Tensor weight, float epsilon, SymInt? group_size=None, "
        'bool norm_before_gate=False, str activation="swish") -> Tensor'
    ),
    reference=_rms_norm_gated,
    fake=_like_x,
    arrays={"x": "T[..., hidden]", "z": "T[..., hidden]?", "weight": "float[hidden]"},
    results=("T[..., hidden]",),
    constraints=("group_size is None or hidden % group_size == 0",),
    batched=("x", "z"),
    call_sites=(CallSite(f"{_LAYERS}:RMSNormGated", "the layer's forward"),),
    source="https://arxiv.org/abs/2405.21060",
    cases=GATED_CASES,
    tolerances=_GATED,
)

LAYER_NORM = OpContract(
    signature=OpSignature.parse(
        "layer_norm(x, weight, bias, epsilon)",
        facts=_layer_norm_facts,
        fact_names=(*_WEIGHT_FACTS, "has_bias"),
        summary=(
            "(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias, with the mean and the "
            "biased variance of each row; x: (..., hidden), weight and bias: (hidden,) or None."
        ),
    ),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor",
    reference=_layer_norm,
    fake=_like_x,
    arrays={
        "x": "T[..., hidden]",
        "weight": "(T[hidden] or float32[hidden])?",
        "bias": "(T[hidden] or float32[hidden])?",
    },
    results=("T[..., hidden]",),
    batched=("x",),
    call_sites=(
        CallSite(
            f"{_LAYERS}:LayerNorm",
            "the layer's forward",
            note="since 0.32; before, it is a plain module, which is left alone",
        ),
    ),
    source="https://arxiv.org/abs/1607.06450",
    cases=LAYER_NORM_CASES,
    tolerances=_ONCE,
    magnitude=_layer_norm_terms,
)

CONTRACTS = (
    RMS_NORM,
    FUSED_ADD_RMS_NORM,
    GEMMA_RMS_NORM,
    FUSED_ADD_GEMMA_RMS_NORM,
    RMS_NORM_GATED,
    LAYER_NORM,
)
