# SPDX-License-Identifier: Apache-2.0
"""The bodies of torch_npu's operators for mixtures of experts."""

from __future__ import annotations

import torch

from .harness import STATE, emulates, need


@emulates()
def npu_moe_gating_top_k_softmax(x, finished=None, k=1):
    """The weights have x's dtype and are not renormalized; the ids are int32."""
    need(x.dim() in (2, 3), "npu_moe_gating_top_k_softmax: 2 or 3 dimensions")
    need(0 < k <= min(1024, x.shape[-1]), "k is within 1 and the experts, 1024 at most")
    if STATE.soc == "310P":
        need(x.dtype == torch.float16, "npu_moe_gating_top_k_softmax, 310P: float16")
    need(finished is None, "not emulated: finished")
    scores = x.float().softmax(-1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    rows = x.shape[:-1].numel()
    places = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(order.shape)
    return scores.gather(-1, order).to(x.dtype), order.to(torch.int32), places.contiguous()


@emulates()
def npu_moe_gating_top_k(
    x,
    k,
    *,
    bias=None,
    input_ids=None,
    tid2eid=None,
    k_group=1,
    group_count=1,
    group_select_mode=0,
    renorm=0,
    norm_type=0,
    out_flag=False,
    routed_scaling_factor=1.0,
    eps=1e-20,
):
    """Sigmoid scores are always divided by their sum, softmax ones never."""
    experts = x.shape[1]
    need(x.dim() == 2 and experts <= 2048, "2 dimensions, 2048 experts at most")
    need(bias is None or bias.dtype == x.dtype, "bias has the dtype of x")
    need(renorm == 0, "renorm is 0: CANN refuses other values")
    need(input_ids is None and tid2eid is None, "not emulated: routing by hash")
    need(experts % group_count == 0, "groups of one size")
    need(group_count == 1 or experts // group_count > 2, "a group has more than 2 experts")
    need(k <= experts // group_count * k_group, "k is within the experts of k_group groups")
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.unflatten(-1, (group_count, -1))
        best = groups.topk(2, -1).values.sum(-1) if group_select_mode else groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(k_group, -1).indices, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.to(torch.int32), scores


@emulates()
def npu_moe_init_routing_v2(
    x,
    expert_idx,
    *,
    scale=None,
    offset=None,
    active_num=-1,
    expert_capacity=-1,
    expert_num=-1,
    drop_pad_mode=0,
    expert_tokens_num_type=0,
    expert_tokens_num_flag=False,
    quant_mode=-1,
    active_expert_range=(),
    row_idx_type=0,
    x_dtype=None,
):
    need(x.dim() == expert_idx.dim() == 2, "x and expert_idx have 2 dimensions")
    need(expert_idx.dtype == torch.int32, "expert_idx is int32")
    need(expert_num > 0, "expert_num is given")
    need(expert_tokens_num_type in (1, 2), "expert_tokens_num_type is 1 or 2")
    need(expert_tokens_num_flag, "expert_tokens_num_flag is True")
    need(len(active_expert_range) == 2, "active_expert_range is [first, end)")
    need(drop_pad_mode == 0 and quant_mode == -1, "not emulated: dropping, quantizing")
    need(expert_tokens_num_type == 1 and row_idx_type == 0, "not emulated: other results")
    first, end = active_expert_range
    need(0 <= first < end <= expert_num, "active_expert_range is within the experts")
    tokens, top = expert_idx.shape
    ids = expert_idx.flatten().long()
    active = (ids >= first) & (ids < end)
    order = ids.masked_fill(~active, expert_num).sort(stable=True).indices
    count = int(active.sum())
    rows = x.new_zeros(tokens * top, x.shape[1])
    rows[:count] = x[order[:count] // top]
    place = torch.full((tokens * top,), -1, dtype=torch.int32)
    place[order[:count]] = torch.arange(count, dtype=torch.int32)
    counts = torch.bincount(ids[active] - first, minlength=end - first)
    return rows, place, counts, torch.zeros(tokens * top)


@emulates()
def npu_moe_token_unpermute(
    permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None
):
    need(permuted_tokens.dim() == 2 and sorted_indices.dim() == 1, "2 dimensions and 1")
    need(sorted_indices.dtype == torch.int32, "sorted_indices is int32")
    need(bool((sorted_indices >= 0).all()), "sorted_indices is not negative")
    need(not padded_mode and restore_shape is None, "not emulated: padding")
    top = 1 if probs is None else probs.shape[1]
    need(top <= 512, "512 experts for a token at most")
    rows = permuted_tokens.float()[sorted_indices.long()].unflatten(0, (-1, top))
    if probs is not None:
        rows = rows * probs.float()[..., None]
    return rows.sum(1).to(permuted_tokens.dtype)


@emulates()
def npu_grouped_matmul(
    x,
    weight,
    *,
    bias=None,
    group_list=None,
    split_item=0,
    group_type=None,
    group_list_type=0,
    act_type=0,
    **other,
):
    unknown = [name for name, value in other.items() if value is not None]
    need(not unknown, f"not emulated: {unknown}")
    need(len(x) == len(weight) == 1 and weight[0].dim() == 3, "one x, one weight [E, K, N]")
    need(split_item in (2, 3) and group_type == 0, "one output: split_item 2 or 3, group_type 0")
    need(group_list is not None and group_list.dtype == torch.int64, "group_list is int64")
    need(group_list.numel() == weight[0].shape[0], "group_list has an entry for each expert")
    need(x[0].dtype == weight[0].dtype, "npu_grouped_matmul: one dtype")
    need(max(weight[0].shape[1:]) < 65536, "inner dimensions below 65536")
    ends = group_list.cumsum(0) if group_list_type == 1 else group_list
    need(bool((ends.diff() >= 0).all()), "group_list does not decrease")
    out = torch.zeros(x[0].shape[0], weight[0].shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = x[0][start:end].float() @ weight[0][expert].float()
        if bias is not None:
            out[start:end] += bias[0][expert].float()
        start = end
    return [out.to(x[0].dtype)]
