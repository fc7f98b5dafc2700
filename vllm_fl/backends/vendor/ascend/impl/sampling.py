# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p by torch_npu's `npu_top_k_top_p`, which takes p before k.

Its k is 1024 at most, while vLLM says "no top-k" with the size of the vocabulary. Whether a batch
has such a row stands in the device's memory, where no guard looks: k is served for vocabularies
that cannot exceed the limit.
"""

from __future__ import annotations

import torch

from ..ascend import backend
from .common import fits, tensor_reason

MOST = 1024


def _supports(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> bool | str:
    if not fits(logits):
        return tensor_reason(logits)
    if k is None and p is None:
        return "neither k nor p is given"
    if p is not None and p.dtype is not logits.dtype:
        return f"p is {p.dtype}, logits are {logits.dtype}"
    vocabulary = logits.shape[-1]
    if k is not None and vocabulary > MOST:
        return f"k may be up to the vocabulary of {vocabulary}, the operator takes {MOST} at most"
    return True


@backend.implements(supports=_supports)
def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """logits: (seqs, vocab), k: (seqs,), p: (seqs,) -> a new tensor, -inf where a token goes."""
    if not logits.numel():
        return logits.new_empty(logits.shape)
    return torch.ops.npu.npu_top_k_top_p(
        logits.contiguous(),
        p=None if p is None else p.contiguous(),
        k=None if k is None else k.to(torch.int32).contiguous(),
    )
