# SPDX-License-Identifier: Apache-2.0
"""What the guards of several families need."""

from __future__ import annotations

import platform

import torch


def _rounds_bfloat16() -> bool:
    """Whether the build that vLLM loads here rounds to bfloat16, or truncates.

    On x86 only the one for AVX512_BF16 rounds, and vLLM asks torch the same questions. The
    others are off by up to 1 ulp, always towards zero: a residual that 64 calls of
    fused_add_rms_norm added to was off by 11 %, instead of 1 %.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return bool(torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported())


DTYPES = frozenset(
    {torch.float32, torch.float16} | ({torch.bfloat16} if _rounds_bfloat16() else set())
)
"""What the kernels are right for; of bfloat16 see above, others raise."""

VECTOR = 8
"""Rows are read in vectors of 8 elements; the kernels refuse sizes that are no multiple."""

ALIGNMENT = 16
"""Bytes. bfloat16 vectors are stored with aligned instructions: elsewhere the process ends."""


def fits(x: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that the kernels take; see `tensor_reason`."""
    return x.dtype in DTYPES and x.is_cpu and not x.requires_grad


def tensor_reason(x: torch.Tensor) -> str:
    """Why a tensor does not fit."""
    if x.requires_grad:
        return "a gradient is required, and the kernels have none"
    if not x.is_cpu:
        return f"the tensor is on {x.device.type}"
    if x.dtype is torch.bfloat16:
        return "bfloat16 is truncated, not rounded: this CPU has no AVX512_BF16"
    return f"dtype {str(x.dtype).removeprefix('torch.')} is not float32, bfloat16 or float16"
