# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["CONTRACTS", "FUSED_ADD_RMS_NORM", "RMS_NORM"]


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
    return scaled.to(dtype)


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
    return _normalize(total, weight, epsilon, variance_size, x.dtype), total.to(x.dtype)


def _rms_norm_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fused_add_rms_norm_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _rms_norm_facts(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> dict[str, Any]:
    return {
        "hidden_size": x.shape[-1],
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": None if weight is None else weight.numel(),
        "variance_size": variance_size,
    }


def _fused_add_rms_norm_facts(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> dict[str, Any]:
    return _rms_norm_facts(x, weight, epsilon, variance_size)


_FACT_NAMES = ("hidden_size", "weight_dtype", "weight_size", "variance_size")


def _inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    residual: bool,
    scale: float = 1.0,
    pad: int = 0,
    weight: bool = True,
    variance_size: int | None = None,
) -> tuple[Any, ...]:
    def rows() -> torch.Tensor:
        wide = scale * torch.randn(*shape[:-1], shape[-1] + pad, generator=generator)
        return wide.to(dtype)[..., : shape[-1]]

    tensors = (rows(), rows()) if residual else (rows(),)
    scales = torch.rand(shape[-1], generator=generator) + 0.5
    return (*tensors, scales.to(dtype) if weight else None, 1e-6, variance_size)


def _cases(*, residual: bool) -> tuple[Case, ...]:
    make = partial(_inputs, residual=residual)
    shapes = {
        "one token": (1, 64),
        "zero tokens": (0, 64),
        "odd size": (7, 61),
        "1-D": (64,),
        "heads": (3, 5, 64),
        "4-D": (2, 3, 4, 64),
        "hidden 576": (9, 576),
        "wide": (2, 4096),
    }
    return (
        *(Case(name, partial(make, shape)) for name, shape in shapes.items()),
        Case("tiny values", partial(make, (3, 64), scale=1e-3)),
        Case("huge values", partial(make, (3, 64), scale=1e4)),
        Case("slice of wider rows", partial(make, (5, 64), pad=32)),
        Case("no weight", partial(make, (5, 64), weight=False)),
        Case("variance of a part", partial(make, (5, 64), variance_size=32)),
    )


_TOLERANCES = half_and_single(
    half=2.5,
    single=16,
    why="half precision: the scaled value and the product with the weight are each rounded once "
    "(0.5 ulp, the first scaled by up to 2 within a binade and by the weight's rounding); "
    "float32: a sum of n squares in any blocked order is good to about log2(n) ulp, halved "
    "by the root, and three further roundings",
)

_CALL_SITES = (CallSite("vllm.model_executor.layers.layernorm:RMSNorm", "the layer's forward"),)

RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "rms_norm(x, weight, epsilon, variance_size=None)",
        facts=_rms_norm_facts,
        fact_names=_FACT_NAMES,
        summary=(
            "x / sqrt(mean(x[..., :variance_size]^2) + epsilon) * weight; x: (..., hidden), "
            "weight: (hidden,) or None; the result has x's shape and dtype."
        ),
    ),
    schema="(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    reference=_rms_norm,
    fake=_rms_norm_fake,
    arrays={"x": "T[..., hidden]", "weight": "float[hidden]?"},
    results=("T[..., hidden]",),
    constraints=("variance_size is None or variance_size <= hidden",),
    batched=("x",),
    call_sites=_CALL_SITES,
    source="https://arxiv.org/abs/1910.07467",
    cases=_cases(residual=False),
    tolerances=_TOLERANCES,
)

FUSED_ADD_RMS_NORM = OpContract(
    signature=OpSignature.parse(
        "fused_add_rms_norm(x, residual, weight, epsilon, variance_size=None)",
        inplace=("x", "residual"),
        facts=_fused_add_rms_norm_facts,
        fact_names=_FACT_NAMES,
        summary="r = x + residual; returns (rms_norm(r, weight, epsilon, variance_size), r).",
    ),
    schema=(
        "(Tensor x, Tensor residual, Tensor? weight, float epsilon, "
        "SymInt? variance_size=None) -> (Tensor, Tensor)"
    ),
    reference=_fused_add_rms_norm,
    fake=_fused_add_rms_norm_fake,
    arrays={"x": "T[..., hidden]", "residual": "T[..., hidden]", "weight": "float[hidden]?"},
    results=("T[..., hidden]", "T[..., hidden]"),
    constraints=("variance_size is None or variance_size <= hidden",),
    batched=("x", "residual"),
    call_sites=_CALL_SITES,
    source="https://arxiv.org/abs/1910.07467",
    cases=_cases(residual=True),
    tolerances=_TOLERANCES,
    magnitude=lambda x, residual, *_: (None, x.abs() + residual.abs()),
)

CONTRACTS = (RMS_NORM, FUSED_ADD_RMS_NORM)
