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
from .common import fits, rows_of, tensor_reason


def _supports_sizes(facts: Mapping[str, Any]) -> bool | str:
    hidden_size, weight_size = facts["hidden_size"], facts["weight_size"]
    if weight_size is None:
        return "the layer has no weight, without which the operator crashes"
    if weight_size != hidden_size:
        return f"the weight has {weight_size} elements, a row has {hidden_size}"
    return True


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    return _supports_sizes(facts)


def _supports_groups(facts: Mapping[str, Any]) -> bool | str:
    if facts["group_size"] not in (None, facts["hidden_size"]):
        return f"groups of {facts['group_size']}, each of which would need a weight of its own"
    return _supports_sizes(facts)


def _supports_any_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if weight is None:
        return "weight is None, with which the operator crashes"
    if weight.shape != x.shape[-1:]:
        return f"weight has shape {list(weight.shape)}, x has {list(x.shape)}"
    return True


def _supports_weight(x: torch.Tensor, weight: torch.Tensor | None) -> bool | str:
    if weight is not None and weight.dtype is not x.dtype and fits(x):
        return f"weight is {weight.dtype}, x is {x.dtype}"
    return _supports_any_weight(x, weight)


def _supports_gemma(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> bool | str:
    return _supports_any_weight(x, weight)


def _supports_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> bool | str:
    return _supports_any_weight(x, weight)


def _supports_pair(x: torch.Tensor, residual: torch.Tensor) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if residual.dtype is not x.dtype:
        return f"residual is {residual.dtype}, x is {x.dtype}"
    if residual.shape != x.shape:
        return f"residual has shape {list(residual.shape)}, x has {list(x.shape)}"
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
    verdict = _supports_pair(x, residual)
    if verdict is not True:
        return verdict
    if not (x.is_contiguous() and residual.is_contiguous()):
        return "x or residual is not contiguous"
    return _supports_weight(x, weight)


def _supports_fused_gemma(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> bool | str:
    verdict = _supports_pair(x, residual)
    return verdict if verdict is not True else _supports_any_weight(x, weight)


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    y, _ = torch.ops.npu.npu_rms_norm(rows_of(x), weight.contiguous(), epsilon=epsilon)
    return y.view(x.shape)


@backend.implements(supports=_supports_rms_norm, supports_layer=_supports_layer)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) -> x's shape and dtype."""
    if not x.numel():
        return x.new_empty(x.shape)
    assert weight is not None
    return _norm(x, weight, epsilon)


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


@backend.implements(supports=_supports_gemma, supports_layer=_supports_sizes)
def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) -> x's shape and dtype.

    In float32, because 1 + weight rounded to half precision moves the result by an ulp, and the
    result is rounded once only."""
    if not x.numel():
        return x.new_empty(x.shape)
    return _norm(x.float(), weight.float() + 1.0, epsilon).to(x.dtype)


@backend.implements(supports=_supports_fused_gemma, supports_layer=_supports_sizes)
def fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, the sum), both new. In float32: with a rounded sum and a rounded 1 + weight the
    fused operator was off by 2.51 ulps of float16, where 2.5 are right."""
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(x.shape)
    total = (x.float() + residual).contiguous()
    return _norm(total, weight.float() + 1.0, epsilon).to(x.dtype), total.to(x.dtype)


@backend.implements(supports=_supports_gated, supports_layer=_supports_groups)
def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """x, z: (..., hidden), weight: (hidden,) -> x's shape and dtype. In float32, rounded once."""
    if not x.numel():
        return x.new_empty(x.shape)
    gate = None
    if z is not None:
        wide = z.float().contiguous()
        gate = wide.sigmoid() if activation == "sigmoid" else torch.ops.npu.npu_silu(wide)
    wide = x.float()
    if gate is not None and not norm_before_gate:
        wide = wide * gate
    out = _norm(wide, weight.float(), epsilon)
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(x.dtype)
