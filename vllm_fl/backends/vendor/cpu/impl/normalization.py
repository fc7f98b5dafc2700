# SPDX-License-Identifier: Apache-2.0
"""RMS norms by vLLM's CPU kernels.

They read rows as if they were contiguous (on a slice the error was 4.6 and 2.6): rms_norm
copies a view first, the in-place fused_add_rms_norm must refuse it. A weight shorter than a row
is read past its end; a residual of another shape and rows without elements end the process: all
three are refused. Writing at an odd address does so too, and in-place fused_add_rms_norm loses
the sum where x and residual overlap: both are computed on copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cpu import backend
from .common import ALIGNMENT, VECTOR, fits, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    hidden_size, weight_size = facts["hidden_size"], facts["weight_size"]
    if weight_size is not None and weight_size != hidden_size:
        return f"the weight has {weight_size} elements, a row has {hidden_size}"
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    if not hidden_size or hidden_size % VECTOR:
        return f"hidden_size {hidden_size} is not a positive multiple of {VECTOR}"
    return True


def _supports_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if weight is None:
        return True
    if weight.dtype is not x.dtype:
        return f"weight is {weight.dtype}, x is {x.dtype}"
    # Also for a layer whose sizes were known: past the weight's end lies foreign memory.
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
        return f"residual is {residual.dtype}, x is {x.dtype}"
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
    x = x.contiguous()
    out = torch.empty_like(x)
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
    # Here and not in the guard, because only addresses tell, and fake tensors have none.
    x_at, residual_at = x.data_ptr(), residual.data_ptr()
    overlap = abs(x_at - residual_at) < x.nbytes
    if not overlap and (x_at | residual_at) % ALIGNMENT == 0:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    out, total = x.clone(), residual.clone()
    torch.ops._C.fused_add_rms_norm(out, total, weight, epsilon)
    return (out, total) if overlap else (x.copy_(out), residual.copy_(total))
