# SPDX-License-Identifier: Apache-2.0
"""Gated activations: act(x[..., :d]) * x[..., d:] with d = x.shape[-1] // 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["CONTRACTS", "GELU_AND_MUL", "SILU_AND_MUL"]


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def _gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]


def _half_width(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _gelu_facts(x: torch.Tensor, approximate: str = "none") -> dict[str, Any]:
    return {"approximate": approximate}


def _rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    pad: int = 0,
    extra: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    x = scale * torch.randn(*shape[:-1], shape[-1] + pad, generator=generator)
    return (x.to(dtype)[..., : shape[-1]], *extra)


WIDE_RANGE = (torch.float32, torch.bfloat16)


def _cases(*extra: Any) -> tuple[Case, ...]:
    make = partial(_rows, extra=extra)
    suffix = f", {extra[0]}" if extra else ""
    shapes = {
        "one token": (1, 128),
        "zero tokens": (0, 128),
        "odd size": (7, 2 * 61),
        "1-D": (64,),
        "4-D": (2, 3, 4, 64),
        "wide": (5, 3072),
    }
    return (
        *(Case(name + suffix, partial(make, shape)) for name, shape in shapes.items()),
        Case("tiny values" + suffix, partial(make, (3, 64), scale=1e-3)),
        # The products leave float16's range.
        Case("huge values" + suffix, partial(make, (3, 64), scale=1e4), WIDE_RANGE),
        Case("slice of wider rows" + suffix, partial(make, (5, 128), pad=64)),
    )


_TOLERANCES = half_and_single(
    half=2.5,
    single=8,
    why="half precision: the activation and the product are each rounded once (0.5 ulp each, the "
    "first one scaled by up to 2 within a binade), and one more for a kernel's exponential; "
    "float32: exp, erf or tanh of a library is good to about 4 ulp",
)

SILU_AND_MUL = OpContract(
    signature=OpSignature.parse(
        "silu_and_mul(x)",
        summary="silu(x[..., :d]) * x[..., d:]; x: (..., 2 * d) -> (..., d), same dtype.",
    ),
    schema="(Tensor x) -> Tensor",
    reference=_silu_and_mul,
    fake=_half_width,
    arrays={"x": "T[..., 2*d]"},
    results=("T[..., d]",),
    batched=("x",),
    call_sites=(
        CallSite("vllm.model_executor.layers.activation:SiluAndMul", "the layer's forward"),
    ),
    cases=_cases(),
    tolerances=_TOLERANCES,
)

GELU_AND_MUL = OpContract(
    signature=OpSignature.parse(
        'gelu_and_mul(x, approximate="none")',
        facts=_gelu_facts,
        fact_names=("approximate",),
        summary="gelu(x[..., :d]) * x[..., d:]; approximate is none (erf) or tanh.",
    ),
    schema='(Tensor x, str approximate="none") -> Tensor',
    reference=_gelu_and_mul,
    fake=_half_width,
    arrays={"x": "T[..., 2*d]"},
    results=("T[..., d]",),
    batched=("x",),
    call_sites=(
        CallSite("vllm.model_executor.layers.activation:GeluAndMul", "the layer's forward"),
    ),
    cases=_cases("none") + _cases("tanh"),
    tolerances=_TOLERANCES,
    # 1 + erf(x) cancels for negative x: the error is that of the terms, not of the result.
    magnitude=lambda x, approximate="none": (
        (x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :]).abs(),
    ),
)

CONTRACTS = (SILU_AND_MUL, GELU_AND_MUL)
