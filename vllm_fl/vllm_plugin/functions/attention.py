# SPDX-License-Identifier: Apache-2.0
"""Merging two parts of an attention: vLLM chooses between its CUDA kernel and its Triton kernel at
each call, and imports the function then."""

from __future__ import annotations

from typing import Any

from .cache import attention_is_traced
from .serve import TRITON, FunctionSpec

__all__ = ["MERGE_ATTN_STATES", "TRITON_MERGE_ATTN_STATES"]


def _parts(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
) -> tuple[Any, ...] | None:
    wanted = (prefill_tokens_with_context, output_scale, output_lse is not None)
    return prefix_output, prefix_lse, suffix_output, suffix_lse, *wanted


def _into_outputs(
    result: Any,
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    merged, lse = result
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(lse)


MERGE_ATTN_STATES = FunctionSpec(
    op="merge_attn_states",
    path="vllm._custom_ops:merge_attn_states",
    arguments=_parts,
    finish=_into_outputs,
    needs=("_C.merge_attn_states",),
    traced=attention_is_traced,
    cpu=False,
)

TRITON_MERGE_ATTN_STATES = FunctionSpec(
    op="merge_attn_states",
    path="vllm.v1.attention.ops.triton_merge_attn_states:merge_attn_states",
    arguments=_parts,
    finish=_into_outputs,
    needs=(TRITON,),
    traced=attention_is_traced,
    cpu=False,
)
