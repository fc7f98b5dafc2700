# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8 bits, and matrix products of its results."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, Tolerance, half_and_single
from .quantization_fp8 import (
    FP8,
    FP8_MAX,
    NOT_FINITE,
    PER_TOKEN_GROUP_QUANT_FP8,
    SCALED_FP8_QUANT,
    rows,
)

__all__ = [
    "CONTRACTS",
    "DYNAMIC_PER_TOKEN_QUANT_INT8",
    "PER_TOKEN_GROUP_QUANT_FP8",
    "SCALED_FP8_QUANT",
    "W8A8_BLOCK_FP8_MATMUL",
]

_Tensors = tuple[torch.Tensor | None, ...]

INT8_MAX = 127
LEAST_MAXIMUM = 1e-10
"""What a row's largest magnitude counts as if it is less: no division by zero."""


# --------------------------------------------------------------- dynamic_per_token_quant_int8


def _by_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values before they are rounded to integers; scale)."""
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_MAXIMUM)
    return wide * (INT8_MAX / largest), largest / INT8_MAX


def _int8_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = _by_token(x)
    dense = torch.contiguous_format
    return values.round().to(torch.int8, memory_format=dense), scale.contiguous()


def _int8_quant_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
    )


def _without_empty_rows(outputs: _Tensors, args: tuple[Any, ...]) -> _Tensors:
    """The scale of a row of zeros is open: it is nothing, or next to nothing."""
    values, scale = outputs
    if scale is None:
        return outputs
    empty = (args[0].to(scale.device) == 0).all(dim=-1, keepdim=True)
    return values, scale.masked_fill(empty, 0.0)


def _int8_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    zero_rows: bool = False,
    whole: bool = False,
    **changes: Any,
) -> tuple[Any, ...]:
    x = rows(shape, dtype, generator, **changes)
    if whole:  # the scale is one, and every value an integer or halfway between two
        x = (torch.randint(-253, 254, shape, generator=generator) / 2).to(dtype)
        x[..., 0] = 127
    if zero_rows:
        x[::2] = 0
    return (x,)


DYNAMIC_PER_TOKEN_QUANT_INT8 = OpContract(
    signature=OpSignature.parse(
        "dynamic_per_token_quant_int8(x)",
        summary=(
            "int8 of x / scale with a scale of max(|row|) / 127 for each row; x: (..., hidden) -> "
            "(values: int8 (..., hidden), scale: float32 (..., 1)). Halves may be rounded either "
            "way; the scale of a row of zeros is open."
        ),
    ),
    schema="(Tensor x) -> (Tensor, Tensor)",
    reference=_int8_quant,
    fake=_int8_quant_fake,
    exact=_by_token,
    arrays={"x": "T[..., hidden]"},
    results=("int8[..., hidden]", "float32[..., 1]"),
    canonical=_without_empty_rows,
    without={"inf and nan": NOT_FINITE},
    batched=("x",),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.quantization.utils.int8_utils:per_token_quant_int8",
            "the function, there and where it is imported by name; where nothing is compiled",
            ("cuda", "xpu"),
            "the INT8 mixture of experts",
        ),
        CallSite(
            "vllm._custom_ops:scaled_int8_quant",
            "the function, which is looked up at each call; where nothing is compiled",
            ("cuda",),
            "without a scale and symmetric; the INT8 linear layers. On CPU vLLM has a kernel for "
            "them too, and is left alone",
        ),
    ),
    source="https://arxiv.org/abs/2206.01861, section 4.1",
    cases=tuple(
        Case(name, partial(_int8_inputs, shape, **changes))
        for name, shape, changes in (
            ("one token", (1, 128), {}),
            ("zero tokens", (0, 128), {}),
            ("odd size", (7, 61), {}),
            ("prime width", (5, 4099), {}),
            ("one value", (5, 1), {}),
            ("1-D", (64,), {}),
            ("3-D", (2, 3, 64), {}),
            ("4-D", (2, 2, 3, 64), {}),
            ("tiny values", (5, 128), {"scale": 1e-3}),
            ("huge values", (5, 128), {"scale": 1e4}),
            ("slice of wider rows", (5, 128), {"pad": 64}),
            ("permuted", (5, 128), {"permuted": (0, 1)}),
            ("permuted tokens", (4, 3, 64), {"permuted": (0, 1)}),
            ("rows of zeros", (5, 128), {"zero_rows": True}),
            ("integers and halves", (5, 128), {"whole": True}),
        )
    ),
    tolerances=half_and_single(
        half=(0.5001, 1.51),
        single=(0.5001, 1.51),
        why="values: rounded once to an integer (0.5); before that at most four float32 roundings "
        "of a value up to 127, 0.00003. Scale: a product with the rounded 1 / 127 is off by up to "
        "1 + 0.5 ulp",
    ),
)


# ---------------------------------------------------------------------- w8a8_block_fp8_matmul


def _dequantized(values: torch.Tensor, scales: torch.Tensor, block: list[int]) -> torch.Tensor:
    """values: (rows, columns); scales: one for each block of them, the last ones partial."""
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    for dim, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return wide * scales.to(wide)


def _product(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    block_n, block_k = block_size
    a = _dequantized(A.reshape(-1, A.shape[-1]), As.reshape(-1, As.shape[-1]), [1, block_k])
    b = _dequantized(B, Bs, [block_n, block_k])
    return (a @ b.t()).reshape(*A.shape[:-1], B.shape[0])


def _matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    return _product(A, B, As, Bs, block_size, output_dtype).to(output_dtype)


def _matmul_fake(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=output_dtype)


def _terms(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """The sum of the terms' magnitudes."""
    return (_product(A.abs(), B.abs(), As, Bs, block_size, output_dtype),)


