# SPDX-License-Identifier: Apache-2.0
"""RMS norms by torch_npu.

`gamma` is a plain tensor in the schemas, so None passes them and crashes the device: a layer
without a weight is refused. The fused form is `npu_add_rms_norm_v2`, which writes its arguments
as vLLM's own does; of `npu_add_rms_norm`'s three outputs the second is no residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ascend import backend
from .common import fits, tensor_reason


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    hidden_size, weight_size = facts["hidden_size"], facts["weight_size"]
    if weight_size is None:
        return "the layer has no weight, without which the operator crashes"
    if weight_size != hidden_size:
        return f"the weight has {weight_size} elements, a row has {hidden_size}"
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    return True


def _supports_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if weight is None:
        return "weight is None, with which the operator crashes"
    if weight.dtype is not x.dtype:
        return f"weight is {weight.dtype}, x is {x.dtype}"
    if weight.shape != x.shape[-1:]:
        return f"weight has shape {list(weight.shape)}, x has {list(x.shape)}"
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
    if residual.dtype is not x.dtype:
        return f"residual is {residual.dtype}, x is {x.dtype}"
    if residual.shape != x.shape:
        return f"residual has shape {list(residual.shape)}, x has {list(x.shape)}"
    return _supports_weight(x, weight)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as the norms are documented for: contiguous, with two dimensions or more."""
    return x.contiguous() if x.dim() > 1 else x.unsqueeze(0).contiguous()


@backend.implements(supports=_supports_rms_norm, supports_layer=_supports_layer)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) -> x's shape and dtype."""
    if not x.numel():
        return x.new_empty(x.shape)
    assert weight is not None
    y, _ = torch.ops.npu.npu_rms_norm(rows_of(x), weight.contiguous(), epsilon=epsilon)
    return y.view(x.shape)


@backend.implements(
    supports=_supports_fused, supports_layer=_supports_layer, mutates=("x", "residual")
)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: x becomes the norm, residual the sum. Returns both."""
    if x.numel():
        assert weight is not None
        torch.ops.npu.npu_add_rms_norm_v2(
            rows_of(x), rows_of(residual), weight.contiguous(), epsilon=epsilon
        )
    return x, residual
