# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dispatch.types import OpSignature

if TYPE_CHECKING:
    import torch

__all__ = ["FUSED_ADD_RMS_NORM", "RMS_NORM"]


def _rms_norm_facts(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> dict[str, Any]:
    return {
        "hidden_size": x.shape[-1],
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": None if weight is None else weight.shape[-1],
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

RMS_NORM = OpSignature.parse(
    "rms_norm(x, weight, epsilon, variance_size=None)",
    facts=_rms_norm_facts,
    fact_names=_FACT_NAMES,
    summary=(
        "x / sqrt(mean(x[..., :variance_size]^2) + epsilon) * weight; x: (..., hidden), "
        "weight: (hidden,) or None; the result has x's shape and dtype."
    ),
)

FUSED_ADD_RMS_NORM = OpSignature.parse(
    "fused_add_rms_norm(x, residual, weight, epsilon, variance_size=None)",
    inplace=("x", "residual"),
    facts=_fused_add_rms_norm_facts,
    fact_names=_FACT_NAMES,
    summary="r = x + residual; returns (rms_norm(r, weight, epsilon, variance_size), r).",
)
