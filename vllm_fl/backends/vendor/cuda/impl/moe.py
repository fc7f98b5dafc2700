# SPDX-License-Identifier: Apache-2.0
"""Routing and sorting of experts by vLLM's CUDA kernels (the _moe_C extension)."""

from __future__ import annotations

import torch

from ..cuda import backend
from .common import apart, dense, fits, short, tensor_reason

MOST_EXPERTS = 1024
"""That moe_align_block_size has threads for."""


def _supports_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> bool | str:
    if not fits(gating_output):
        return tensor_reason(gating_output)
    if gating_output.dim() != 2:
        return f"gating_output has {gating_output.dim()} dimensions, not 2"
    if not 1 <= topk <= gating_output.shape[1]:
        return f"{topk} of {gating_output.shape[1]} experts are asked for"
    if is_padding is not None:
        return "is_padding is given"
    bias = e_score_correction_bias
    if (elsewhere := apart(gating_output, e_score_correction_bias=bias)) is not None:
        return elsewhere
    if bias is not None:
        dense = bias.is_contiguous() and bias.shape == gating_output.shape[1:]
        if not dense or bias.dtype is not torch.float32:
            return f"e_score_correction_bias is {short(bias.dtype)}{list(bias.shape)}"
    return gating_output.is_contiguous() or "gating_output is not contiguous"


@backend.calling("_moe_C.topk_softmax").implements(supports=_supports_softmax, batch_invariant=True)
def topk_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gating_output: (tokens, experts) -> weights in float32 and ids in int32, (tokens, topk)."""
    gating_output = dense(gating_output)
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    rows = torch.empty(shape, dtype=torch.int32, device=device)
    if not gating_output.shape[0]:  # an empty launch is an error, which the next launch is told
        return weights, ids
    torch.ops._moe_C.topk_softmax(
        weights, ids, rows, gating_output, renormalize, e_score_correction_bias
    )
    return weights, ids


def _supports_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> bool | str:
    if not fits(input):
        return tensor_reason(input)
    if input.dim() != 3:
        return f"input has {input.dim()} dimensions, not 3"
    if topk_ids is not None:
        return "topk_ids are given"
    return input.is_contiguous() or "input is not contiguous"


@backend.calling("_moe_C.moe_sum").implements(supports=_supports_sum, batch_invariant=True)
def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """(tokens, topk, hidden) -> (tokens, hidden)."""
    out = input.new_empty(input.shape[0], input.shape[2])
    if not out.numel():  # as above
        return out
    torch.ops._moe_C.moe_sum(input, out)
    return out


def _supports_align(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> bool | str:
    if not topk_ids.is_cuda:
        return f"the tensor is on {topk_ids.device.type}"
    if (elsewhere := apart(topk_ids, expert_map=expert_map)) is not None:
        return elsewhere
    if num_experts > MOST_EXPERTS:
        return f"there are {num_experts} experts; the kernel takes {MOST_EXPERTS}"
    if block_size < 1:
        return f"blocks have {block_size} rows"
    if expert_map is not None:
        form = f"{short(expert_map.dtype)}{list(expert_map.shape)}"
        if expert_map.dtype is not torch.int32 or expert_map.shape != (num_experts,):
            return f"expert_map is {form}, not int32[{num_experts}]"
        if not expert_map.is_contiguous():
            return "expert_map is not contiguous"
    if topk_ids.dtype not in (torch.int32, torch.int64):
        return f"topk_ids are {short(topk_ids.dtype)}, not int32 or int64"
    return topk_ids.is_contiguous() or "topk_ids is not contiguous"


@backend.calling("_moe_C.moe_align_block_size").implements(supports=_supports_align)
def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_ids: (tokens, topk) -> (sorted ids, experts of the blocks, used entries), int32."""
    choices, device = topk_ids.numel(), topk_ids.device
    entries = choices + num_experts * (block_size - 1)
    if pad_sorted_ids:
        entries = -(-entries // block_size) * block_size
    if choices < num_experts:
        entries = min(choices * block_size, entries)
    sorted_ids = torch.empty(entries, dtype=torch.int32, device=device)
    experts = torch.empty(-(-entries // block_size), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    # An id outside of the experts is an address outside of the kernel's counters. What its map
    # sends nowhere it leaves out, so that is where they go.
    nowhere = topk_ids.new_full((1,), -1, dtype=torch.int32)
    if expert_map is None or not ignore_invalid_experts:
        to = torch.arange(num_experts, dtype=torch.int32, device=device)
    else:
        to = expert_map
    kept = torch.cat((to, nowhere))
    outside = (topk_ids < 0) | (topk_ids >= num_experts)
    topk_ids = topk_ids.masked_fill(outside, num_experts)
    torch.ops._moe_C.moe_align_block_size(
        topk_ids, num_experts, block_size, sorted_ids, experts, used, kept
    )
    if expert_map is not None and not ignore_invalid_experts:
        experts = expert_map[experts.clamp(0, num_experts - 1)]
    return sorted_ids, experts, used
