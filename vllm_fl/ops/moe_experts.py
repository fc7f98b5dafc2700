# SPDX-License-Identifier: Apache-2.0
"""The experts: two matrix products for each choice, an activation in between, and their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["ACTIVATIONS", "CONTRACTS", "FUSED_EXPERTS"]

_LIMIT, _ALPHA = 7.0, 1.702
"""Of swigluoai (both) and swiglustep (the limit), as vLLM's kernels have them."""

_STEEPEST = 1.13
"""The largest slope of silu (1.100) and of gelu (1.129)."""


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _swigluoai(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=_LIMIT), x[..., 1::2].clamp(-_LIMIT, _LIMIT)
    return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)


def _gated(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        gate, up = _halves(x)
        return f(gate) * up

    return apply


def _swiglustep(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(x)
    return F.silu(gate).clamp(max=_LIMIT) * up.clamp(-_LIMIT, _LIMIT)


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _gated(F.silu),
    "gelu": _gated(F.gelu),
    "gelu_tanh": _gated(_gelu_tanh),
    "swigluoai": _swigluoai,
    "swiglustep": _swiglustep,
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": _gelu_tanh,
    "relu2_no_mul": lambda x: F.relu(x).square(),
}
"""vLLM's names for what its fused_experts applies. Those without "_no_mul" are gated: they halve
the width, and swigluoai has gate and up in alternate columns, the others one behind the other."""


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"fused_experts: activation {name!r} is not known; valid: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _experts_of(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int
) -> torch.Tensor:
    """The local expert of each choice, or one that is not there."""
    if expert_map is None:
        return topk_ids
    known = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
    index = torch.where(known, topk_ids, 0).long()
    local = expert_map.index_select(0, index.reshape(-1)).view(index.shape)
    return torch.where(known & (local < experts), local, -1)


