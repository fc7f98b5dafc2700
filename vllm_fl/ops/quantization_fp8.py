# SPDX-License-Identifier: Apache-2.0
"""Quantization to FP8: x ~ values * scale.

FP8 is float8_e4m3fn, whose largest number is 448; what is beyond it becomes that number,
infinities too. NaN, and infinities where the scale is computed from them, are outside of the
contracts: kernels differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["FP8", "FP8_MAX", "NOT_FINITE", "PER_TOKEN_GROUP_QUANT_FP8", "SCALED_FP8_QUANT", "rows"]

_Tensors = tuple[torch.Tensor | None, ...]

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""The least scale that vLLM gives a token: 448 times it is the smallest number of FP8, 2**-9."""

NOT_FINITE = "a scale computed from them is no number to divide by, and kernels differ"
"""Why contracts have no cases with infinities and NaN."""

_GPU = ("cuda", "xpu")

_FP8_TOLERANCE = half_and_single(
    half=(0.50001, 1.51),
    single=(0.50001, 1.51),
    why="values: rounded once to FP8 (0.5 ulp); before that at most four float32 roundings (scale, "
    "its reciprocal, the product), 2**-22 of a value that is at most 16 ulp of FP8, which is "
    "0.000004 ulp. Scale: a product with the rounded 1 / 448 is off by up to 1 + 0.5 ulp",
)


