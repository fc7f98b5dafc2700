# SPDX-License-Identifier: Apache-2.0
"""RMS norms by vLLM's CUDA kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cuda import backend
from .common import fits, short, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    hidden_size, weight_size = facts["hidden_size"], facts["weight_size"]
    if weight_size is not None and weight_size != hidden_size:
        return f"the weight has {weight_size} elements, a row has {hidden_size}"
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    return True


def _supports_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if weight is None:
        return True
    if weight.dtype is not x.dtype:
        return f"weight is {short(weight.dtype)}, x is {short(x.dtype)}"
    if weight.shape != x.shape[-1:]:
        return f"weight has shape {list(weight.shape)}, x has {list(x.shape)}"
    return weight.is_contiguous() or "weight is not contiguous"


def _supports_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool | str:
    return _supports_weight(x, weight)


def _supports_fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool | str:
    if not (x.is_contiguous() and residual.is_contiguous()):
        return "x or residual is not contiguous"
    if residual.dtype is not x.dtype:
        return f"residual is {short(residual.dtype)}, x is {short(x.dtype)}"
    if residual.shape != x.shape:
        return f"residual has shape {list(residual.shape)}, x has {list(x.shape)}"
    return _supports_weight(x, weight)


@backend.calling("_C.rms_norm").implements(
    supports=_supports_rms_norm, supports_layer=_supports_layer, batch_invariant=True
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) or None -> a contiguous tensor of x's shape and dtype."""
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@backend.calling("_C.fused_add_rms_norm").implements(
    supports=_supports_fused,
    supports_layer=_supports_layer,
    mutates=("x", "residual"),
    batch_invariant=True,
)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: x becomes the norm, residual the sum. Returns both."""
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual
