# SPDX-License-Identifier: Apache-2.0
"""Wrong implementations of caches, attention, experts, quantization and sampling: each is the
reference with one thing changed, before it or behind it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests.testing.mutants import Mutant
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.contract import OpContract
from vllm_fl.testing import Kind

VALUES = (Kind.VALUES,)
OPS: dict[str, OpContract] = {contract.name: contract for contract in CONTRACTS}

Named = dict[str, Any]


def around(
    op: str,
    *,
    before: Callable[[Named], Named] | None = None,
    after: Callable[[Any, Named], Any] | None = None,
) -> Callable[..., Any]:
    """The reference of an op with other arguments, other outputs, or both.

    Args:
        before: takes the arguments by name, returns those to change.
        after: takes outputs and arguments, returns the outputs.
    """
    reference = OPS[op].reference

    @functools.wraps(reference)
    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(reference).bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        if before is not None:
            named |= before(named)
        outputs = reference(**named)
        return outputs if after is None else after(outputs, named)

    return changed


def wrong(op: str, name: str, kinds: tuple[Kind, ...] = VALUES, **settings: Any) -> Mutant:
    """A mutant; `before` and `after` as above, the rest as a Mutant's."""
    change = {key: settings.pop(key) for key in ("before", "after") if key in settings}
    return Mutant(name, OPS[op], around(op, **change), kinds, **settings)


# ------------------------------------------------------------------------------------ cache


def _slots(named: Named, move: Callable[[torch.Tensor, int], torch.Tensor]) -> Named:
    cache = named.get("key_cache", named.get("kv_cache"))
    total = cache.shape[0] * cache.shape[1]
    return {"slot_mapping": move(named["slot_mapping"], total) if total else named["slot_mapping"]}


def negative_slots_from_the_end(named: Named) -> Named:
    return _slots(named, lambda slots, total: slots % total)


def one_slot_further(named: Named) -> Named:
    return _slots(named, lambda slots, total: torch.where(slots < 0, slots, (slots + 1) % total))


def emptied(named: Named) -> Named:
    return {name: torch.zeros_like(named[name]) for name in ("key_cache", "value_cache")}


def written_but_not_declared(outputs: Any, named: Named) -> Any:
    for name, output in zip(("key_cache", "value_cache"), outputs, strict=True):
        named[name].copy_(output)
    return outputs


def scale_inverted(named: Named) -> Named:
    return {"k_scale": 1 / named["k_scale"], "v_scale": 1 / named["v_scale"]}


PAGES = ("key_cache", "value_cache")
CACHE = [
    wrong("reshape_and_cache_flash", "a negative slot is written",
          before=negative_slots_from_the_end),
    wrong("reshape_and_cache_flash", "slots are off by one", before=one_slot_further),
    wrong("reshape_and_cache_flash", "key and value are swapped",
          before=lambda named: {"key": named["value"], "value": named["key"]}),
    wrong("reshape_and_cache_flash", "the other rows are lost", before=emptied),
    wrong("reshape_and_cache_flash", "the scale is multiplied with", before=scale_inverted),
    wrong("reshape_and_cache_flash", "the declared write does not happen",
          (Kind.MISSING_WRITE,), says="key_cache is declared",
          settings=(("mutates", PAGES),)),
    wrong("reshape_and_cache_flash", "the write is not declared", (Kind.UNDECLARED_WRITE,),
          says="key_cache was written", after=written_but_not_declared),
    wrong("concat_and_cache_mla", "the rotary part comes first",
          after=lambda output, named: output.roll(named["k_pe"].shape[-1], -1)
          if output.dtype.itemsize > 1 else output),
    wrong("concat_and_cache_mla", "a negative slot is written",
          before=negative_slots_from_the_end),
]  # fmt: skip


# -------------------------------------------------------------------------- attention states


def softmax_without_the_largest(named: Named) -> Named:
    return {"prefix_lse": named["prefix_lse"].nan_to_num(neginf=-1e9) + 1e-2}


def binary_logarithm(outputs: Any, named: Named) -> Any:
    return outputs[0], None if outputs[1] is None else outputs[1] / 0.6931471805599453


ATTENTION = [
    wrong("merge_attn_states", "the prefix weighs too much", before=softmax_without_the_largest),
    wrong("merge_attn_states", "the logsumexp is to the base of 2", after=binary_logarithm),
    wrong("merge_attn_states", "prefix and suffix are swapped in the output only",
          before=lambda named: {"prefix_output": named["suffix_output"],
                                "suffix_output": named["prefix_output"]}),
]  # fmt: skip


# ---------------------------------------------------------------------------------- experts


def only_1024_experts(named: Named) -> Named:
    logits = named["gating_output"]
    if logits.shape[1] <= 1024:
        return {}
    return {"gating_output": logits.clone().index_fill_(
        1, torch.arange(1024, logits.shape[1]), -torch.inf)}  # fmt: skip


def order_of_experts(outputs: Any, named: Named) -> Any:
    return outputs[0], outputs[1].flip(-1).contiguous()


def half_precision_weights(outputs: Any, named: Named) -> Any:
    return outputs[0].bfloat16().float(), outputs[1]


