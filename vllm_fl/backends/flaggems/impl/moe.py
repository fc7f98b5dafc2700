# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts by FlagGems.

topk_softmax reads logits as if they were contiguous, and of more than 1024 experts the first
1024 alone. grouped_topk wants a bias, and its sigmoid, half of 1 + tanh(x / 2), is 0 where it
should be small: scores are computed by PyTorch, in float32. moe_align_block_size counts an id
that is no expert in the memory beside its counters: such ids get an expert of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..flaggems import backend
from ..launch import planned
from .common import fits, tensor_reason

kernels = backend.kernels

_MOST_EXPERTS = 1024
_MOST_CHOICES = 32
_MOST_GROUPS = 32


def _supports_choices(facts: Mapping[str, Any]) -> bool | str:
    if facts["topk"] > _MOST_CHOICES:
        return f"topk {facts['topk']} is above {_MOST_CHOICES}"
    return True


def _supports_softmax_layer(facts: Mapping[str, Any]) -> bool | str:
    if facts["num_experts"] > _MOST_EXPERTS:
        return f"{facts['num_experts']} experts are more than {_MOST_EXPERTS}"
    if facts["has_bias"]:
        return "a correction bias is given"
    return _supports_choices(facts)


def _supports_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> bool | str:
    if not fits(gating_output):
        return tensor_reason(gating_output)
    if is_padding is not None:
        return "padding is told"
    return gating_output.is_contiguous() or "gating_output is not contiguous"


@planned
def _topk_softmax(gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
    shape = (gating_output.shape[0], topk)
    weights = gating_output.new_empty(shape, dtype=torch.float32)
    ids, rows = (gating_output.new_empty(shape, dtype=torch.int32) for _ in range(2))
    kernels.topk_softmax(weights, ids, rows, gating_output, renormalize)
    return weights, ids, rows


@backend.implements(
    symbols=("topk_softmax",),
    supports=_supports_softmax,
    supports_layer=_supports_softmax_layer,
)
def topk_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gating_output: (tokens, experts), contiguous -> (float32, int32), both (tokens, topk)."""
    if not gating_output.shape[0]:
        shape = (0, topk)
        return (
            gating_output.new_empty(shape, dtype=torch.float32),
            gating_output.new_empty(shape, dtype=torch.int32),
        )
    weights, ids, _ = _topk_softmax(gating_output, topk, renormalize)
    # A row with a NaN or inf has no scores; the kernel says NaN where vLLM's says 0, and on a GPU
    # it names one expert twice.
    first = torch.arange(topk, dtype=ids.dtype, device=ids.device)
    return weights.nan_to_num(nan=0.0), torch.where(weights.isnan(), first, ids)


def _supports_groups(facts: Mapping[str, Any]) -> bool | str:
    groups, topk = facts["num_expert_group"], facts["topk"]
    if not facts["has_bias"]:
        return "there is no correction bias"
    if groups > _MOST_GROUPS:
        return f"{groups} groups are more than {_MOST_GROUPS}"
    if facts["num_experts"] < 2 * groups:
        return "groups of one expert have no best two"
    if topk & (topk - 1):
        return f"topk {topk} is not a power of two"
    return _supports_choices(facts)


def _supports_grouped(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> bool | str:
    return True if fits(gating_output) else tensor_reason(gating_output)


@planned
def _grouped_topk(scores: torch.Tensor, bias: torch.Tensor, *settings: Any) -> Any:
    groups, topk_group, topk, renormalize, factor = settings
    return kernels.grouped_topk(scores, groups, topk_group, topk, renormalize, factor, bias)


@backend.implements(
    symbols=("grouped_topk",),
    supports=_supports_grouped,
    supports_layer=_supports_groups,
    batch_invariant=True,
)
def grouped_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gating_output: (tokens, experts) -> (float32, int32), both (tokens, topk)."""
    assert e_score_correction_bias is not None
    scores = gating_output.float()
    if scoring_func == "softmax":
        scores = scores.softmax(dim=-1)
    elif scoring_func == "sigmoid":
        scores = scores.sigmoid()
    if not scores.shape[0]:
        shape = (0, topk)
        return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int32)
    bias = e_score_correction_bias.float().contiguous()
    settings = (num_expert_group, topk_group, topk, renormalize, routed_scaling_factor)
    return _grouped_topk(scores.contiguous(), bias, *settings)


