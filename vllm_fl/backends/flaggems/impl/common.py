# SPDX-License-Identifier: Apache-2.0
"""What the guards of several families need."""

from __future__ import annotations

from functools import lru_cache

import torch

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The kernels compute in float32, which is too little for float64."""


def fits(x: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that the kernels take; see `tensor_reason`."""
    return x.dtype in DTYPES and not x.requires_grad


def tensor_reason(x: torch.Tensor) -> str:
    """Why a tensor does not fit."""
    if x.requires_grad:
        return "a gradient is required, and the forward kernels have none"
    return f"dtype {dtype_name(x)} is not float32, bfloat16 or float16"


def dtype_name(x: torch.Tensor) -> str:
    """A tensor's dtype as people write it."""
    return str(x.dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton compiles conversions to FP8 for the device: NVIDIA's since Ada (8.9)."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)
