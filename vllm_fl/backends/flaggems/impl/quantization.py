# SPDX-License-Identifier: Apache-2.0
"""FP8 by FlagGems.

per_token_group_quant_fp8 takes the second dimension for the last and the first stride for that
of rows: what is not two-dimensional is flattened. Without a dtype it stores float32 on devices
older than Hopper: the dtype is always told.
"""

from __future__ import annotations

from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import converts_to_fp8, fits, tensor_reason

kernels = backend.kernels

_FP8 = torch.float8_e4m3fn


def _supports_groups(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if not converts_to_fp8(x.device):
        return "Triton converts to FP8 on compute capability 8.9 and later"
    if column_major_scales and (tma_aligned_scales or x.dim() != 2):
        return "column-major scales are aligned, or those of more than rows"
    return True


@planned
def _group_quant(x: torch.Tensor, *settings: Any) -> Any:
    return kernels.per_token_group_quant_fp8(x, *settings)


@backend.implements(
    symbols=("per_token_group_quant_fp8",), supports=_supports_groups, batch_invariant=True
)
def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., hidden) -> values of x's shape, scales (..., hidden // group_size)."""
    dtype = dtype or _FP8
    groups = x.shape[-1] // group_size
    if not x.numel():
        shape = (*x.shape[:-1], groups)
        strides = (1, x.shape[0]) if column_major_scales else None
        scales = x.new_empty(shape, dtype=torch.float32)
        if strides is not None:
            scales = x.new_empty_strided(shape, strides, dtype=torch.float32)
        return x.new_empty(x.shape, dtype=dtype), scales
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    # 0 or 1, not a bool: Triton's interpreter knows none that is no constant.
    values, scales = _group_quant(rows, group_size, eps, dtype, column_major_scales, int(use_ue8m0))
    if x.dim() == 2:
        return values, scales
    return values.view(x.shape), scales.view(*x.shape[:-1], groups)


_LEAST_DEPTH = 32
"""What one tensor-core instruction of FP8 sums over."""


def _supports_matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> bool | str:
    if not converts_to_fp8(A.device):
        return "Triton multiplies FP8 on compute capability 8.9 and later"
    if block_size[1] < _LEAST_DEPTH:  # a CompilationError on an H200
        return f"blocks of {block_size[1]} are less than the {_LEAST_DEPTH} that Triton multiplies"
    return True


@backend.implements(symbols=("w8a8_block_fp8_matmul",), supports=_supports_matmul)
def w8a8_block_fp8_matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """A: (..., K), B: (N, K), both FP8, with scales of blocks -> (..., N)."""
    if not A.numel():
        return A.new_zeros(*A.shape[:-1], B.shape[0], dtype=output_dtype)
    A, As = A.contiguous(), As.contiguous()
    return kernels.w8a8_block_fp8_matmul(A, B, As, Bs, block_size, output_dtype)
