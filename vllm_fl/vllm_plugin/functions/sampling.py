# SPDX-License-Identifier: Apache-2.0
"""Repetition penalties, and top-k and top-p, as both model runners' samplers call them.

The second model runner has a Triton kernel of its own for penalties and calls the function of the
first one never.
"""

from __future__ import annotations

from typing import Any

from .serve import FunctionSpec

__all__ = ["APPLY_REPETITION_PENALTIES", "APPLY_TOP_K_TOP_P"]


def _penalties(
    logits: Any, prompt_mask: Any, output_mask: Any, repetition_penalties: Any
) -> tuple[Any, ...] | None:
    return logits, prompt_mask, output_mask, repetition_penalties


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
)
