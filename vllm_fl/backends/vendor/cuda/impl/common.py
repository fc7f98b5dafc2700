# SPDX-License-Identifier: Apache-2.0
"""What the guards of several families need."""

from __future__ import annotations

import torch

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What the kernels are compiled for; on others they raise."""


def fits(x: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that the kernels take; see `tensor_reason`."""
    return x.dtype in DTYPES and x.is_cuda and not x.requires_grad


def tensor_reason(x: torch.Tensor) -> str:
    """Why a tensor does not fit."""
    if x.requires_grad:
        return "a gradient is required, and the kernels have none"
    if not x.is_cuda:
        return f"the tensor is on {x.device.type}"
    return f"dtype {str(x.dtype).removeprefix('torch.')} is not float32, bfloat16 or float16"


def apart(x: torch.Tensor, **others: torch.Tensor | None) -> str | None:
    """Why the kernels cannot take the others with x: one is on another device. None: they can."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            return f"{name} is on {other.device}, not on {x.device}"
    return None


ALIGNMENT = 16
"""Bytes of a vector: kernels that read whole ones lose the device at other addresses."""


def dense(x: torch.Tensor) -> torch.Tensor:
    """x contiguous at a vector's address: itself, or a copy. Not a matter for the guard, because
    only the address tells, and fake tensors have none."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def short(dtype: torch.dtype) -> str:
    """A dtype's name without the module."""
    return str(dtype).removeprefix("torch.")
