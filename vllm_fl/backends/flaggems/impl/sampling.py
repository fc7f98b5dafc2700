# SPDX-License-Identifier: Apache-2.0
"""Sampling by FlagGems."""

from __future__ import annotations

from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import fits, tensor_reason

kernels = backend.kernels


def _supports(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> bool | str:
    if not fits(logits):
        return tensor_reason(logits)
    given = (logits, prompt_mask, output_mask, repetition_penalties)
    return all(t.is_contiguous() for t in given) or "an argument is not contiguous"


@planned
def _penalize(*args: Any) -> None:
    kernels.apply_repetition_penalties(*args)


@backend.implements(
    symbols=("apply_repetition_penalties",),
    supports=_supports,
    mutates=("logits",),
    batch_invariant=True,
)
def apply_repetition_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> torch.Tensor:
    """In place on logits, (seqs, vocab); all of the arguments contiguous."""
    if logits.numel():
        _penalize(logits, prompt_mask, output_mask, repetition_penalties)
    return logits