def _compute(
    dtype: torch.dtype,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result in `dtype`, in which all of it is computed.

    One expert after the other, each for the rows that chose it: how many these are depends on
    the data, so this cannot be traced; its torch op can.
    """
    apply = _activation(activation)
    local = _experts_of(topk_ids, expert_map, w1.shape[0])
    weights = topk_weights.to(dtype)
    parts = hidden_states.new_zeros((*topk_ids.shape, w2.shape[1]), dtype=dtype)
    for expert in range(w1.shape[0]):
        token, choice = (local == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        weight = weights[token, choice].unsqueeze(-1)
        rows = hidden_states[token].to(dtype) @ w1[expert].to(dtype).t()
        if w1_bias is not None:
            rows = rows + w1_bias[expert].to(dtype)
        if apply_router_weight_on_input:
            rows = rows * weight
        rows = apply(rows) @ w2[expert].to(dtype).t()
        if w2_bias is not None:
            rows = rows + w2_bias[expert].to(dtype)
        parts[token, choice] = rows if apply_router_weight_on_input else rows * weight
    return parts.sum(dim=1)


def _fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return _compute(
        torch.float32,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        apply_router_weight_on_input,
        global_num_experts,
        expert_map,
        w1_bias,
        w2_bias,
    ).to(hidden_states.dtype)


def _fake(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _facts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> dict[str, Any]:
    return {
        "num_experts": w1.shape[0],
        "hidden_size": w1.shape[2],
        "intermediate_size": w2.shape[2],
        "topk": topk_ids.shape[1],
        "activation": activation,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "has_expert_map": expert_map is not None,
        "has_bias": w1_bias is not None or w2_bias is not None,
    }


# ---------------------------------------------------------------- the size of what is rounded


def _sensitivity(name: str, x: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """The squares of how far the activation of x moves, to first order, when x moves by the root
    of `moved`, and when the activation itself and its product with up are rounded."""
    if name == "relu2_no_mul":
        return 4 * F.relu(x).square() * moved + F.relu(x).square().square()
    if name.endswith("_no_mul"):
        return _STEEPEST**2 * moved + _activation(name)(x).square()
    if name == "swigluoai":
        gate, up = x[..., ::2].clamp(max=_LIMIT), x[..., 1::2].clamp(-_LIMIT, _LIMIT) + 1
        gate_moved, up_moved = moved[..., ::2], moved[..., 1::2]
        value = gate * torch.sigmoid(_ALPHA * gate)
    else:
        (gate, up), (gate_moved, up_moved) = _halves(x), _halves(moved)
        value = {"gelu": F.gelu, "gelu_tanh": _gelu_tanh}.get(name, F.silu)(gate)
    by_gate = _STEEPEST**2 * gate_moved * up.square()
    return by_gate + value.square() * (up_moved + 2 * up.square())


def _magnitude(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The root of the sum of squares of all that is rounded, as it arrives at the output."""
    local = _experts_of(topk_ids, expert_map, w1.shape[0])
    squares = torch.zeros_like(hidden_states)
    for expert in range(w1.shape[0]):
        token, choice = (local == expert).nonzero(as_tuple=True)
        weight = topk_weights[token, choice].unsqueeze(-1)
        x = hidden_states[token]
        rows, moved = x @ w1[expert].t(), x.square() @ w1[expert].square().t()
        if w1_bias is not None:
            rows = rows + w1_bias[expert]
        moved = moved + rows.square()
        if apply_router_weight_on_input:
            rows, moved, weight = rows * weight, moved * weight.square(), torch.ones_like(weight)
        arriving = _sensitivity(activation, rows, moved) @ w2[expert].square().t()
        result = _activation(activation)(rows) @ w2[expert].t()
        if w2_bias is not None:
            result = result + w2_bias[expert]
        squares.index_add_(0, token, weight.square() * (arriving + result.square()))
    return (squares.sqrt(),)


# ----------------------------------------------------------------------------------- the cases


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    experts: int = 4,
    topk: int = 2,
    hidden: int = 32,
    inner: int = 24,
    activation: str = "silu",
    on_input: bool = False,
    of: str = "all",
    mapped: str = "",
    index: torch.dtype = torch.int32,
    bias: bool = False,
    padded: int = 0,
    magnitude: float = 1.0,
    special: bool = False,
) -> tuple[Any, ...]:
    def weights(rows: int, columns: int) -> torch.Tensor:
        shape = (experts, rows, columns + padded)
        made = (torch.randn(shape, generator=generator) * columns**-0.5).to(dtype)
        return made[..., :columns]

    width = inner if activation.endswith("_no_mul") else 2 * inner
    x = (magnitude * torch.randn(tokens, hidden, generator=generator)).to(dtype)
    if special:
        x[0, 3], x[1, 5] = float("nan"), float("inf")
    w1, w2 = weights(width, hidden), weights(hidden, inner)
    everywhere = 2 * experts if mapped else experts
    scores = torch.rand(tokens, everywhere, generator=generator)
    if of == "some":
        scores[:, 1::2] -= 1.0
    ids = scores.argsort(dim=-1, descending=True)[:, :topk]
    if of == "one":
        ids = torch.full((tokens, topk), everywhere - 1)
    elif of == "padding":
        ids[1::2] = -1
    routing = torch.rand(tokens, topk, generator=generator) + 0.05
    if not on_input:
        routing = routing / routing.sum(dim=-1, keepdim=True)
    expert_map = None
    if mapped:
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32)
        if mapped == "half":
            expert_map[1::2] = torch.arange(experts, dtype=torch.int32).flip(0)
    biases = (None, None)
    if bias:
        biases = tuple(
            torch.randn(experts, n, generator=generator).to(dtype) for n in (width, hidden)
        )
    arguments = (x, w1, w2, routing, ids.to(index), activation, on_input)
    return (*arguments, everywhere if mapped else -1, expert_map, *biases)


_WIDE = (torch.bfloat16, torch.float32)
"""The product of gate and up leaves float16 at both ends."""

