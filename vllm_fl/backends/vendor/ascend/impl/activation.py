# SPDX-License-Identifier: Apache-2.0
"""Gated activations by torch_npu.

`npu_gelu_mul` is documented for rows of 1024 at most, fewer than most models have: gelu and the
product are two calls instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ascend import backend
from .common import fits, tensor_reason


def _supports(x: torch.Tensor) -> bool | str:
    return fits(x) or tensor_reason(x)


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@backend.implements(supports=_supports)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d)."""
    if not x.numel():
        return _half(x)
    return torch.ops.npu.npu_swiglu(x.contiguous(), dim=-1)


@backend.implements(supports=_supports_gelu, supports_layer=_supports_approximate)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); approximate: "none" or "tanh"."""
    if not x.numel():
        return _half(x)
    gate, up = x.chunk(2, dim=-1)
    return torch.ops.npu.npu_gelu(gate.contiguous(), approximate=approximate) * up
