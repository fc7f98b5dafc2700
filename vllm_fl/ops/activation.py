# SPDX-License-Identifier: Apache-2.0
"""Gated activations: act(x[..., :d]) * x[..., d:] with d = x.shape[-1] // 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dispatch.types import OpSignature

if TYPE_CHECKING:
    import torch

__all__ = ["GELU_AND_MUL", "SILU_AND_MUL"]


def _gelu_facts(x: torch.Tensor, approximate: str = "none") -> dict[str, Any]:
    return {"approximate": approximate}


SILU_AND_MUL = OpSignature.parse(
    "silu_and_mul(x)",
    summary="silu(x[..., :d]) * x[..., d:]; x: (..., 2 * d) -> (..., d), same dtype.",
)

GELU_AND_MUL = OpSignature.parse(
    'gelu_and_mul(x, approximate="none")',
    facts=_gelu_facts,
    fact_names=("approximate",),
    summary="gelu(x[..., :d]) * x[..., d:]; approximate is none (erf) or tanh.",
)