def _single(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.to(torch.float32)


def rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    pad: int = 0,
    permuted: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Normally distributed; with `pad`, slices of wider rows; with two dimensions exchanged."""
    wide = scale * torch.randn(*shape[:-1], shape[-1] + pad, generator=generator)
    made = wide.to(dtype)[..., : shape[-1]]
    if permuted is not None:
        made = made.transpose(*permuted).contiguous().transpose(*permuted)
    return made


# --------------------------------------------------------------------------- scaled_fp8_quant


def _spread(scale: torch.Tensor, shape: torch.Size, group_shape: list[int] | None) -> torch.Tensor:
    """A given scale, one for each element of the input or to be broadcast to it."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        if group_shape is None:
            raise ValueError(
                f"scaled_fp8_quant: a scale of shape {list(scale.shape)} needs a group_shape: "
                "(-1, 1) for one of each channel, (1, -1) for one of each token"
            )
        each = group_shape[0] if group_shape[0] > 0 else shape[0]
        scale = scale.unsqueeze(0) if each == shape[0] else scale.unsqueeze(1)
    for dim in (0, 1):
        if scale.shape[dim] not in (1, shape[dim]):
            if not scale.shape[dim] or shape[dim] % scale.shape[dim]:
                raise ValueError(
                    f"scaled_fp8_quant: scale {list(scale.shape)} does not divide input "
                    f"{list(shape)} into equal groups"
                )
            scale = scale.repeat_interleave(shape[dim] // scale.shape[dim], dim)
    return scale


def _scaled(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    group_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values before they are rounded to FP8; scale, None where it was given)."""
    x = _single(input)
    computed = None
    if scale is None:
        if use_per_token_if_dynamic:
            largest = x.abs().amax(dim=-1, keepdim=True)
            if scale_ub is not None:
                largest = largest.minimum(scale_ub.to(largest))
        else:
            largest = x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1)
        factor = computed = (largest / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    else:
        factor = _spread(_single(scale), x.shape, group_shape)
    values = (x * factor.reciprocal()).clamp(-FP8_MAX, FP8_MAX)
    missing = max((num_token_padding or 0) - x.shape[0], 0)
    if missing:
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        if computed is not None and use_per_token_if_dynamic:
            computed = torch.nn.functional.pad(computed, (0, 0, 0, missing))
    return values, computed


def _scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    group_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    values, computed = _scaled(
        input, scale, num_token_padding, scale_ub, use_per_token_if_dynamic, group_shape
    )
    return values.to(FP8, memory_format=torch.contiguous_format), computed


def _scaled_fp8_quant_fake(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    group_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = input.shape[0]
    if num_token_padding:
        tokens = max(num_token_padding, tokens)
    values = input.new_empty((tokens, input.shape[1]), dtype=FP8)
    if scale is not None:
        return values, values.new_empty(0)
    shape = (tokens, 1) if use_per_token_if_dynamic else (1,)
    return values, input.new_empty(shape, dtype=torch.float32)


def _without_padding(outputs: _Tensors, args: tuple[Any, ...]) -> _Tensors:
    """What is in the rows of padding is open."""
    values, scale = outputs
    tokens = args[0].shape[0]
    if scale is not None and scale.dim() == 2:
        scale = scale[:tokens]
    return None if values is None else values[:tokens], scale


def _scaled_inputs(
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    given: tuple[int, ...] | None = None,
    group_shape: list[int] | None = None,
    bound: float | None = None,
    padding: int | None = None,
    per_token: bool = False,
    limits: bool = False,
    zero_rows: bool = False,
    **changes: Any,
) -> tuple[Any, ...]:
    """given: the shape of a scale; limits: values around FP8's largest, with a scale of one."""
    x = rows(shape, dtype, generator, **changes)
    scale = None
    if given is not None:
        scale = torch.rand(given, generator=generator) * 0.01 + 0.002
    if limits:
        edge = torch.tensor([448, 447, 449, 464, 465, 1e4, float("inf"), 0.0, 2**-9, 2**-10])
        x[..., : edge.numel()] = edge.to(dtype)
        x[..., edge.numel() : 2 * edge.numel()] = -edge.to(dtype)
        scale = torch.ones(1)
    if zero_rows:
        x[::2] = 0
    upper = None if bound is None else torch.tensor([bound])
    return (x, scale, padding, upper, per_token, group_shape)


_PER_TOKEN: dict[str, Any] = {"per_token": True}

_SCALED_CASES = tuple(
    Case(name, partial(_scaled_inputs, shape, **changes))
    for name, shape, changes in (
        ("one token, static", (1, 128), {"given": (1,)}),
        ("one token, dynamic", (1, 128), {}),
        ("one token, dynamic per token", (1, 128), _PER_TOKEN),
        ("zero tokens, static", (0, 128), {"given": (1,)}),
        ("zero tokens, dynamic per token", (0, 128), _PER_TOKEN),
        ("odd size, static", (7, 61), {"given": ()}),
        ("odd size, dynamic", (7, 61), {}),
        ("odd size, dynamic per token", (7, 61), _PER_TOKEN),
        ("prime width, dynamic", (5, 4099), {}),
        ("prime width, dynamic per token", (5, 4099), _PER_TOKEN),
        ("tiny values, static", (5, 128), {"given": (1,), "scale": 1e-3}),
        ("tiny values, dynamic", (5, 128), {"scale": 1e-3}),
        ("tiny values, dynamic per token", (5, 128), {**_PER_TOKEN, "scale": 1e-3}),
        ("huge values, static", (5, 128), {"given": (1,), "scale": 1e4}),
        ("huge values, dynamic", (5, 128), {"scale": 1e4}),
        ("huge values, dynamic per token", (5, 128), {**_PER_TOKEN, "scale": 1e4}),
        ("slice of wider rows, static", (5, 128), {"given": (1,), "pad": 64}),
        ("slice of wider rows, dynamic", (5, 128), {"pad": 64}),
        ("slice of wider rows, dynamic per token", (5, 128), {**_PER_TOKEN, "pad": 64}),
        ("permuted, static", (5, 128), {"given": (1,), "permuted": (0, 1)}),
        ("permuted, dynamic", (5, 128), {"permuted": (0, 1)}),
        ("permuted, dynamic per token", (5, 128), {**_PER_TOKEN, "permuted": (0, 1)}),
        ("rows of zeros, dynamic", (5, 128), {"zero_rows": True}),
        ("rows of zeros, dynamic per token", (5, 128), {**_PER_TOKEN, "zero_rows": True}),
        ("values at FP8's limits", (3, 64), {"limits": True}),
        ("upper bound of the scale", (5, 128), {**_PER_TOKEN, "bound": 1.5}),
        ("scale of each token", (6, 64), {"given": (6,), "group_shape": [1, -1]}),
        ("scale of each channel", (6, 64), {"given": (64,), "group_shape": [-1, 1]}),
        ("scale of groups of 32", (6, 64), {"given": (6, 2), "group_shape": [1, 32]}),
        ("scale of blocks", (6, 64), {"given": (2, 4), "group_shape": [3, 16]}),
        ("padding, static", (5, 64), {"given": (1,), "padding": 16}),
        ("padding, dynamic", (5, 64), {"padding": 16}),
        ("padding, dynamic per token", (5, 64), {**_PER_TOKEN, "padding": 16}),
        ("padding that is no more than there is", (5, 64), {"given": (1,), "padding": 4}),
    )
)

SCALED_FP8_QUANT = OpContract(
    signature=OpSignature.parse(
        "scaled_fp8_quant(input, scale=None, num_token_padding=None, scale_ub=None, "
        "use_per_token_if_dynamic=False, group_shape=None)",
        summary=(
            "FP8 of input / scale. input: (tokens, hidden). scale: float32 of one element, or one "
            "for each group (group_shape: rows and columns of a group, -1 for all; needed by a "
            "1-D scale). Without it, max(|input|) / 448 of the whole (at least 1 / 512 somewhere: "
            "below, kernels differ), or of each token, where scale_ub bounds the maximum and the "
            "scale is at least 1 / (448 * 512). num_token_padding: the least number of rows of "
            "the result; what is in those beyond tokens is open. Returns (values, scale), and "
            "None instead of a scale that was given."
        ),
    ),
    schema=(
        "(Tensor input, Tensor? scale=None, SymInt? num_token_padding=None, "
        "Tensor? scale_ub=None, bool use_per_token_if_dynamic=False, int[]? group_shape=None) "
        "-> (Tensor, Tensor)"
    ),
    reference=_scaled_fp8_quant,
    fake=_scaled_fp8_quant_fake,
    exact=_scaled,
    arrays={
        "input": "T[tokens, hidden]",
        "scale": "(float32[] or float32[scales] or float32[row_groups, column_groups])?",
        "scale_ub": "float32[1]?",
    },
    results=(
        "float8_e4m3fn[rows, hidden]",
        "(float32[1] or float32[rows, 1])?",
    ),
    canonical=_without_padding,
    without={
        "leading shapes": "as vLLM's function, it takes rows",
        "inf and nan": NOT_FINITE,
    },
    call_sites=(
        CallSite(
            "vllm._custom_ops:scaled_fp8_quant",
            "the function, which is looked up at each call; where nothing is compiled",
            _GPU,
            "QuantFP8.forward_cuda and the FP8 schemes; on CPU vLLM has no FP8 kernels",
        ),
    ),
    source="https://arxiv.org/abs/2209.05433; floors and bounds as vLLM has them",
    cases=_SCALED_CASES,
    tolerances=_FP8_TOLERANCE,
)


# ------------------------------------------------------------------ per_token_group_quant_fp8


def _grouped(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values before they are rounded to FP8; scales), both row by row."""
    limit = torch.finfo(dtype or FP8).max
    groups = _single(x).unflatten(-1, (x.shape[-1] // group_size, group_size))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=eps) / limit
    if use_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (groups / scale).clamp(-limit, limit).flatten(-2)
    return values, scale.squeeze(-1)


def _group_quant(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = _grouped(x, group_size, eps, dtype, use_ue8m0=use_ue8m0)
    placed = _scales_like(x, group_size, column_major_scales, tma_aligned_scales)
    rounded = values.to(dtype or FP8, memory_format=torch.contiguous_format)
    return rounded, placed.copy_(scale)


def _group_quant_fake(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.new_empty(x.shape, dtype=dtype or FP8)
    return values, _scales_like(x, group_size, column_major_scales, tma_aligned_scales)


def _scales_like(
    x: torch.Tensor, group_size: int, column_major: bool, tma_aligned: bool
) -> torch.Tensor:
    """Memory for the scales. Column-major, a group's scales of all tokens follow each other; for
    TMA their number is rounded up to 4 (16 bytes)."""
    shape = (*x.shape[:-1], x.shape[-1] // group_size)
    if not column_major:
        return x.new_empty(shape, dtype=torch.float32)
    tokens, groups = shape[-2:]
    step = (tokens + 3) // 4 * 4 if tma_aligned else tokens
    outer = [step * groups] if x.dim() == 3 else []
    return x.new_empty_strided(shape, (*outer, 1, step), dtype=torch.float32)


def _without_empty_groups(outputs: _Tensors, args: tuple[Any, ...]) -> _Tensors:
    """The power of two behind a group of zeros is open: some kernels bound it once more."""
    values, scale = outputs
    x, group_size, *rest = args
    if scale is None or not (len(rest) > 4 and rest[4]):
        return outputs
    groups = x.to(scale.device).unflatten(-1, (x.shape[-1] // group_size, group_size))
    return values, scale.masked_fill((groups == 0).all(dim=-1), 0.0)


def _group_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    group_size: int = 32,
    eps: float = 1e-10,
    column_major: bool = False,
    tma_aligned: bool = False,
    ue8m0: bool = False,
    zero_groups: bool = False,
    limits: bool = False,
    **changes: Any,
) -> tuple[Any, ...]:
    x = rows(shape, dtype, generator, **changes)
    if zero_groups:
        x[..., :group_size] = 0
        x[1] = 0
    if limits:
        x[..., ::group_size] = 448
        x[..., 1::group_size] = -448
    return (x, group_size, eps, None, column_major, tma_aligned, ue8m0)


_GROUP_CASES = tuple(
    Case(name, partial(_group_inputs, shape, **changes))
    for name, shape, changes in (
        ("one token", (1, 128), {}),
        ("zero tokens", (0, 128), {}),
        ("odd size", (7, 61 * 3), {"group_size": 61}),
        ("groups of 128", (5, 512), {"group_size": 128}),
        ("one group", (5, 96), {"group_size": 96}),
        ("groups of one", (3, 7), {"group_size": 1}),
        ("prime number of groups", (5, 31 * 8), {"group_size": 8}),
        ("1-D", (64,), {}),
        ("3-D", (2, 3, 64), {}),
        ("4-D", (2, 2, 3, 64), {}),
        ("permuted tokens", (4, 3, 64), {"permuted": (0, 1)}),
        ("column-major scales", (7, 128), {"column_major": True}),
        ("column-major scales of one token", (1, 128), {"column_major": True}),
        ("column-major scales of zero tokens", (0, 128), {"column_major": True}),
        ("aligned for TMA", (7, 128), {"column_major": True, "tma_aligned": True}),
        ("3-D, aligned for TMA", (2, 5, 64), {"column_major": True, "tma_aligned": True}),
        ("powers of two", (7, 128), {"ue8m0": True}),
        ("powers of two, column-major", (5, 128), {"ue8m0": True, "column_major": True}),
        ("powers of two, tiny values", (5, 128), {"ue8m0": True, "scale": 1e-3}),
        ("powers of two, huge values", (5, 128), {"ue8m0": True, "scale": 1e4}),
        ("powers of two, groups of zeros", (5, 128), {"ue8m0": True, "zero_groups": True}),
        ("tiny values", (5, 128), {"scale": 1e-3}),
        ("huge values", (5, 128), {"scale": 1e4}),
        ("groups of zeros", (5, 128), {"zero_groups": True}),
        ("values at FP8's limits", (3, 128), {"limits": True, "scale": 100.0}),
        ("limits and powers of two", (3, 128), {"limits": True, "scale": 100.0, "ue8m0": True}),
        ("a greater eps", (5, 128), {"eps": 10.0}),
        ("slice of wider rows", (5, 128), {"pad": 64}),
    )
)

PER_TOKEN_GROUP_QUANT_FP8 = OpContract(
    signature=OpSignature.parse(
        "per_token_group_quant_fp8(x, group_size, eps=1e-10, dtype=None, "
        "column_major_scales=False, tma_aligned_scales=False, use_ue8m0=False)",
        summary=(
            "FP8 of x, with a scale for each group_size values of a row: max(|group|, eps) / 448, "
            "rounded up to a power of two with use_ue8m0. x: (..., tokens, hidden), the last "
            "dimension dense. dtype: of the values, None for float8_e4m3fn. column_major_scales: "
            "strides (1, tokens) for 2-D, with tma_aligned_scales (1, tokens rounded up to 4), "
            "the only one for 3-D. Returns (values, scales)."
        ),
    ),
    schema=(
        "(Tensor x, SymInt group_size, float eps=1e-10, ScalarType? dtype=None, "
        "bool column_major_scales=False, bool tma_aligned_scales=False, bool use_ue8m0=False) "
        "-> (Tensor, Tensor)"
    ),
    reference=_group_quant,
    fake=_group_quant_fake,
    exact=_grouped,
    arrays={"x": "T[..., groups*group_size]"},
    results=("fp8[..., groups*group_size]", "float32[..., groups]"),
    canonical=_without_empty_groups,
    without={"inf and nan": NOT_FINITE},
    strided=True,
    batched=("x",),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.quantization.utils.fp8_utils:per_token_group_quant_fp8",
            "the function, there and where it is imported by name; where nothing is compiled",
            _GPU,
            "QuantFP8.forward_cuda and the MoE kernels; on CPU vLLM has no FP8 kernels",
        ),
    ),
    source="https://arxiv.org/abs/2412.19437, section 3.3.2; UE8M0 as in OCP Microscaling v1.0",
    cases=_GROUP_CASES,
    tolerances=_FP8_TOLERANCE,
)
