# SPDX-License-Identifier: Apache-2.0
"""Repetition penalties, and top-k and top-p, as both model runners' samplers call them.

For penalties the second model runner has a Triton kernel of its own, in which one pass applies
three kinds of them from packed masks and counts. The op does the repetition penalty; the masks are
unpacked for it, and PyTorch applies the other two to its result.
"""

from __future__ import annotations

from typing import Any

from .serve import TRITON, FunctionSpec

__all__ = ["APPLY_PENALTIES", "APPLY_REPETITION_PENALTIES", "APPLY_TOP_K_TOP_P"]


def _penalties(
    logits: Any, prompt_mask: Any, output_mask: Any, repetition_penalties: Any
) -> tuple[Any, ...] | None:
    return logits, prompt_mask, output_mask, repetition_penalties


def _second_penalties(
    logits: Any,
    expanded_idx_mapping: Any,
    token_ids: Any,
    expanded_local_pos: Any,
    repetition_penalty: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    prompt_bin_mask: Any,
    output_bin_counts: Any,
) -> tuple[Any, ...] | None:
    rows = expanded_idx_mapping.long()
    seen = _counts(logits, rows, token_ids, expanded_local_pos, output_bin_counts) > 0
    penalties = repetition_penalty[rows].to(logits.dtype)
    return logits, _unpacked(prompt_bin_mask[rows], logits.shape[1]), seen, penalties


def _unpacked(bits: Any, size: int) -> Any:
    """Words of 32 bits, the lowest first -> bool (rows, size)."""
    import torch

    places = torch.arange(32, dtype=bits.dtype, device=bits.device)
    return ((bits.unsqueeze(-1) >> places) & 1).bool().flatten(1)[:, :size].contiguous()


def _counts(logits: Any, rows: Any, token_ids: Any, positions: Any, counts: Any) -> Any:
    """How often each token stands in a row's output, drafts before the row's own among it: int32
    (rows, vocabulary).

    A row at position p of its sequence's drafts comes p rows after the first of them, and what
    the rows between drafted is in `token_ids`.
    """
    import torch

    counts = counts[rows, : logits.shape[1]]
    row = torch.arange(len(rows), device=rows.device)
    before = (row > (row - positions).unsqueeze(1)) & (row <= row.unsqueeze(1))
    drafts = token_ids[: len(rows)].long().expand(len(rows), -1)
    return counts.scatter_add(1, drafts, before.to(counts.dtype))


def _other_penalties(
    result: Any,
    logits: Any,
    expanded_idx_mapping: Any,
    token_ids: Any,
    expanded_local_pos: Any,
    repetition_penalty: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    prompt_bin_mask: Any,
    output_bin_counts: Any,
) -> None:
    if result is not logits:
        logits.copy_(result)
    rows = expanded_idx_mapping.long()
    counts = _counts(logits, rows, token_ids, expanded_local_pos, output_bin_counts)
    logits.sub_(frequency_penalty[rows].unsqueeze(1) * counts)
    logits.sub_(presence_penalty[rows].unsqueeze(1) * (counts > 0))


def _top_k_top_p(
    logits: Any, k: Any, p: Any, has_topp_only_rows: bool = True
) -> tuple[Any, ...] | None:
    """The last one is a hint to vLLM's own kernel, and True is right for any rows."""
    return None if k is None and p is None else (logits, k, p)


APPLY_REPETITION_PENALTIES = FunctionSpec(
    op="apply_repetition_penalties",
    path="vllm._custom_ops:apply_repetition_penalties",
    arguments=_penalties,
    writes=("logits",),
    needs=("_C.apply_repetition_penalties_",),
)

APPLY_PENALTIES = FunctionSpec(
    op="apply_repetition_penalties",
    path="vllm.v1.worker.gpu.sample.penalties:apply_penalties",
    arguments=_second_penalties,
    finish=_other_penalties,
    donate=True,
    needs=(TRITON,),
    cpu=False,
)

APPLY_TOP_K_TOP_P = FunctionSpec(
    op="apply_top_k_top_p",
    path="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
    callers=(
        "vllm.v1.sample.rejection_sampler",
        "vllm.v1.worker.gpu.sample.sampler",
        "vllm.v1.worker.gpu.sample.states",
        "vllm.v1.watermarking.gpu_sampler",
        "vllm.model_executor.models.diffusion_gemma",
    ),
    arguments=_top_k_top_p,
    donate=True,
    needs=(TRITON,),
)
