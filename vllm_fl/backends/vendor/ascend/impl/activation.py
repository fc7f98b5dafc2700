# SPDX-License-Identifier: Apache-2.0
"""Activations by torch_npu.

`npu_gelu_mul` is documented for rows of 1024 at most, fewer than most models have: gelu and the
product are two calls instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ascend import backend
from .common import fits, rows_of, tensor_reason


def _supports(x: torch.Tensor) -> bool | str:
    return fits(x) or tensor_reason(x)


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> bool | str:
    return _supports(x)


def _supports_swigluoai(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> bool | str:
    return _supports(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


# ------------------------------------------------------------------------------ gated ones


@backend.implements(supports=_supports)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d)."""
    if not x.numel():
        return _half(x)
    return torch.ops.npu.npu_swiglu(x.contiguous(), dim=-1)


@backend.implements(supports=_supports)
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d), the gate behind -> (..., d)."""
    if not x.numel():
        return _half(x)
    up, gate = x.chunk(2, dim=-1)
    return torch.ops.npu.npu_silu(gate.contiguous()) * up


@backend.implements(supports=_supports_gelu, supports_layer=_supports_approximate)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); approximate: "none" or "tanh"."""
    if not x.numel():
        return _half(x)
    gate, up = x.chunk(2, dim=-1)
    return torch.ops.npu.npu_gelu(gate.contiguous(), approximate=approximate) * up


def _clipped(x: torch.Tensor, **settings: Any) -> torch.Tensor:
    if not x.numel():
        return _half(x)
    out = torch.ops.npu.npu_clipped_swiglu(rows_of(x), dim=-1, **settings)
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


@backend.implements(supports=_supports_clamp)
def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """x: (..., 2 * d), the gate in front -> (..., d)."""
    return _clipped(x, alpha=alpha, limit=limit, bias=beta, interleaved=False)


@backend.implements(supports=_supports_swigluoai)
def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """x: (..., 2 * d), gate and up in turns -> (..., d)."""
    return _clipped(x, alpha=alpha, limit=limit, bias=1.0, interleaved=True)


# ------------------------------------------------------------------------- of one argument


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    return torch.ops.npu.npu_gelu(x.contiguous(), approximate="tanh")


@backend.implements(supports=_supports)
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x: (...) -> (...). It is gelu's tanh form."""
    return _gelu_tanh(x)


@backend.implements(supports=_supports)
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """x: (...) -> (...). It is gelu's tanh form, its polynomial written in another way."""
    return _gelu_tanh(x)


@backend.implements(supports=_supports)
def gelu_quick(x: torch.Tensor) -> torch.Tensor:
    """x: (...) -> (...)."""
    if not x.numel():
        return x.new_empty(x.shape)
    return torch.ops.npu.npu_fast_gelu(x.contiguous())