def wide_ids(outputs: Any, named: Named) -> Any:
    return outputs[0], outputs[1].long()


def without_the_last_choice(named: Named) -> Named:
    values = named["input"].clone()
    values[:, -1] = 0
    return {"input": values}


def experts_shifted(outputs: Any, named: Named) -> Any:
    entries, experts, count = outputs
    return entries, torch.where(experts > 0, experts - 1, experts), count


def count_without_padding(outputs: Any, named: Named) -> Any:
    entries, experts, count = outputs
    return entries, experts, torch.full_like(count, named["topk_ids"].numel())


def halves_swapped(named: Named) -> Named:
    w1 = named["w1"]
    return {"w1": w1.roll(w1.shape[1] // 2, 1)}


EXPERTS = [
    wrong("topk_softmax", "weights and experts are in different orders", after=order_of_experts),
    wrong("topk_softmax", "weights are not renormalized",
          before=lambda named: {"renormalize": False}),
    wrong("topk_softmax", "experts beyond 1024 are never chosen", before=only_1024_experts),
    wrong("topk_softmax", "weights are rounded to bfloat16", after=half_precision_weights),
    wrong("topk_softmax", "ids are int64", (Kind.DTYPE,), says="torch.int64 instead of",
          after=wide_ids),
    wrong("grouped_topk", "groups are ignored",
          before=lambda named: {"topk_group": named["num_expert_group"]}),
    wrong("grouped_topk", "the factor is ignored",
          before=lambda named: {"routed_scaling_factor": 1.0}),
    wrong("moe_align_block_size", "blocks go to the expert before", after=experts_shifted),
    wrong("moe_align_block_size", "padding is not counted", after=count_without_padding),
    wrong("moe_sum", "the last choice is skipped", before=without_the_last_choice),
    wrong("fused_experts", "router weights are ignored",
          before=lambda named: {"topk_weights": torch.ones_like(named["topk_weights"])}),
    wrong("fused_experts", "gate and up are swapped", before=halves_swapped),
    wrong("fused_experts", "every token goes to the first expert",
          before=lambda named: {"topk_ids": torch.zeros_like(named["topk_ids"])}),
]  # fmt: skip


# ----------------------------------------------------------------------------- quantization


def inverse_scale(named: Named) -> Named:
    return {} if named["scale"] is None else {"scale": 1 / named["scale"]}


def one_scale_for_the_row(outputs: Any, named: Named) -> Any:
    values, scales = outputs
    if not scales.numel():
        return outputs
    return values, scales.amax(-1, keepdim=True).expand_as(scales).clone()


def not_saturated(outputs: Any, named: Named) -> Any:
    values, scale = outputs
    top = values.float().abs() >= 448
    return values.float().masked_fill(top, torch.nan).to(values.dtype), scale


def scale_of_128(outputs: Any, named: Named) -> Any:
    values, scale = outputs
    return values, scale * (127 / 128)


def towards_zero(outputs: Any, named: Named) -> Any:
    _, scale = outputs
    ratio = named["x"].float() / scale
    return ratio.nan_to_num(0).trunc().clamp(-127, 127).to(torch.int8), scale


QUANTIZATION = [
    wrong("scaled_fp8_quant", "the scale is multiplied with", before=inverse_scale),
    wrong("scaled_fp8_quant", "the largest values become NaN", after=not_saturated),
    wrong("per_token_group_quant_fp8", "one scale is given for the whole row",
          after=one_scale_for_the_row),
    wrong("dynamic_per_token_quant_int8", "the scale is of 128 steps", after=scale_of_128),
    wrong("dynamic_per_token_quant_int8", "values are truncated", after=towards_zero),
    wrong("w8a8_block_fp8_matmul", "the scales of the first argument are ignored",
          before=lambda named: {"As": torch.ones_like(named["As"])}),
]  # fmt: skip


# --------------------------------------------------------------------------------- sampling


def all_divided(outputs: Any, named: Named) -> Any:
    seen = named["prompt_mask"] | named["output_mask"]
    divisor = named["repetition_penalties"].unsqueeze(1)
    return torch.where(seen, named["logits"] / divisor, named["logits"]).contiguous()


def lowest_instead_of_infinity(outputs: Any, named: Named) -> Any:
    return outputs.nan_to_num(nan=torch.nan, posinf=torch.inf)


SAMPLING = [
    wrong("apply_repetition_penalties", "negative logits are divided too", after=all_divided),
    wrong("apply_repetition_penalties", "the prompt is forgotten",
          before=lambda named: {"prompt_mask": torch.zeros_like(named["prompt_mask"])}),
    wrong("apply_top_k_top_p", "one more is kept",
          before=lambda named: {} if named["k"] is None else
          {"k": (named["k"] + 1).clamp(max=named["logits"].shape[1])}),
    wrong("apply_top_k_top_p", "p is ignored", before=lambda named: {"p": None}),
    wrong("apply_top_k_top_p", "what is removed is finite", after=lowest_instead_of_infinity),
]  # fmt: skip

MUTANTS = [*CACHE, *ATTENTION, *EXPERTS, *QUANTIZATION, *SAMPLING]
