# SPDX-License-Identifier: Apache-2.0
"""Merging two parts of an attention by vLLM's CUDA kernel."""

from __future__ import annotations

import torch

from ..cuda import backend
from .common import apart, dense, fits, short, tensor_reason

_VECTOR_BYTES = 16


def _supports(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> bool | str:
    if not fits(prefix_output):
        return tensor_reason(prefix_output)
    others = {"prefix_lse": prefix_lse, "suffix_output": suffix_output, "suffix_lse": suffix_lse}
    elsewhere = apart(prefix_output, **others, output_scale=output_scale)
    if elsewhere is not None:
        return elsewhere
    if prefix_output.dim() != 3 or suffix_output.shape != prefix_output.shape:
        return f"the outputs are {list(prefix_output.shape)} and {list(suffix_output.shape)}"
    if suffix_output.dtype is not prefix_output.dtype:
        return f"the outputs are {short(prefix_output.dtype)} and {short(suffix_output.dtype)}"
    expected = (prefix_output.shape[1], prefix_output.shape[0])
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        if tuple(lse.shape) != expected or lse.dtype is not torch.float32:
            return f"{name} is {short(lse.dtype)}{list(lse.shape)}, not float32{list(expected)}"
    size = prefix_output.shape[-1]
    if size * prefix_output.element_size() % _VECTOR_BYTES:
        return f"a head of {size} elements is no multiple of {_VECTOR_BYTES} bytes"
    if output_scale is not None and size % _VECTOR_BYTES:
        return f"a head of {size} elements is no multiple of {_VECTOR_BYTES} bytes in FP8"
    if not (prefix_lse.is_contiguous() and suffix_lse.is_contiguous()):
        return "a logsumexp is not contiguous"
    if prefix_output.stride() != suffix_output.stride() or not prefix_output.is_contiguous():
        return "the outputs are not contiguous"
    return prefix_output.shape[0] > 0 or "there are no tokens"


@backend.calling("_C.merge_attn_states").implements(supports=_supports, batch_invariant=True)
def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """outputs: (tokens, heads, head_size), logsumexps: (heads, tokens)."""
    dtype = prefix_output.dtype if output_scale is None else torch.float8_e4m3fn
    out = torch.empty(prefix_output.shape, dtype=dtype, device=prefix_output.device)
    lse = torch.empty_like(prefix_lse) if return_lse else None
    torch.ops._C.merge_attn_states(
        out,
        lse,
        dense(prefix_output),
        prefix_lse,
        dense(suffix_output),
        suffix_lse,
        prefill_tokens_with_context,
        output_scale,
    )
    return out, lse
