# SPDX-License-Identifier: Apache-2.0
"""Activations: of one argument, and gated ones, which multiply one half of a row by the
activation of the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single
from .inputs import HUGE, SPECIAL, WIDE_RANGE, rows, with_special

__all__ = [
    "CONTRACTS",
    "FATRELU_AND_MUL",
    "GELU_AND_MUL",
    "GELU_FAST",
    "GELU_NEW",
    "GELU_QUICK",
    "MUL_AND_SILU",
    "RELU2",
    "SILU_AND_MUL",
    "SILU_AND_MUL_WITH_CLAMP",
    "SWIGLUOAI_AND_MUL",
]

# ------------------------------------------------------------------------------- the halves


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate first, what it is multiplied with behind it."""
    d = x.shape[-1] // 2
    return x[..., :d], x[..., d:]


def _gate_last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    up, gate = _halves(x)
    return gate, up


def _in_turns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in every second column."""
    return x[..., ::2], x[..., 1::2]


_Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _half_width(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _same_shape(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------- the references
#
# Equal to vLLM's forward_native bit for bit. Their results are contiguous, as the fakes promise:
# PyTorch alone would hand on the strides of a permuted input.


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(x)
    return (F.silu(gate) * up).contiguous()


def _mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = _gate_last(x)
    return (up * F.silu(gate)).contiguous()


def _gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    gate, up = _halves(x)
    return (F.gelu(gate, approximate=approximate) * up).contiguous()


def _silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    gate, up = _halves(x)
    gate, up = torch.clamp(gate, max=limit), torch.clamp(up, min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).contiguous()


def _swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    gate, up = _in_turns(x)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * alpha))).contiguous()


def _fatrelu_and_mul(x: torch.Tensor, threshold: float) -> torch.Tensor:
    gate, up = _halves(x)
    return (F.threshold(gate, threshold, 0.0) * up).contiguous()


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return (0.5 * x * (1.0 + torch.tanh(inner))).contiguous()


def _gelu_fast(x: torch.Tensor) -> torch.Tensor:
    inner = x * 0.7978845608 * (1.0 + 0.044715 * x * x)
    return (0.5 * x * (1.0 + torch.tanh(inner))).contiguous()


def _gelu_quick(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.sigmoid(1.702 * x)).contiguous()


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x)).contiguous()


# -------------------------------------------------------------------------------- the cases


def _gated(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shape: tuple[int, ...],
    split: _Split,
    extra: tuple[Any, ...],
    gates: tuple[float, ...] = (),
    huge_gate: bool = False,
    **settings: Any,
) -> tuple[Any, ...]:
    """gates: special values, each of which is in the gate of one row; the rows behind them have
    inf, -inf and nan in what the gate is multiplied with."""
    x = rows(shape, dtype, generator, **settings)
    gate, up = split(x)
    if gates:
        with_special(gate, gates)
        with_special(up[len(gates) :])
    if huge_gate:
        gate.copy_(rows(tuple(gate.shape), dtype, generator, **HUGE))
    return (x, *extra)


_SHAPES = {
    "one token": (1, 128),
    "zero tokens": (0, 128),
    "odd size": (7, 2 * 45),
    "prime size": (5, 2 * 61),
    "1-D": (64,),
    "3-D": (3, 5, 64),
    "4-D": (2, 3, 4, 64),
    "wide": (5, 3072),
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "slice of wider rows": {"shape": (5, 128), "pad": 64},
    "permuted": {"shape": (3, 5, 64), "layout": "permuted"},
    "transposed": {"shape": (6, 64), "layout": "transposed"},
}


def _gated_cases(
    *extra: Any,
    split: _Split = _halves,
    gates: tuple[float, ...] = SPECIAL,
    suffix: str = "",
) -> tuple[Case, ...]:
    make = partial(_gated, split=split, extra=extra)
    return (
        *(Case(name + suffix, partial(make, shape=shape)) for name, shape in _SHAPES.items()),
        *(Case(name + suffix, partial(make, **settings)) for name, settings in _LAYOUTS.items()),
        Case("tiny values" + suffix, partial(make, shape=(3, 64), scale=1e-3)),
        # The products leave float16's range.
        Case("huge values" + suffix, partial(make, shape=(3, 64), **HUGE), WIDE_RANGE),
        Case("huge gates" + suffix, partial(make, shape=(3, 64), huge_gate=True)),
        Case("inf and nan" + suffix, partial(make, shape=(6, 64), gates=gates)),
    )


def _single(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shape: tuple[int, ...],
    special: bool = False,
    **settings: Any,
) -> tuple[Any, ...]:
    x = rows(shape, dtype, generator, **settings)
    return (with_special(x) if special else x,)


def _single_cases() -> tuple[Case, ...]:
    return (
        *(
            Case(name, partial(_single, shape=(*shape[:-1], shape[-1] // 2)))
            for name, shape in _SHAPES.items()
        ),
        *(Case(name, partial(_single, **settings)) for name, settings in _LAYOUTS.items()),
        Case("tiny values", partial(_single, shape=(3, 64), scale=1e-3)),
        Case("huge values", partial(_single, shape=(3, 64), **HUGE)),
        Case("inf and nan", partial(_single, shape=(4, 64), special=True)),
    )


# --------------------------------------------------------------------------- the tolerances

_LIBRARY = "float32: exp, erf or tanh of a library is good to about 4 ulp"

_ACTIVATED = half_and_single(
    half=2.5,
    single=8,
    why="half precision: the activation and the product are each rounded once (0.5 ulp each, the "
    "first one scaled by up to 2 within a binade), and one more for a kernel's exponential; "
    + _LIBRARY,
)
_OF_A_SIGMOID = (
    "half precision: rounding the sigmoid's argument s moves the result by |s| * (1 - sigmoid(s)) "
    "of that rounding, which `magnitude` adds to the result's own size; then "
)
_CLAMPED = half_and_single(
    half=4.5,
    single=8,
    why=_OF_A_SIGMOID + "the sigmoid, its product with the gate, the sum in the other half and "
    "their product are each rounded once: 4 ulp at most, and 0.5 for the float32 inside; "
    + _LIBRARY,
)
_QUICK = half_and_single(
    half=2.5,
    single=8,
    why=_OF_A_SIGMOID + "the sigmoid and the product are each rounded once: 2 ulp at most, and "
    "0.5 for the float32 inside; " + _LIBRARY,
)
_TANH = half_and_single(
    half=3,
    single=8,
    why="half precision, in roundings of |x|: the argument of tanh has up to 3.1, which reach "
    "x/2 * tanh by t * (1 - tanh(t)^2) <= 0.448; tanh adds 0.5 and 1 + tanh 1, all of them "
    "halved, and the product 1: 2.5 in all, each at most 1 ulp, and 0.5 for the float32 inside; "
    + _LIBRARY,
)
_ONE_PRODUCT = half_and_single(
    half=0.5, single=0.5, why="one product, rounded once; nothing else is computed"
)


def _gelu_terms(x: torch.Tensor, approximate: str = "none") -> tuple[torch.Tensor, ...]:
    """1 + erf(x) cancels for negative x: the error is that of the terms, not of the result."""
    gate, up = _halves(x)
    return ((gate * up).abs(),)


def _tanh_terms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x/2 and x/2 * tanh cancel for negative x."""
    return (x.abs(),)


