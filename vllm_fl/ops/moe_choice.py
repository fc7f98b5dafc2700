# SPDX-License-Identifier: Apache-2.0
"""What is compared of a routing op's outputs.

Which of two equal experts is taken is open, and so is the order of a token's experts. So what is
looked at are the scores of the experts that were taken, the weight that each of them has to have,
and whether they are distinct.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SINGLE", "as_choice", "given"]

SINGLE = torch.finfo(torch.float32)


def given(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The arguments, None where they were left out."""
    return (*args, *(None,) * (count - len(args)))


def as_choice(
    outputs: tuple[torch.Tensor | None, ...],
    topk: int,
    *,
    scores: torch.Tensor,
    preference: torch.Tensor,
    renormalize: bool,
    factor: float,
    smallest: float,
    weights_of_float32: bool = True,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Weights and ids in a form that is equal for all right choices.

    Args:
        outputs: (weights, ids).
        scores: of every expert, in float64.
        preference: what decides who is taken, in float64.
        factor: what the weights are multiplied by.
        smallest: the score from which on errors are absolute.
        weights_of_float32: no rounding to half precision hides the error of the exponent.

    Returns:
        1 + the weight's relative error, in units that (in float32) grow with the exponent whose
        exp the score is; and for each token the preferences of its experts, largest first,
        followed by the number of distinct ones.
    """
    weights, ids = outputs
    tokens, experts = scores.shape
    if weights is None or ids is None or {weights.shape, ids.shape} != {(tokens, topk)}:
        return outputs
    safe = ids.long().clamp(0, experts - 1)
    taken = scores.gather(1, safe)
    expected = taken
    if renormalize:
        total = taken.sum(dim=-1, keepdim=True)
        expected = taken / torch.where(total > 0, total, 1.0)
    expected = expected * factor
    unit = expected.abs().clamp(min=smallest)
    if weights_of_float32:
        unit = unit * (1 + taken.clamp(min=SINGLE.tiny).log().abs())
    error = (weights.double() - expected) / unit
    chosen = preference.gather(1, safe).sort(dim=-1, descending=True).values
    ordered = ids.long().sort(dim=-1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    count = (fresh & (ordered >= 0) & (ordered < experts)).sum(dim=-1)
    if is_padding is not None:
        padded = is_padding[:, None]
        error = torch.where(padded, weights.double(), error)
        chosen = chosen.masked_fill(padded, 0.0)
        count = torch.where(is_padding, -(ids == -1).sum(dim=-1), count)
    return (
        (1 + error).to(weights.dtype),
        torch.cat((chosen, count[:, None].double()), dim=1).to(weights.dtype),
    )
