# SPDX-License-Identifier: Apache-2.0
"""Inputs of the routing ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .contract import Case

__all__ = ["grouped_topk_cases", "topk_softmax_cases"]


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    experts: int = 16,
    topk: int = 2,
    renormalize: bool = False,
    bias: bool = False,
    padding: bool = False,
    layout: str = "",
    magnitude: float = 1.0,
    special: str = "",
) -> tuple[Any, ...]:
    columns = experts + 8 if layout == "slice of wider rows" else experts
    shape = (columns, tokens) if layout == "permuted" else (tokens, columns)
    logits = (magnitude * torch.randn(shape, generator=generator)).to(dtype)
    logits = logits.t() if layout == "permuted" else logits[:, :experts]
    if special == "ties":
        logits.zero_()
    elif special == "inf and nan":
        logits[0, 1], logits[1, 2], logits[2, :] = float("nan"), float("inf"), float("nan")
        logits[3, :-3] = -float("inf")
    return (
        logits,
        topk,
        renormalize,
        0.1 * torch.randn(experts, generator=generator) if bias else None,
        torch.arange(tokens) % 3 == 1 if padding else None,
    )


_SHAPES: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 67},
    "odd and prime sizes": {"experts": 61, "topk": 5},
    "one expert": {"experts": 1, "topk": 1},
    "top 1": {"topk": 1},
    "top 8 of 256": {"experts": 256, "topk": 8},
    "top 40 of 64": {"experts": 64, "topk": 40},
    "every expert": {"experts": 16, "topk": 16},
    "1030 experts": {"experts": 1030, "topk": 6},
    "2053 experts": {"tokens": 3, "experts": 2053, "topk": 4},
    "slice of wider rows": {"layout": "slice of wider rows"},
    "permuted": {"layout": "permuted"},
    "tiny values": {"magnitude": 1e-3},
    "huge values": {"magnitude": 1e4},
    "equal logits": {"special": "ties"},
    "inf and nan": {"special": "inf and nan"},
}


def topk_softmax_cases() -> tuple[Case, ...]:
    """With and without renormalizing, a bias and padding."""
    variants = {
        **_SHAPES,
        **{f"{k}, renormalized": {**v, "renormalize": True} for k, v in _SHAPES.items()},
        "bias": {"bias": True},
        "bias, renormalized": {"bias": True, "renormalize": True, "experts": 61, "topk": 5},
        "padding": {"padding": True},
        "padding, renormalized": {"padding": True, "renormalize": True, "bias": True},
    }
    return tuple(Case(name, partial(_inputs, **kw)) for name, kw in variants.items())


def _distance_of_groups(
    logits: torch.Tensor,
    groups: int,
    topk_group: int,
    scoring_func: str,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """From the last group that is taken to the first that is not, relative to the former."""
    scores = logits.double()
    if scoring_func != "none":
        scores = scores.softmax(-1) if scoring_func == "softmax" else scores.sigmoid()
    choice = scores if bias is None else scores + bias.double()
    best = choice.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True).values
    worth = best[..., : 1 if bias is None else 2].sum(-1).sort(dim=-1, descending=True).values
    if topk_group == groups:
        return torch.ones_like(worth[..., 0])
    last, next_one = worth[..., topk_group - 1], worth[..., topk_group]
    return (last - next_one) / last.abs().clamp(min=1e-30)


def _group_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    groups: int = 4,
    of: int = 8,
    topk: int = 4,
    topk_group: int = 2,
    renormalize: bool = True,
    scoring_func: str = "softmax",
    factor: float = 1.0,
    bias: torch.dtype | None = None,
    magnitude: float = 1.0,
    layout: str = "",
) -> tuple[Any, ...]:
    """Of 64 rows for each token the one whose groups are furthest apart, so that rounding takes
    no other ones: nothing could tell a right choice between nearly equal groups from a wrong
    one."""
    rows = magnitude * torch.randn(64, tokens, groups * of, generator=generator)
    rows = (rows.sigmoid() if scoring_func == "none" else rows).to(dtype)
    size = 0.01 if scoring_func == "softmax" else 0.1
    offsets = None
    if bias is not None:
        offsets = (size * torch.randn(groups * of, generator=generator)).to(bias)
    apart = _distance_of_groups(rows, groups, topk_group, scoring_func, offsets)
    logits = rows[apart.argmax(dim=0), torch.arange(tokens)]
    if layout == "permuted":
        logits = logits.t().contiguous().t()
    elif layout == "slice":
        logits = torch.cat((logits, logits), dim=1)[:, : groups * of]
    arguments = (logits, topk, renormalize, groups, topk_group, scoring_func, factor)
    return (*arguments, offsets)


def grouped_topk_cases() -> tuple[Case, ...]:
    """Of every way to score, and of groups of many sizes."""
    single = torch.float32
    variants: dict[str, dict[str, Any]] = {
        "one token": {"tokens": 1},
        "zero tokens": {"tokens": 0},
        "many tokens": {"tokens": 67},
        "not renormalized": {"renormalize": False},
        "scaled": {"factor": 2.5},
        "one group": {"groups": 1, "topk_group": 1},
        "every group": {"topk_group": 4, "topk": 9},
        "top 1 of one group": {"topk": 1, "topk_group": 1},
        "odd and prime sizes": {"groups": 5, "of": 7, "topk": 3, "topk_group": 3},
        "top 40": {"groups": 4, "of": 32, "topk": 40},
        "40 groups": {"groups": 40, "of": 4, "topk": 6, "topk_group": 3},
        "1040 experts": {"groups": 8, "of": 130, "topk": 8, "topk_group": 4},
        "slice of wider rows": {"layout": "slice"},
        "permuted": {"layout": "permuted"},
        "tiny values": {"magnitude": 1e-3},
        "huge values": {"magnitude": 1e4, "renormalize": False},
        "sigmoid": {"scoring_func": "sigmoid", "renormalize": False},
        "sigmoid, scaled": {"scoring_func": "sigmoid", "factor": 16.0},
        "sigmoid, bias": {"scoring_func": "sigmoid", "bias": single},
        "sigmoid, bias, as in DeepSeek-V3": {
            "scoring_func": "sigmoid",
            "bias": single,
            "groups": 8,
            "of": 32,
            "topk": 8,
            "topk_group": 4,
            "factor": 2.5,
        },
        "sigmoid, bias of bfloat16": {"scoring_func": "sigmoid", "bias": torch.bfloat16},
        "softmax, bias": {"bias": single},
        "scores": {"scoring_func": "none", "bias": single},
    }
    return tuple(Case(name, partial(_group_inputs, **kw)) for name, kw in variants.items())
