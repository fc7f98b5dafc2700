# SPDX-License-Identifier: Apache-2.0
"""What the guards of several families need."""

from __future__ import annotations

import torch

from ..ascend import backend

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What the operators are documented for on A2 and A3, unless an implementation says less."""

MOST_DIMENSIONS = 8


def fits(x: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that the operators take; see `tensor_reason`."""
    return (
        x.dtype in DTYPES
        and x.device.type in backend.device_types
        and not x.requires_grad
        and x.dim() <= MOST_DIMENSIONS
    )


def tensor_reason(x: torch.Tensor) -> str:
    """Why a tensor does not fit."""
    if x.requires_grad:
        return "a gradient is required, and the operators have none"
    if x.device.type not in backend.device_types:
        return f"the tensor is on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"dtype {str(x.dtype).removeprefix('torch.')} is not float16, bfloat16 or float32"
    return f"{x.dim()} dimensions are more than {MOST_DIMENSIONS}"


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as most operators are documented: contiguous, with two dimensions or more."""
    return x.contiguous() if x.dim() > 1 else x.unsqueeze(0).contiguous()
