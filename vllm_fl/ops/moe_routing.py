# SPDX-License-Identifier: Apache-2.0
"""Routing: which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, OpContract, Tolerance, half_and_single
from .moe_choice import SINGLE, as_choice, given
from .moe_routing_cases import grouped_topk_cases, topk_softmax_cases

__all__ = ["CONTRACTS", "GROUPED_TOPK", "TOPK_SOFTMAX"]

_LOWEST = -87.0
"""Where exp(x) leaves float32's normal numbers: below, scores may be zero, and so equal."""


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the largest; of equal ones the first, which torch.topk does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _as_int32(ids: torch.Tensor) -> torch.Tensor:
    """Columns of all sorted experts, in memory of their own."""
    return ids.to(torch.int32, memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------ topk_softmax


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """A row with a NaN or inf has no scores: all are zero, which keeps its experts distinct."""
    scores = logits.softmax(dim=-1)
    return torch.where(scores.isfinite(), scores, 0.0)


def _route(
    logits: torch.Tensor,
    topk: int,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _softmax(logits)
    ids = _largest(scores if bias is None else scores + bias, topk)
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    if is_padding is not None:
        weights = weights.masked_fill(is_padding[:, None], 0.0)
        ids = ids.masked_fill(is_padding[:, None], -1)
    return weights, _as_int32(ids)


def _topk_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _route(gating_output.float(), topk, renormalize, e_score_correction_bias, is_padding)


def _topk_softmax_exact(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _route(gating_output, topk, renormalize, e_score_correction_bias, is_padding)


def _topk_softmax_fake(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def _topk_softmax_facts(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> dict[str, Any]:
    return {
        "num_experts": gating_output.shape[1],
        "topk": topk,
        "renormalize": renormalize,
        "has_bias": e_score_correction_bias is not None,
    }


def _preference(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What decides who is taken, on a scale on which rounding is even: without a bias the
    logits below the largest, because exp keeps their order and stretches their errors."""
    scores = _softmax(logits)
    if bias is not None:
        return scores + bias
    below = (logits - logits.amax(dim=-1, keepdim=True)).clamp(min=_LOWEST)
    return torch.where(logits.softmax(dim=-1).isfinite(), below, 0.0)


def _topk_softmax_canonical(
    outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    logits, topk, renormalize, bias, is_padding = given(args, 5)
    logits = logits.double()
    bias = None if bias is None else bias.double()
    return as_choice(
        outputs,
        topk,
        scores=_softmax(logits),
        preference=_preference(logits, bias),
        renormalize=bool(renormalize),
        factor=1.0,
        smallest=SINGLE.tiny / SINGLE.eps,
        is_padding=is_padding,
    )


def _topk_softmax_magnitude(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The exponent's error is relative to the exponent, that of a biased score to 1."""
    preference = _preference(gating_output, e_score_correction_bias)
    best = preference.gather(1, _largest(preference, topk)).abs() + 1.0
    return None, torch.cat((best, torch.ones_like(best[:, :1])), dim=1)


# ------------------------------------------------------------------------------ grouped_topk

_SCORING = ("softmax", "sigmoid", "none")


def _scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    if scoring_func == "softmax":
        return logits.softmax(dim=-1)
    if scoring_func == "sigmoid":
        return logits.sigmoid()
    if scoring_func == "none":
        return logits
    raise ValueError(
        f"scoring_func {scoring_func!r} is not known; valid: {', '.join(map(repr, _SCORING))}"
    )


def _group_scores(
    choice: torch.Tensor, num_expert_group: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of each group its best score, or with a bias the sum of its best two."""
    grouped = choice.view(choice.shape[0], num_expert_group, choice.shape[1] // num_expert_group)
    if bias is None:
        return grouped.amax(dim=-1)
    return grouped.sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)


def _route_in_groups(
    logits: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(logits, scoring_func)
    choice = scores if bias is None else scores + bias
    groups = _largest(_group_scores(choice, num_expert_group, bias), topk_group)
    allowed = torch.zeros(
        (choice.shape[0], num_expert_group), dtype=torch.bool, device=choice.device
    ).scatter(1, groups, True)
    allowed = allowed.repeat_interleave(choice.shape[1] // num_expert_group, dim=1)
    ids = _largest(choice.masked_fill(~allowed, float("-inf")), topk)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * routed_scaling_factor, _as_int32(ids)


def _grouped_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _route_in_groups(
        gating_output.float(),
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        scoring_func,
        routed_scaling_factor,
        None if e_score_correction_bias is None else e_score_correction_bias.float(),
    )


def _grouped_topk_fake(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _topk_softmax_fake(gating_output, topk)


def _grouped_topk_facts(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> dict[str, Any]:
    return {
        "num_experts": gating_output.shape[1],
        "topk": topk,
        "renormalize": renormalize,
        "num_expert_group": num_expert_group,
        "topk_group": topk_group,
        "scoring_func": scoring_func,
        "routed_scaling_factor": routed_scaling_factor,
        "has_bias": e_score_correction_bias is not None,
    }


def _grouped_topk_canonical(
    outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    logits, topk, renormalize, _, _, scoring_func, factor, bias = given(args, 8)
    scores = _scores(logits.double(), scoring_func or "softmax")
    smallest = max(SINGLE.tiny / SINGLE.eps, torch.finfo(args[0].dtype).tiny)
    return as_choice(
        outputs,
        topk,
        scores=scores,
        # Scores that the dtype does not tell from zero may be exchanged.
        preference=scores.clamp(min=smallest) if bias is None else scores + bias.double(),
        renormalize=renormalize,
        factor=1.0 if factor is None else factor,
        smallest=smallest,
        weights_of_float32=args[0].dtype is torch.float32,
    )


def _grouped_topk_magnitude(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """A score and a bias that cancel are as exact as they were."""
    args = (topk, renormalize, num_expert_group, topk_group, scoring_func, 1.0)
    _, ids = _route_in_groups(gating_output, *args, e_score_correction_bias)
    scores = _scores(gating_output, scoring_func)
    bias = torch.zeros(()) if e_score_correction_bias is None else e_score_correction_bias
    index = ids.long()
    order = (scores + bias).gather(1, index).argsort(dim=-1, descending=True)
    terms = (scores.abs() + bias.abs()).gather(1, index).gather(1, order)
    terms = terms * (1 + terms.clamp(min=SINGLE.tiny).log().abs())
    return None, torch.cat((terms, torch.ones_like(terms[:, :1])), dim=1)


# ------------------------------------------------------------------------------- the contracts

TOPK_SOFTMAX = OpContract(
    signature=OpSignature.parse(
        "topk_softmax(gating_output, topk, renormalize=False, e_score_correction_bias=None, "
        "is_padding=None)",
        facts=_topk_softmax_facts,
        fact_names=("num_experts", "topk", "renormalize", "has_bias"),
        summary=(
            "The topk experts of each token with the largest softmax(gating_output) (plus "
            "bias, which the weights leave out), in any order; renormalized weights add up to 1; "
            "rows with nan or inf have weights of zero and distinct experts, padding has ids of "
            "-1 and weights of zero; returns (weights in float32, ids in int32)."
        ),
    ),
    schema=(
        "(Tensor gating_output, SymInt topk, bool renormalize=False, "
        "Tensor? e_score_correction_bias=None, Tensor? is_padding=None) -> (Tensor, Tensor)"
    ),
    reference=_topk_softmax,
    fake=_topk_softmax_fake,
    arrays={
        "gating_output": "T[tokens, experts]",
        "e_score_correction_bias": "float32[experts]?",
        "is_padding": "bool[tokens]?",
    },
    results=("float32[tokens, topk]", "int32[tokens, topk]"),
    constraints=("1 <= topk <= experts",),
    without={"leading shapes": "tokens are one dimension, as in vLLM's kernels"},
    exact=_topk_softmax_exact,
    magnitude=_topk_softmax_magnitude,
    canonical=_topk_softmax_canonical,
    batched=("gating_output", "is_padding"),
    call_sites=(
        CallSite(
            "vllm._custom_ops:topk_softmax",
            "the function, which fused_topk and fused_topk_bias call through its module",
            device_types=("cuda",),
            note="vLLM on CPU routes in PyTorch; vLLM's out arguments take ids of other integer "
            "types, and row numbers that nobody reads",
        ),
    ),
    source="vLLM, csrc/libtorch_stable/moe/topk_softmax_kernels.cu",
    cases=topk_softmax_cases(),
    tolerances=half_and_single(
        half=(8, 16),
        single=(8, 16),
        why="computed in float32 from any dtype: in units that grow with the exponent, the "
        "difference from the largest logit and its product with log2(e) are rounded (1), exp2 "
        "is good to 2, the sum, its inverse, a product, and the same for renormalizing (5); two "
        "experts may be exchanged where both of their errors together close the gap",
    ),
)


def _rounded_scores(dtype: torch.dtype) -> Tolerance:
    """Scores in the dtype of the logits, as vLLM has them."""
    ulps = torch.finfo(dtype).eps / SINGLE.eps
    return Tolerance(
        (2.5 * ulps + 600, 4 * ulps + 600),
        f"of float32, {ulps:.0f} of which are one of the logits' dtype, to which vLLM rounds: the "
        "scores, their sum, the quotient and the product with the factor (half an ulp each, and "
        "half for the rounded terms of the sum); two experts may be exchanged where the roundings "
        "of score, bias and their sum, of each, close the gap; added to 8 ulp of float32 for each "
        "power of e between a score and the largest, of which there are 72 before it is zero",
    )


GROUPED_TOPK = OpContract(
    signature=OpSignature.parse(
        "grouped_topk(gating_output, topk, renormalize, num_expert_group, topk_group, "
        "scoring_func='softmax', routed_scaling_factor=1.0, e_score_correction_bias=None)",
        facts=_grouped_topk_facts,
        fact_names=(
            "num_experts",
            "topk",
            "renormalize",
            "num_expert_group",
            "topk_group",
            "scoring_func",
            "routed_scaling_factor",
            "has_bias",
        ),
        summary=(
            "The topk experts of the topk_group best groups of each token, in any order; a "
            "group counts as its best score, or with a bias as the sum of its best two; "
            "scoring_func: 'softmax', 'sigmoid' or 'none', for scores; the bias decides who is "
            "taken, and the weights leave it out; returns (weights in float32, ids in int32)."
        ),
    ),
    schema=(
        "(Tensor gating_output, SymInt topk, bool renormalize, SymInt num_expert_group, "
        'SymInt topk_group, str scoring_func="softmax", float routed_scaling_factor=1.0, '
        "Tensor? e_score_correction_bias=None) -> (Tensor, Tensor)"
    ),
    reference=_grouped_topk,
    fake=_grouped_topk_fake,
    arrays={
        "gating_output": "T[tokens, experts]",
        "e_score_correction_bias": "float[experts]?",
    },
    results=("float32[tokens, topk]", "int32[tokens, topk]"),
    constraints=(
        "experts % num_expert_group == 0",
        "topk_group <= num_expert_group",
        "topk <= topk_group * (experts // num_expert_group)",
    ),
    without={
        "leading shapes": "tokens are one dimension, as in vLLM's kernels",
        "inf and nan": "vLLM's kernel and its PyTorch code take other experts for them",
    },
    exact=_route_in_groups,
    magnitude=_grouped_topk_magnitude,
    canonical=_grouped_topk_canonical,
    batched=("gating_output",),
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk",
            "the function, which the router calls by its module's name",
            device_types=("cuda",),
            note="vLLM on CPU has a router of its own; as one group it also stands in for "
            "vllm._custom_ops.topk_sigmoid where vLLM has no extension",
        ),
    ),
    source="https://arxiv.org/abs/2412.19437, section 2.1.2, and vLLM's grouped_topk",
    cases=grouped_topk_cases(),
    tolerances={
        torch.bfloat16: _rounded_scores(torch.bfloat16),
        torch.float16: _rounded_scores(torch.float16),
        torch.float32: Tolerance(
            (11, 20),
            "as topk_softmax, and the product with the factor; vLLM's sums round to float32 too",
        ),
    },
)

CONTRACTS: tuple[OpContract, ...] = (TOPK_SOFTMAX, GROUPED_TOPK)