def _matmul_inputs(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    block: tuple[int, int] = (128, 128),
    a_scale: float = 1.0,
    b_scale: float = 1.0,
    limits: bool = False,
    zero_blocks: bool = False,
    pad: int = 0,
    permuted: bool = False,
) -> tuple[Any, ...]:
    """sizes: (..., n, k) of a product (..., k) times (n, k)."""
    *tokens, n, k = sizes

    def quantized(*shape: int) -> torch.Tensor:
        wide = 100 * torch.randn(*shape[:-1], shape[-1] + pad, generator=generator)
        values = wide.clamp(-FP8_MAX, FP8_MAX)
        if limits:
            values = FP8_MAX * values.sign()
        return values.to(FP8)[..., : shape[-1]]

    def scales(scale: float, *shape: int) -> torch.Tensor:
        return scale * (torch.rand(*shape, generator=generator) + 0.5)

    groups_n, groups_k = (-(-size // step) for size, step in zip((n, k), block, strict=True))
    a, b = quantized(*tokens, k).contiguous(), quantized(n, k)
    if permuted:
        b = b.t().contiguous().t()
    a_scales = scales(0.01 * a_scale, *tokens, groups_k)
    b_scales = scales(0.001 * b_scale, groups_n, groups_k)
    if zero_blocks:
        a_scales[..., 0] = 0
        b_scales[-1] = 0
    return (a, b, a_scales, b_scales, list(block), dtype)


_WHY = (
    "relative to the terms: FP8 tensor cores keep about 14 bits of a sum (https://arxiv.org/abs/"
    "2412.19437, section 3.3.2), so each step of 32 terms cuts off up to 2**-13 of it, and there "
    "are 4 of them in a block of 128 before it goes to float32: 2**-11 of the terms, up to {} ulp "
    "within a binade; and {} for the rounding of the result"
)

W8A8_BLOCK_FP8_MATMUL = OpContract(
    signature=OpSignature.parse(
        "w8a8_block_fp8_matmul(A, B, As, Bs, block_size, output_dtype)",
        summary=(
            "(A * As) @ (B * Bs)^T, accumulated in float32. A: FP8 (..., k), dense; B: FP8 (n, k); "
            "block_size: (block_n, block_k); As: float32, one for each block_k values of a row of "
            "A; Bs: float32, one for each block of B; the last blocks may be partial. Returns "
            "(..., n) of output_dtype."
        ),
    ),
    schema=(
        "(Tensor A, Tensor B, Tensor As, Tensor Bs, int[] block_size, ScalarType output_dtype) "
        "-> Tensor"
    ),
    reference=_matmul,
    fake=_matmul_fake,
    exact=_product,
    magnitude=_terms,
    arrays={
        "A": "float8_e4m3fn[..., k]",
        "B": "float8_e4m3fn[n, k]",
        "As": "float32[..., k_groups]",
        "Bs": "float32[n_groups, k_groups]",
    },
    results=("T[..., n]",),
    constraints=("k_groups <= k", "n_groups <= n"),
    without={"inf and nan": "FP8 of this kind has no infinity, and its NaN makes every sum NaN"},
    batched=("A", "As"),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.quantization.utils.fp8_utils:w8a8_triton_block_scaled_mm",
            "the function, which an opaque operator imports at each call",
            ("cuda", "xpu"),
            "where neither CUTLASS, DeepGEMM nor FlashInfer takes the FP8 linear layer",
        ),
    ),
    source="https://arxiv.org/abs/2412.19437, section 3.3",
    cases=tuple(
        Case(name, partial(_matmul_inputs, sizes, **changes))
        for name, sizes, changes in (
            ("one token", (1, 128, 128), {}),
            ("zero tokens", (0, 128, 128), {}),
            ("odd and prime size", (7, 61, 97), {}),
            ("several blocks", (5, 256, 384), {}),
            ("partial blocks", (5, 200, 300), {}),
            ("blocks that are not square", (5, 64, 256), {"block": (32, 64)}),
            ("small blocks", (5, 32, 64), {"block": (16, 16)}),
            ("1-D", (64, 128), {}),
            ("3-D", (2, 3, 64, 128), {}),
            ("4-D", (2, 2, 3, 64, 128), {}),
            ("tiny values", (5, 64, 128), {"a_scale": 1e-3}),
            ("huge values", (5, 64, 128), {"a_scale": 1e6, "b_scale": 1e-3}),
            ("values at FP8's limits", (3, 64, 256), {"limits": True}),
            ("blocks of zeros", (5, 256, 256), {"zero_blocks": True}),
            ("slice of wider weights", (5, 64, 128), {"pad": 64}),
            ("permuted weights", (5, 64, 128), {"permuted": True}),
        )
    ),
    tolerances={
        torch.bfloat16: Tolerance(0.625, _WHY.format("0.125", "0.5")),
        torch.float16: Tolerance(1.5, _WHY.format("1", "0.5")),
        torch.float32: Tolerance(8192, _WHY.format("8192", "nothing")),
    },
)

CONTRACTS = (
    SCALED_FP8_QUANT,
    PER_TOKEN_GROUP_QUANT_FP8,
    W8A8_BLOCK_FP8_MATMUL,
    DYNAMIC_PER_TOKEN_QUANT_INT8,
)
