# SPDX-License-Identifier: Apache-2.0
"""Attention: merging of two parts by torch_npu's `npu_attention_update`, and the backend class.

The class is vllm-ascend's, while its platform is the one that vLLM chose. Its classes read
vllm-ascend's own configuration, which only its platform sets up; another platform must not hand
them out.
"""

from __future__ import annotations

import torch

from ..ascend import backend
from ..beside import platform_is_active
from .common import fits, tensor_reason

# ------------------------------------------------------------------------- merge_attn_states

NOTHING = -1000.0
"""A logsumexp, against one of 0, of a part that weighs nothing: exp(-1000) is 0 in float32."""


def _supports_merge(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> bool | str:
    if output_scale is not None:
        return "output_scale is given, and there is no FP8"
    if not fits(prefix_output):
        return tensor_reason(prefix_output)
    if suffix_output.dtype is not prefix_output.dtype:
        return f"suffix_output is {suffix_output.dtype}, prefix_output is {prefix_output.dtype}"
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        if lse.dtype is not torch.float32:
            return f"{name} is {lse.dtype}, the operator takes float32"
    return True


@backend.implements(supports=_supports_merge)
def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """outputs: (tokens, heads, head_size), logsumexps: (heads, tokens) -> both, merged.

    The operator's formula weighs a part by exp(lse - merged lse) and knows no empty one: it is
    given logsumexps against the larger one, which are exact where they matter and finite.
    """
    if not prefix_output.numel():
        lse = prefix_lse.new_empty(prefix_lse.shape) if return_lse else None
        return prefix_output.new_empty(prefix_output.shape), lse
    parts = [
        lse.masked_fill(lse == float("inf"), float("-inf")) for lse in (prefix_lse, suffix_lse)
    ]
    largest = torch.maximum(*parts)
    empty = largest == float("-inf")
    base = largest.masked_fill(empty, 0.0)
    heads, tokens = base.shape
    out, lse = torch.ops.npu.npu_attention_update(
        [(part - base).clamp(min=NOTHING).t().reshape(-1) for part in parts],
        [x.reshape(tokens * heads, -1).contiguous() for x in (prefix_output, suffix_output)],
        1,  # with the logsumexp
    )
    out = out.view(prefix_output.shape).masked_fill(empty.t().unsqueeze(-1), 0.0)
    lse = (lse.view(tokens, heads).t() + base).masked_fill(empty, float("-inf"))
    if prefill_tokens_with_context is not None:
        merged = torch.arange(tokens, device=out.device) < prefill_tokens_with_context
        out = torch.where(merged[:, None, None], out, suffix_output)
        lse = torch.where(merged, lse, suffix_lse)
    return out, lse.contiguous() if return_lse else None


# ------------------------------------------------------------------------- attention_backend

CLASSES = {
    (False, False): "vllm_ascend.attention.attention_v1.AscendAttentionBackend",
    (True, False): "vllm_ascend.attention.mla_v1.AscendMLABackend",
    (True, True): "vllm_ascend.attention.sfa_v1.AscendSFABackend",
}
"""(use_mla, use_sparse) to the dotted path of the class."""


def _supports(use_mla: bool = False, use_sparse: bool = False) -> bool | str:
    if not platform_is_active():
        return "vllm-ascend's platform is not the one that vLLM chose, and its classes need it"
    return (use_mla, use_sparse) in CLASSES or "sparse attention exists with MLA only"


@backend.implements(supports=_supports)
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The dotted path of the class."""
    return CLASSES[use_mla, use_sparse]
