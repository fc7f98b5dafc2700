# SPDX-License-Identifier: Apache-2.0
"""Penalties by vLLM's CUDA kernel, in place."""

from __future__ import annotations

import torch

from ..cuda import backend
from .common import apart, fits, short, tensor_reason


def _supports(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> bool | str:
    if not fits(logits):
        return tensor_reason(logits)
    masks = {"prompt_mask": prompt_mask, "output_mask": output_mask}
    elsewhere = apart(logits, **masks, repetition_penalties=repetition_penalties)
    if elsewhere is not None:
        return elsewhere
    for name, mask in masks.items():
        if mask.dtype is not torch.bool or mask.shape != logits.shape:
            return f"{name} is {short(mask.dtype)}{list(mask.shape)}, logits {list(logits.shape)}"
    if logits.dim() != 2 or repetition_penalties.shape != logits.shape[:1]:
        return f"there are {list(repetition_penalties.shape)} penalties for {list(logits.shape)}"
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