_UNDERFLOW = 2.0**-105
"""float32's exp(-s) overflows below s = -88.7: there its sigmoid is 0 instead of up to 2**-128,
the last place of this number."""


def _sensitive(result: torch.Tensor, s: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The size of factor * sigmoid(s), and of what a relative error of s does to it."""
    return result.abs() * (1 + s.abs() * torch.sigmoid(-s)) + _UNDERFLOW * factor.abs()


def _silu_terms(x: torch.Tensor, op: Callable[..., Any] = _silu_and_mul) -> tuple[Any, ...]:
    return (op(x).abs() + _UNDERFLOW * torch.mul(*_halves(x)).abs(),)


def _clamp_terms(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> tuple[torch.Tensor, ...]:
    gate = torch.clamp(_halves(x)[0], max=limit)
    result = _silu_and_mul_with_clamp(x, limit, alpha, beta)
    return (_sensitive(result, alpha * gate, gate * (limit + abs(beta))),)


def _swigluoai_terms(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> tuple[torch.Tensor, ...]:
    gate = _in_turns(x)[0].clamp(max=limit)
    return (_sensitive(_swigluoai_and_mul(x, alpha, limit), alpha * gate, gate * (limit + 1)),)


def _quick_terms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_sensitive(_gelu_quick(x), 1.702 * x, x),)


# ---------------------------------------------------------------------------- the contracts

_LAYERS = "vllm.model_executor.layers.activation"


def _layer(name: str, note: str = "") -> tuple[CallSite, ...]:
    return (CallSite(f"{_LAYERS}:{name}", "the layer's forward", note=note),)


def _gelu_facts(x: torch.Tensor, approximate: str = "none") -> dict[str, Any]:
    return {"approximate": approximate}


def _clamp_facts(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> dict[str, Any]:
    return {"limit": limit, "alpha": alpha, "beta": beta}


def _swigluoai_facts(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> dict[str, Any]:
    return {"alpha": alpha, "limit": limit}


def _fatrelu_facts(x: torch.Tensor, threshold: float) -> dict[str, Any]:
    return {"threshold": threshold}


_gated_op = partial(
    OpContract,
    fake=_half_width,
    arrays={"x": "T[..., 2*d]"},
    results=("T[..., d]",),
    batched=("x",),
)
_elementwise_op = partial(
    OpContract,
    fake=_same_shape,
    arrays={"x": "T[..., d]"},
    results=("T[..., d]",),
    batched=("x",),
)

SILU_AND_MUL = _gated_op(
    signature=OpSignature.parse(
        "silu_and_mul(x)",
        summary="silu(x[..., :d]) * x[..., d:]; x: (..., 2 * d) -> (..., d), same dtype.",
    ),
    schema="(Tensor x) -> Tensor",
    reference=_silu_and_mul,
    call_sites=_layer("SiluAndMul"),
    source="https://arxiv.org/abs/2002.05202",
    cases=_gated_cases(),
    tolerances=_ACTIVATED,
    magnitude=_silu_terms,
)

MUL_AND_SILU = _gated_op(
    signature=OpSignature.parse(
        "mul_and_silu(x)",
        summary="x[..., :d] * silu(x[..., d:]); x: (..., 2 * d) -> (..., d), same dtype.",
    ),
    schema="(Tensor x) -> Tensor",
    reference=_mul_and_silu,
    call_sites=_layer("MulAndSilu"),
    source="https://arxiv.org/abs/2002.05202",
    cases=_gated_cases(split=_gate_last),
    tolerances=_ACTIVATED,
    magnitude=partial(_silu_terms, op=_mul_and_silu),
)

GELU_AND_MUL = _gated_op(
    signature=OpSignature.parse(
        'gelu_and_mul(x, approximate="none")',
        facts=_gelu_facts,
        fact_names=("approximate",),
        summary="gelu(x[..., :d]) * x[..., d:]; approximate is none (erf) or tanh.",
    ),
    schema='(Tensor x, str approximate="none") -> Tensor',
    reference=_gelu_and_mul,
    call_sites=_layer("GeluAndMul"),
    source="https://arxiv.org/abs/1606.08415",
    # Not gelu(inf), which is inf: PyTorch's vectorized erf form, vLLM's own, says NaN.
    cases=_gated_cases("none", gates=(-math.inf, math.nan), suffix=", none")
    + _gated_cases("tanh", suffix=", tanh"),
    tolerances=_ACTIVATED,
    magnitude=_gelu_terms,
)

SILU_AND_MUL_WITH_CLAMP = _gated_op(
    signature=OpSignature.parse(
        "silu_and_mul_with_clamp(x, limit, alpha=1.0, beta=0.0)",
        facts=_clamp_facts,
        fact_names=("limit", "alpha", "beta"),
        summary=(
            "gate * sigmoid(alpha * gate) * (up + beta) with gate = min(x[..., :d], limit) and "
            "up = x[..., d:] within -limit and limit; NaN stays NaN."
        ),
    ),
    schema="(Tensor x, float limit, float alpha=1.0, float beta=0.0) -> Tensor",
    reference=_silu_and_mul_with_clamp,
    constraints=("limit > 0",),
    call_sites=_layer("SiluAndMulWithClamp"),
    source="https://arxiv.org/abs/2002.05202, with the clamp of gpt-oss",
    cases=_gated_cases(7.0, suffix=", limit 7")
    + _gated_cases(1.5, 1.702, 1.0, suffix=", limit 1.5, alpha and beta"),
    tolerances=_CLAMPED,
    magnitude=_clamp_terms,
)

SWIGLUOAI_AND_MUL = _gated_op(
    signature=OpSignature.parse(
        "swigluoai_and_mul(x, alpha=1.702, limit=7.0)",
        facts=_swigluoai_facts,
        fact_names=("alpha", "limit"),
        summary=(
            "gate * sigmoid(alpha * gate) * (up + 1) with gate = min(x[..., ::2], limit) and "
            "up = x[..., 1::2] within -limit and limit; NaN stays NaN."
        ),
    ),
    schema="(Tensor x, float alpha=1.702, float limit=7.0) -> Tensor",
    reference=_swigluoai_and_mul,
    constraints=("limit > 0",),
    call_sites=_layer("SwigluOAIAndMul"),
    source="https://huggingface.co/openai/gpt-oss-20b",
    cases=_gated_cases(split=_in_turns)
    + _gated_cases(1.0, 1.5, split=_in_turns, suffix=", alpha 1, limit 1.5"),
    tolerances=_CLAMPED,
    magnitude=_swigluoai_terms,
)

FATRELU_AND_MUL = _gated_op(
    signature=OpSignature.parse(
        "fatrelu_and_mul(x, threshold)",
        facts=_fatrelu_facts,
        fact_names=("threshold",),
        summary=(
            "gate * x[..., d:], where gate is x[..., :d] if that is above the threshold, or NaN, "
            "and 0 otherwise."
        ),
    ),
    schema="(Tensor x, float threshold) -> Tensor",
    reference=_fatrelu_and_mul,
    call_sites=_layer("FatreluAndMul"),
    source="https://arxiv.org/abs/2402.13516",
    cases=_gated_cases(0.0, suffix=", threshold 0") + _gated_cases(0.5, suffix=", threshold 0.5"),
    tolerances=_ONE_PRODUCT,
)

GELU_NEW = _elementwise_op(
    signature=OpSignature.parse(
        "gelu_new(x)",
        summary="x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))), elementwise.",
    ),
    schema="(Tensor x) -> Tensor",
    reference=_gelu_new,
    call_sites=_layer("NewGELU"),
    source="https://arxiv.org/abs/1606.08415",
    cases=_single_cases(),
    tolerances=_TANH,
    magnitude=_tanh_terms,
)

GELU_FAST = _elementwise_op(
    signature=OpSignature.parse(
        "gelu_fast(x)",
        summary="x/2 * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x^2))), elementwise.",
    ),
    schema="(Tensor x) -> Tensor",
    reference=_gelu_fast,
    call_sites=_layer("FastGELU"),
    source="https://arxiv.org/abs/1606.08415",
    cases=_single_cases(),
    tolerances=_TANH,
    magnitude=_tanh_terms,
)

GELU_QUICK = _elementwise_op(
    signature=OpSignature.parse("gelu_quick(x)", summary="x * sigmoid(1.702 * x), elementwise."),
    schema="(Tensor x) -> Tensor",
    reference=_gelu_quick,
    call_sites=_layer("QuickGELU"),
    source="https://arxiv.org/abs/1606.08415",
    cases=_single_cases(),
    tolerances=_QUICK,
    magnitude=_quick_terms,
)

RELU2 = _elementwise_op(
    signature=OpSignature.parse("relu2(x)", summary="max(x, 0)^2, elementwise; NaN stays NaN."),
    schema="(Tensor x) -> Tensor",
    reference=_relu2,
    call_sites=_layer("ReLUSquaredActivation"),
    source="https://arxiv.org/abs/2109.08668",
    cases=_single_cases(),
    tolerances=_ONE_PRODUCT,
)

CONTRACTS = (
    SILU_AND_MUL,
    MUL_AND_SILU,
    GELU_AND_MUL,
    SILU_AND_MUL_WITH_CLAMP,
    SWIGLUOAI_AND_MUL,
    FATRELU_AND_MUL,
    GELU_NEW,
    GELU_FAST,
    GELU_QUICK,
    RELU2,
)
