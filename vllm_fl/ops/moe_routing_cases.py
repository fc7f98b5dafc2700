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
    spread: float = 1.0,
    layout: str = "",
) -> tuple[Any, ...]:
    """Groups are kept apart by far more than rounding: each has a level of its own, and its
    two best experts are 1.5 and 1.2 above it. Which of two equal groups is taken is open, and
    nothing could tell a right choice between nearly equal ones from a wrong one."""
    level = torch.rand(tokens, groups, generator=generator).argsort(dim=-1)
    logits = 0.4 * torch.rand(tokens, groups, of, generator=generator)
    if of > 1:
        best = torch.rand(tokens, of, generator=generator).argsort(dim=-1)
        index = best[:, None, :].expand(tokens, groups, of)
        logits.scatter_(2, index[..., :1], 1.5).scatter_(2, index[..., 1:2], 1.2)
    logits = spread * (logits + 4.0 * level[..., None] / groups - 2.0).view(tokens, groups * of)
    if scoring_func == "none":
        logits = logits.sigmoid()
    logits = logits.to(dtype)
    if layout == "permuted":
        logits = logits.t().contiguous().t()
    elif layout == "slice":
        logits = torch.cat((logits, logits), dim=1)[:, : groups * of]
    # Small enough to leave the groups in their order.
    offsets = 0.01 * torch.randn(groups * of, generator=generator)
    return (
        logits,
        topk,
        renormalize,
        groups,
        topk_group,
        scoring_func,
        factor,
        None if bias is None else offsets.to(bias),
    )


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
        "40 groups": {"groups": 40, "of": 4, "topk": 6, "topk_group": 3, "spread": 4.0},
        "1040 experts": {"groups": 8, "of": 130, "topk": 8, "topk_group": 4},
        "slice of wider rows": {"layout": "slice"},
        "permuted": {"layout": "permuted"},
        "tiny values": {"spread": 1e-3},
        "huge values": {"spread": 1e4, "renormalize": False},
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
        "softmax, bias": {"bias": single, "spread": 2.0},
        "scores": {"scoring_func": "none", "bias": single},
    }
    return tuple(Case(name, partial(_group_inputs, **kw)) for name, kw in variants.items())
