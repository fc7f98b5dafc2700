# SPDX-License-Identifier: Apache-2.0
"""Gated activations by FlagGems.

Its kernels take the two halves of a row apart, as views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import fits, tensor_reason

kernels = backend.kernels


def _supports(x: torch.Tensor) -> bool | str:
    return True if fits(x) else tensor_reason(x)


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


@planned
def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], d)
    # Not silu_and_mul: that is an autograd.Function, for 20 us more of host time.
    kernels.silu_and_mul_out(x[..., :d], x[..., d:], out)
    return out


@backend.implements(symbols=("silu_and_mul_out",), supports=_supports, batch_invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d), any strides -> (..., d), contiguous."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return _silu_and_mul(x)


@planned
def _gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    d = x.shape[-1] // 2
    return kernels.gelu_and_mul(x[..., :d], x[..., d:], approximate)


@backend.implements(
    symbols=("gelu_and_mul",),
    supports=_supports_gelu,
    supports_layer=_supports_approximate,
    batch_invariant=True,
)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d), any strides -> (..., d), contiguous; approximate: "none" or "tanh"."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    # It keeps the order of permuted dimensions.
    return _gelu_and_mul(x, approximate).contiguous()
