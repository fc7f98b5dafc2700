# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8 bits by vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from .....ops.quantization_fp8 import PER_TOKEN_GROUP_QUANT_FP8
from ..cuda import backend
from .common import apart, fits, short, tensor_reason

_FP8 = torch.float8_e4m3fn


def _supports_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    group_shape: list[int] | None = None,
) -> bool | str:
    if not fits(input):
        return tensor_reason(input)
    if (elsewhere := apart(input, scale=scale, scale_ub=scale_ub)) is not None:
        return elsewhere
    if input.dim() != 2:
        return f"input has {input.dim()} dimensions, not 2"
    if input.stride(-1) != 1:
        return f"the rows of input have a stride of {input.stride(-1)}"
    if not input.numel():
        return "there are no tokens"
    for name, given in (("scale", scale), ("scale_ub", scale_ub)):
        if given is not None and given.dtype is not torch.float32:
            return f"{name} is {short(given.dtype)}, not float32"
    if scale_ub is not None and scale_ub.numel() != 1:
        return f"scale_ub has {scale_ub.numel()} elements"
    if scale is not None and scale.dim() == 1 and scale.numel() > 1 and group_shape is None:
        return f"scale is float32{list(scale.shape)}, and group_shape does not say of what"
    return True


@backend.calling(
    "_C.static_scaled_fp8_quant",
    "_C.dynamic_scaled_fp8_quant",
    "_C.dynamic_per_token_scaled_fp8_quant",
).implements(supports=_supports_fp8)
def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    group_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """input: (tokens, hidden) -> FP8 of its shape, or with more rows, and the scale made here."""
    rows = max(num_token_padding or 0, input.shape[0])
    out = torch.empty((rows, input.shape[1]), dtype=_FP8, device=input.device)
    if rows > input.shape[0]:  # what stands there is open, but not to change from call to call
        out[input.shape[0] :].view(torch.uint8).zero_()
    if scale is not None:
        torch.ops._C.static_scaled_fp8_quant(out, input, scale, group_shape)
        return out, None
    if use_per_token_if_dynamic:
        made = torch.empty((rows, 1), dtype=torch.float32, device=input.device)
        if rows > input.shape[0]:
            made[input.shape[0] :] = 1.0
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(out, input, made, scale_ub)
    else:
        made = torch.empty(1, dtype=torch.float32, device=input.device)
        torch.ops._C.dynamic_scaled_fp8_quant(out, input, made)
    return out, made


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
    if dtype not in (None, _FP8):
        return f"dtype {short(dtype)} is not {short(_FP8)}"
    if not x.dim() or group_size < 1:
        return f"x has {x.dim()} dimensions, and groups of {group_size}"
    if x.shape[-1] % group_size:
        return f"rows of {x.shape[-1]} are not whole groups of {group_size}"
    if not x.numel():
        return "there are no tokens"
    if x.dim() != 2:  # the kernel raises
        return f"x has {x.dim()} dimensions, not 2"
    return x.is_contiguous() or "x is not contiguous"


@backend.calling("_C.per_token_group_fp8_quant").implements(supports=_supports_groups)
def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., tokens, hidden) -> FP8 of its shape, float32 scales (..., tokens, groups)."""
    out, scales = PER_TOKEN_GROUP_QUANT_FP8.fake(  # its shapes and strides are what is due
        x, group_size, eps, dtype, column_major_scales, tma_aligned_scales, use_ue8m0
    )
    info = torch.finfo(_FP8)
    torch.ops._C.per_token_group_fp8_quant(
        x,
        out,
        scales,
        group_size,
        eps,
        info.min,
        info.max,
        use_ue8m0,
        column_major_scales,
        tma_aligned_scales,
    )
    return out, scales


def _supports_int8(x: torch.Tensor) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    if not x.numel():
        return "there are no tokens"
    return x.is_contiguous() or "x is not contiguous"


@backend.calling("_C.dynamic_scaled_int8_quant").implements(
    supports=_supports_int8, batch_invariant=True
)
def dynamic_per_token_quant_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., hidden) -> int8 of its shape, float32 scales (..., 1)."""
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    torch.ops._C.dynamic_scaled_int8_quant(out, x, scale, None)
    return out, scale
