# SPDX-License-Identifier: Apache-2.0
"""RMS norms by FlagGems.

They know neither a missing weight nor a variance of a part, and read a weight that is shorter
than a row past its end. fused_add_rms_norm writes its arguments, but where one of them is not
contiguous it writes a copy of it: the caller's residual keeps its old value without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import dtype_name, fits, tensor_reason

kernels = backend.kernels


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    hidden_size, weight_size = facts["hidden_size"], facts["weight_size"]
    if weight_size is None:
        return "there is no weight"
    if weight_size != hidden_size:
        return f"the weight has {weight_size} elements, a row has {hidden_size}"
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    return True


def _supports_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    # Also for a layer whose sizes were known: past the weight's end lies foreign memory.
    if weight is None or weight.shape != x.shape[-1:]:
        found = None if weight is None else list(weight.shape)
        return f"weight has shape {found}, x has {list(x.shape)}"
    return True


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
    if residual.shape != x.shape:
        return f"residual has shape {list(residual.shape)}, x has {list(x.shape)}"
    if residual.dtype is not x.dtype:
        return f"residual is {dtype_name(residual)}, x is {dtype_name(x)}"
    return _supports_weight(x, weight)


@planned
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
    # Not rms_norm: that is an autograd.Function.
    return kernels.rms_norm_forward(x, (x.shape[-1],), weight, epsilon)


@backend.implements(
    symbols=("rms_norm_forward",),
    supports=_supports_rms_norm,
    supports_layer=_supports_layer,
    batch_invariant=True,
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) -> a contiguous tensor of x's shape and dtype."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _rms_norm(x.contiguous(), weight, epsilon)[0]


@planned
def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> Any:
    return kernels.fused_add_rms_norm(x, residual, (x.shape[-1],), weight, epsilon)


@backend.implements(
    symbols=("fused_add_rms_norm",),
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
    """In place: x becomes the norm, residual the sum. Returns both.

    Where they overlap, both cannot be: residual stays as it is and a new tensor is returned."""
    if not x.numel():
        return x, residual
    # Here and not in the guard, because only addresses tell, and fake tensors have none.
    if abs(x.data_ptr() - residual.data_ptr()) < x.nbytes:
        x, residual = x.clone(), residual.clone()
    return _fused_add_rms_norm(x, residual, weight, epsilon)
