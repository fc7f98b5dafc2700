# SPDX-License-Identifier: Apache-2.0
"""Quantization by torch_npu. It has no FP8 on A2 and A3, and int8 of half precision alone."""

from __future__ import annotations

import torch

from ..ascend import backend
from .common import fits, tensor_reason


def _supports(x: torch.Tensor) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    return x.dtype is not torch.float32 or "x is float32, the operator takes half precision"


@backend.implements(supports=_supports)
def dynamic_per_token_quant_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., hidden) -> int8 (..., hidden) and float32 scales (..., 1)."""
    if not x.numel():
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.int8), scale
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scale = torch.ops.npu.npu_dynamic_quant(rows)
    return values.view(x.shape), scale.view(*x.shape[:-1], 1)