_CASES: dict[str, dict[str, Any]] = {
    "several tokens": {},
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 67},
    "odd and prime sizes": {"tokens": 5, "experts": 5, "hidden": 37, "inner": 19},
    "wide": {"tokens": 3, "hidden": 512, "inner": 256},
    **{f"{name}": {"activation": name} for name in ACTIVATIONS if name != "silu"},
    "top 1": {"topk": 1},
    "top 40 of 48": {"topk": 40, "experts": 48, "hidden": 8, "inner": 8},
    "every expert": {"topk": 4},
    "weights on the input": {"topk": 1, "on_input": True},
    "weights on the input, with biases": {"topk": 1, "on_input": True, "bias": True},
    "biases": {"bias": True},
    "biases, swigluoai": {"bias": True, "activation": "swigluoai"},
    "empty experts": {"of": "some", "experts": 8},
    "one expert for all": {"of": "one", "topk": 1, "tokens": 40},
    "one expert there is": {"experts": 1, "topk": 1},
    "1030 experts": {"experts": 1030, "hidden": 8, "inner": 8, "topk": 3},
    "64-bit ids": {"index": torch.int64},
    "experts elsewhere": {"mapped": "half"},
    "experts elsewhere, weights on the input": {"mapped": "half", "on_input": True, "topk": 1},
    "experts elsewhere, padding": {"mapped": "half", "of": "padding"},
    "no expert here": {"mapped": "none"},
    "slices of padded weights": {"padded": 8},
    "inf and nan": {"special": True},
    "small values": {"magnitude": 0.05},
    "large values": {"magnitude": 50.0},
}

FUSED_EXPERTS = OpContract(
    signature=OpSignature.parse(
        "fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, activation='silu', "
        "apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None, "
        "w1_bias=None, w2_bias=None)",
        facts=_facts,
        fact_names=(
            "num_experts",
            "hidden_size",
            "intermediate_size",
            "topk",
            "activation",
            "apply_router_weight_on_input",
            "has_expert_map",
            "has_bias",
        ),
        summary=(
            "For each token the sum over its choices of weight * (act(x w1^T + b1) w2^T + b2), "
            "unquantized; w1: (experts, 2 * inner or inner, hidden), w2: (experts, hidden, "
            "inner); apply_router_weight_on_input moves the weight to the first product, behind "
            "its bias. expert_map: from global_num_experts ids to those here; a choice that it "
            "sends to -1, or with it a negative id, adds nothing."
        ),
    ),
    schema=(
        "(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
        'str activation="silu", bool apply_router_weight_on_input=False, '
        "SymInt global_num_experts=-1, Tensor? expert_map=None, Tensor? w1_bias=None, "
        "Tensor? w2_bias=None) -> Tensor"
    ),
    reference=_fused_experts,
    fake=_fake,
    arrays={
        "hidden_states": "T[tokens, hidden]",
        "w2": "T[experts, hidden, inner]",
        "w1": "T[experts, 2*inner, hidden] or T[experts, inner, hidden]",
        "topk_weights": "float32[tokens, topk]",
        "topk_ids": "index[tokens, topk]",
        "expert_map": "int32[global_num_experts]?",
        "w1_bias": "(T[experts, 2*inner] or T[experts, inner])?",
        "w2_bias": "T[experts, hidden]?",
    },
    results=("T[tokens, hidden]",),
    constraints=("topk == 1 or not apply_router_weight_on_input",),
    without={
        "leading shapes": "tokens are one dimension, as in vLLM's kernels",
        "permuted": "vLLM asks for contiguous tokens, and weights whose last dimension is",
    },
    exact=partial(_compute, torch.float64),
    magnitude=_magnitude,
    batched=("hidden_states", "topk_weights", "topk_ids"),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.fused_moe.fused_moe:fused_experts",
            "the function, there and where models import it by name; where nothing is compiled",
            device_types=("cuda",),
            note="layers call experts through a modular kernel, whose TritonExperts compute the "
            "same; vLLM on CPU has experts of its own, for weights in a packed form",
        ),
    ),
    source="https://arxiv.org/abs/1701.06538, and vLLM's fused_experts",
    cases=(
        *(Case(name, partial(_inputs, **settings)) for name, settings in _CASES.items()),
        Case("tiny values", partial(_inputs, magnitude=1e-3), _WIDE),
        Case("huge values", partial(_inputs, magnitude=1e4), _WIDE),
    ),
    tolerances=half_and_single(
        half=4,
        single=16,
        why="half precision: both halves of the first product, the activation, its product with "
        "up, the second product and the sum are rounded, each to half an ulp; roundings are "
        "spread evenly, so that their sum exceeds 4 times the root of the sum of the squares of "
        "their bounds with probability 2 exp(-24); float32: sums of n terms in any blocked order "
        "add errors of about log2(n) ulp of the same root, n being 512 and 256 at most; products "
        "in TF32 are not meant",
    ),
)

CONTRACTS: tuple[OpContract, ...] = (FUSED_EXPERTS,)
