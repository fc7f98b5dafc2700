# SPDX-License-Identifier: Apache-2.0
"""Gated activations by our GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..fl import backend, kernels


def _supports(x: torch.Tensor) -> bool | str:
    return kernels.supports_gated(x)


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return kernels.supports_gated(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


@backend.implements(supports=_supports, batch_invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d), rows anywhere -> (..., d), contiguous."""
    return kernels.silu_and_mul(x)


@backend.implements(supports=_supports, batch_invariant=True)
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d), rows anywhere -> (..., d), contiguous."""
    return kernels.mul_and_silu(x)


@backend.implements(
    supports=_supports_gelu, supports_layer=_supports_approximate, batch_invariant=True
)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d), rows anywhere -> (..., d), contiguous; approximate: "none" or "tanh"."""
    return kernels.gelu_and_mul(x) if approximate == "none" else kernels.gelu_tanh_and_mul(x)
