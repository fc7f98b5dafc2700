# SPDX-License-Identifier: Apache-2.0
"""Penalties by vLLM's CUDA kernel, in place."""

from __future__ import annotations

import torch

from ..cuda import backend
from .common import fits, short, tensor_reason


def _supports(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> bool | str:
    if not fits(logits):
        return tensor_reason(logits)
    if repetition_penalties.dtype is not logits.dtype:
        return f"penalties are {short(repetition_penalties.dtype)}, logits {short(logits.dtype)}"
    tensors = (logits, prompt_mask, output_mask, repetition_penalties)
    return all(t.is_contiguous() for t in tensors) or "an argument is not contiguous"


@backend.calling("_C.apply_repetition_penalties_").implements(
    supports=_supports, mutates=("logits",), batch_invariant=True
)
def apply_repetition_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> torch.Tensor:
    """In place on logits: (seqs, vocab); masks bool, penalties (seqs,)."""
    torch.ops._C.apply_repetition_penalties_(logits, prompt_mask, output_mask, repetition_penalties)
    return logits
