# SPDX-License-Identifier: Apache-2.0
"""RMS norms by vLLM's CUDA kernels.

Both want rows (two dimensions or more). At an odd address rms_norm loses the device, and so does
fused_add_rms_norm where a row is no whole number of vectors (61, 100 elements; an H200).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cuda import backend
from .common import ALIGNMENT, apart, fits, short, tensor_reason

VECTOR = 8
"""Elements of a vector of half precision."""


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
    if x.dim() < 2:
        return f"x has {x.dim()} dimensions, not two or more"
    if weight is None:
        return True
    if (elsewhere := apart(x, weight=weight)) is not None:
        return elsewhere
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
    if x.dim() and x.shape[-1] % VECTOR:
        return f"the last dimension {x.shape[-1]} is not a multiple of {VECTOR}"
    if (elsewhere := apart(x, residual=residual)) is not None:
        return elsewhere
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
    if not x.numel():  # an empty launch is an error, which the next launch is told
        return out
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
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
    """In place: x becomes the norm, residual the sum. Returns both.

    Where they overlap, both cannot be: they stay as they are and new tensors are returned."""
    if not x.numel():  # as above
        return x, residual
    x_at, residual_at = x.data_ptr(), residual.data_ptr()
    overlap = abs(x_at - residual_at) < x.nbytes
    if overlap or (x_at | residual_at) % ALIGNMENT:
        out, total = x.clone(), residual.clone()
        torch.ops._C.fused_add_rms_norm(out, total, weight, epsilon)
        return (out, total) if overlap else (x.copy_(out), residual.copy_(total))
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual
