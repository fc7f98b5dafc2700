# SPDX-License-Identifier: Apache-2.0
"""What the guards of several families need."""

from __future__ import annotations

import torch

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What the kernels are compiled for; others raise."""

VECTOR = 8
"""Rows are read in vectors of 8 elements; the kernels refuse sizes that are no multiple."""


def dtype_reason(dtype: torch.dtype) -> str:
    """Why a dtype is refused."""
    return f"dtype {str(dtype).removeprefix('torch.')} is not float32, bfloat16 or float16"