def _supports_blocks(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> bool | str:
    if expert_map is not None and ignore_invalid_experts:
        return "experts elsewhere are to be ignored"
    return True


@backend.implements(symbols=("moe_align_block_size_triton",), supports=_supports_blocks)
def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_ids: (tokens, topk) -> (sorted_ids, the expert of each block, the used entries)."""
    choices, new = topk_ids.numel(), topk_ids.new_empty
    entries = choices + num_experts * (block_size - 1)
    if pad_sorted_ids:
        entries = -(-entries // block_size) * block_size
    if choices < num_experts:
        entries = min(choices * block_size, entries)
    blocks = -(-entries // block_size)
    used = new(1, dtype=torch.int32)
    if not choices:
        return new(0, dtype=torch.int32), new(0, dtype=torch.int32), used.zero_()
    # Ids of no expert go to one behind the others, whose blocks come last and are taken off. The
    # sizes are constants of a kernel, which would be compiled for each number of tokens anew: a
    # power of two leaves it few.
    room = 1 << (choices + (num_experts + 1) * block_size - 1).bit_length()
    sorted_ids = new(room, dtype=torch.int32)
    expert_ids = new(-(-room // block_size), dtype=torch.int32)
    nobody = (topk_ids < 0) | (topk_ids >= num_experts)
    ids = topk_ids.masked_fill(nobody, num_experts).contiguous()
    kernels.moe_align_block_size_triton(
        ids, num_experts + 1, block_size, sorted_ids, expert_ids, used
    )
    used -= (expert_ids == num_experts).sum(dtype=torch.int32) * block_size
    expert_ids = expert_ids[:blocks]
    if expert_map is not None:
        expert_ids = expert_map[expert_ids.clamp(max=num_experts - 1)]
    return sorted_ids[:entries], expert_ids, used


def _supports_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> bool | str:
    if not fits(input):
        return tensor_reason(input)
    if topk_ids is not None:
        return "rows are to be left out"
    return input.shape[2] < 2 or input.stride(2) == 1 or "the last dimension is not packed"


@planned
def _moe_sum(input: torch.Tensor) -> torch.Tensor:
    output = input.new_empty(input.shape[0], input.shape[2])
    kernels.moe_sum(input, output)
    return output


@backend.implements(symbols=("moe_sum",), supports=_supports_sum, batch_invariant=True)
def moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """input: (tokens, topk, hidden) -> (tokens, hidden), summed in float32."""
    if not input.numel():
        return input.new_zeros(input.shape[0], input.shape[2])
    return _moe_sum(input)


def _supports_experts_layer(facts: Mapping[str, Any]) -> bool | str:
    if facts["activation"] != "silu":
        return f"activation '{facts['activation']}' is not silu"
    if facts["has_expert_map"]:
        return "some experts are elsewhere: their ids would be counted beside the counters"
    return True


def _supports_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> bool | str:
    if not fits(hidden_states):
        return tensor_reason(hidden_states)
    if hidden_states.dtype is torch.float32:  # on an H200 off by 28,000 ulps
        return "Triton multiplies float32 as TF32, with 10 bits"
    if not hidden_states.is_contiguous():
        return "hidden_states is not contiguous"
    packed = w1.stride(-1) == 1 and w2.stride(-1) == 1
    return packed or "the last dimension of w1 or w2 is not packed"


@backend.implements(
    symbols=("outplace_fused_experts",),
    supports=_supports_experts,
    supports_layer=_supports_experts_layer,
)
def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden_states: (tokens, hidden), contiguous -> a new tensor like it; unquantized."""
    if not hidden_states.numel():
        return torch.empty_like(hidden_states)
    return kernels.outplace_fused_experts(
        hidden_states,
        w1,
        w2,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=global_num_experts,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
    )
