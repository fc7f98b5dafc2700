# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts by torch_npu: routing, and experts as routing, two products and a sum.

The operators' weights have the dtype of the logits and are not renormalized, while vLLM's are
float32: the logits are made float32 first. `npu_moe_finalize_routing` would do the sum, but is
reported to be inaccurate: `npu_moe_token_unpermute` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ascend import backend
from .common import fits, tensor_reason

MOST_CHOICES = 1024
MOST_EXPERTS_IN_GROUPS = 2048
MOST_SUMMED = 512
ACTIVATIONS = ("silu", "swigluoai")


def _choice_of_none(gating: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (gating.shape[0], topk)
    return gating.new_empty(shape, dtype=torch.float32), gating.new_empty(shape, dtype=torch.int32)


def _renormalized(weights: torch.Tensor) -> torch.Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, torch.ones_like(total))


# ------------------------------------------------------------------------------ topk_softmax


def _supports_topk_layer(facts: Mapping[str, Any]) -> bool | str:
    if facts["has_bias"]:
        return "a bias on the scores"
    if facts["topk"] > MOST_CHOICES:
        return f"topk {facts['topk']} is above {MOST_CHOICES}"
    return True


def _supports_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> bool | str:
    return fits(gating_output) or tensor_reason(gating_output)


@backend.implements(supports=_supports_topk, supports_layer=_supports_topk_layer)
def topk_softmax(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gating_output: (tokens, experts) -> float32 weights and int32 ids, (tokens, topk)."""
    if not gating_output.numel():
        return _choice_of_none(gating_output, topk)
    logits = gating_output.float().contiguous()
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, k=topk)
    # A row with inf or NaN has no scores. Its experts stay distinct, its weights are zero.
    weights = weights.nan_to_num(nan=0.0)
    if renormalize:
        weights = _renormalized(weights)
    if is_padding is not None:
        weights = weights.masked_fill(is_padding[:, None], 0.0)
        ids = ids.masked_fill(is_padding[:, None], -1)
    return weights, ids


# ------------------------------------------------------------------------------ grouped_topk


def _supports_groups_layer(facts: Mapping[str, Any]) -> bool | str:
    experts, groups, scoring = (
        facts["num_experts"],
        facts["num_expert_group"],
        facts["scoring_func"],
    )
    if scoring not in ("softmax", "sigmoid"):
        return f"scoring_func '{scoring}' is not softmax or sigmoid"
    if scoring == "sigmoid" and not facts["renormalize"]:
        return "sigmoid scores that are not renormalized: the operator always does"
    if experts > MOST_EXPERTS_IN_GROUPS:
        return f"{experts} experts are more than {MOST_EXPERTS_IN_GROUPS}"
    if experts % groups or (groups > 1 and experts // groups <= 2):
        return f"{experts} experts in {groups} groups: a group has more than 2"
    allowed = experts // groups * facts["topk_group"]
    if facts["topk"] > allowed:
        return f"topk {facts['topk']} is more than the {allowed} experts of the chosen groups"
    return True


def _supports_groups(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> bool | str:
    return fits(gating_output) or tensor_reason(gating_output)


@backend.implements(supports=_supports_groups, supports_layer=_supports_groups_layer)
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
    """gating_output: (tokens, experts) -> float32 weights and int32 ids, (tokens, topk)."""
    if not gating_output.numel():
        return _choice_of_none(gating_output, topk)
    bias = e_score_correction_bias
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        gating_output.float().contiguous(),
        topk,
        bias=None if bias is None else bias.float().contiguous(),
        k_group=topk_group,
        group_count=num_expert_group,
        group_select_mode=0 if bias is None else 1,  # with a bias, the sum of the best two
        renorm=0,  # others are refused by several releases of CANN
        norm_type=1 if scoring_func == "sigmoid" else 0,
        routed_scaling_factor=1.0,
    )
    if renormalize and scoring_func == "softmax":
        weights = _renormalized(weights)
    return weights if routed_scaling_factor == 1.0 else weights * routed_scaling_factor, ids


# ----------------------------------------------------------------------------- fused_experts


def _supports_experts_layer(facts: Mapping[str, Any]) -> bool | str:
    if facts["activation"] not in ACTIVATIONS:
        return f"activation '{facts['activation']}' is not {' or '.join(ACTIVATIONS)}"
    if facts["has_expert_map"]:
        return "an expert_map: only ranges of experts can be chosen"
    if facts["apply_router_weight_on_input"]:
        return "apply_router_weight_on_input"
    if facts["topk"] > MOST_SUMMED:
        return f"topk {facts['topk']} is above {MOST_SUMMED}"
    most = max(facts["hidden_size"], 2 * facts["intermediate_size"])
    return most < 65536 or f"an inner dimension of {most} is 65536 or more"


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
    for name, x in (("w1", w1), ("w2", w2)):
        if x.dtype is not hidden_states.dtype:
            return f"{name} is {x.dtype}, hidden_states is {hidden_states.dtype}"
        if not x.is_contiguous():
            return f"{name} is not contiguous"
    return True


def _product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """rows of each expert times its weight (experts, out, in), plus its bias."""
    biases = None
    if bias is not None:
        biases = [bias.float() if rows.dtype is torch.bfloat16 else bias.contiguous()]
    [out] = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(1, 2)],
        bias=biases,
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    return out


@backend.implements(supports=_supports_experts, supports_layer=_supports_experts_layer)
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
    """hidden_states: (tokens, hidden), w1: (experts, 2 * inner, hidden), w2: (experts, hidden,
    inner) -> (tokens, hidden)."""
    if not hidden_states.numel():
        return hidden_states.new_empty(hidden_states.shape)
    experts = w1.shape[0]
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        hidden_states.contiguous(),
        topk_ids.to(torch.int32).contiguous(),
        expert_num=experts,
        # The defaults of the next three are documented as unsupported.
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
    )
    inner = _product(rows, w1, w1_bias, counts)
    if activation == "silu":
        inner = torch.ops.npu.npu_swiglu(inner, dim=-1)
    else:
        inner = torch.ops.npu.npu_clipped_swiglu(inner, dim=-1, interleaved=True)
    out = _product(inner, w2, w2_bias, counts)
    weights = topk_weights.to(out.dtype).contiguous()
    return torch.ops.npu.npu_moe_token_unpermute(out, places, probs=weights)
