# SPDX-License-Identifier: Apache-2.0
"""What surrounds the matrix products of the experts: blocks of tokens, and the sum at the end."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, exactly, half_and_single

__all__ = ["CONTRACTS", "MOE_ALIGN_BLOCK_SIZE", "MOE_SUM"]


# ---------------------------------------------------------------------- moe_align_block_size


def _sizes(numel: int, block_size: int, num_experts: int, pad: bool) -> tuple[int, int]:
    """Room for the worst distribution of `numel` choices, in entries and in blocks."""
    entries = numel + num_experts * (block_size - 1)
    if pad:
        entries = -(-entries // block_size) * block_size
    if numel < num_experts:
        entries = min(numel * block_size, entries)
    return entries, -(-entries // block_size)


def _moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = topk_ids.device
    numel = topk_ids.numel()
    entries, blocks = _sizes(numel, block_size, num_experts, pad_sorted_ids)
    expert = topk_ids.reshape(-1).long()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    if expert_map is not None and ignore_invalid_experts:
        local = expert_map.long().index_select(0, expert.clamp(max=num_experts - 1))
        expert = torch.where((expert < num_experts) & (local >= 0), local, num_experts)
    # Choices of no expert are counted as one more, which gets no block.
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    count = count.scatter_add(0, expert, torch.ones_like(expert))
    ends = ((count[:-1] + block_size - 1) // block_size * block_size).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))  # of each expert, and where the rest begins
    order = expert.argsort(stable=True)
    ordered = expert.index_select(0, order)
    rank = torch.arange(numel, device=device) - (count.cumsum(0) - count).index_select(0, ordered)
    place = starts.index_select(0, ordered) + rank
    place = torch.where(ordered < num_experts, place, entries)
    sorted_ids = torch.full((entries + 1,), numel, dtype=torch.int64, device=device)
    sorted_ids = sorted_ids.scatter(0, place, order)[:entries]
    first = torch.arange(blocks, device=device) * block_size
    expert_ids = torch.searchsorted(ends, first, right=True)
    unused = expert_ids >= num_experts
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map.long().index_select(0, expert_ids.clamp(max=num_experts - 1))
    return sorted_ids.int(), expert_ids.masked_fill(unused, -1).int(), ends[-1:].int()


def _align_fake(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    entries, blocks = _sizes(topk_ids.numel(), block_size, num_experts, pad_sorted_ids)
    return (
        topk_ids.new_empty(entries, dtype=torch.int32),
        topk_ids.new_empty(blocks, dtype=torch.int32),
        topk_ids.new_empty(1, dtype=torch.int32),
    )


def _align_facts(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> dict[str, Any]:
    return {"num_experts": num_experts}


def _align_canonical(
    outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Each expert's choices in their own order, and nothing behind the last used block."""
    sorted_ids, expert_ids, used = outputs
    topk_ids, block_size = args[:2]
    if sorted_ids is None or expert_ids is None or used is None or used.numel() != 1:
        return outputs
    if expert_ids.numel() != -(-sorted_ids.numel() // block_size):
        return outputs
    position = torch.arange(sorted_ids.numel(), device=sorted_ids.device)
    block = torch.arange(expert_ids.numel(), device=expert_ids.device)
    behind, unused = position >= used, block * block_size >= used
    changes = torch.ones_like(unused)
    changes[1:] = (expert_ids[1:] != expert_ids[:-1]) | unused[1:]
    run = changes.cumsum(0).repeat_interleave(block_size)[: position.numel()]
    values = sorted_ids.masked_fill(behind, topk_ids.numel()).double()
    order = values.argsort()
    order = order[run[order].argsort(stable=True)]
    return values[order], expert_ids.masked_fill(unused, -1), used


def _align_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    experts: int = 8,
    topk: int = 2,
    block_size: int = 16,
    of: str = "all",
    index: torch.dtype = torch.int32,
    mapped: str = "",
    pad: bool = False,
    ignore: bool = False,
    layout: str = "",
) -> tuple[Any, ...]:
    scores = torch.rand(tokens, experts, generator=generator)
    if of == "some":  # every second expert gets nothing
        scores[:, 1::2] -= 1.0
    ids = scores.argsort(dim=-1, descending=True)[:, :topk]
    if of == "one":
        ids = torch.full((tokens, topk), experts - 1)
    elif of == "padding":
        ids[1::2] = -1
    elif of == "nobody":
        ids[:] = -1
    ids = ids.to(index)
    if layout == "permuted":
        ids = ids.t().contiguous().t()
    elif layout:
        ids = torch.cat((ids, ids), dim=1)[:, :topk]
    expert_map = None
    if mapped:
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        here = torch.arange(experts)[1::2] if mapped == "half" else torch.arange(0)
        expert_map[here] = torch.arange(here.numel(), dtype=torch.int32)
    return ids, block_size, experts, expert_map, pad, ignore


_ALIGN_CASES: dict[str, dict[str, Any]] = {
    "several tokens": {},
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 301, "block_size": 64},
    "fewer choices than experts": {"tokens": 2, "experts": 64},
    "odd and prime sizes": {"tokens": 19, "block_size": 7, "experts": 5},
    "blocks of one": {"block_size": 1},
    "blocks of 128": {"block_size": 128},
    "huge block": {"block_size": 1024},
    "empty experts": {"of": "some"},
    "one expert for all": {"of": "one", "tokens": 40},
    "one expert there is": {"experts": 1, "topk": 1},
    "top 40 of 64": {"topk": 40, "experts": 64},
    "64-bit ids": {"index": torch.int64},
    "permuted ids": {"layout": "permuted"},
    "slice of wider ids": {"layout": "slice of wider rows"},
    "padding": {"of": "padding"},
    "only padding": {"of": "nobody"},
    "padded room": {"pad": True, "tokens": 5, "block_size": 32},
    "257 experts": {"experts": 257, "topk": 8, "tokens": 33},
    "1030 experts": {"experts": 1030, "topk": 4, "tokens": 300},
    "experts elsewhere": {"mapped": "half"},
    "experts elsewhere are ignored": {"mapped": "half", "ignore": True},
    "experts elsewhere are ignored, padding": {"mapped": "half", "ignore": True, "of": "padding"},
    "no expert here": {"mapped": "none"},
    "no expert here, ignored": {"mapped": "none", "ignore": True, "pad": True},
}

# ----------------------------------------------------------------------------------- moe_sum


def _kept(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Which choices have an expert here."""
    kept = topk_ids >= 0
    if expert_map is not None:
        index = topk_ids.clamp(min=0).long()
        kept &= expert_map.index_select(0, index.reshape(-1)).view(index.shape) >= 0
    return kept


def _sum(
    input: torch.Tensor, topk_ids: torch.Tensor | None, expert_map: torch.Tensor | None
) -> torch.Tensor:
    if topk_ids is not None:
        # Not a product with zero: nobody wrote the rows that are left out.
        input = torch.where(_kept(topk_ids, expert_map)[..., None], input, 0.0)
    return input.sum(dim=1)


def _moe_sum(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return _sum(input.float(), topk_ids, expert_map).to(input.dtype)


def _sum_exact(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return _sum(input, topk_ids, expert_map)


def _sum_magnitude(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    return (_sum(input.abs(), topk_ids, expert_map).nan_to_num(posinf=0.0),)


def _sum_fake(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return input.new_empty((input.shape[0], input.shape[2]))


def _sum_facts(
    input: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> dict[str, Any]:
    return {"topk": input.shape[1], "hidden_size": input.shape[2]}


def _sum_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    topk: int = 4,
    hidden: int = 64,
    layout: str = "",
    ids: torch.dtype | None = None,
    mapped: bool = False,
    magnitude: float = 1.0,
    special: bool = False,
) -> tuple[Any, ...]:
    shapes = {
        "permuted": (topk, tokens, hidden),
        "slice with a step": (tokens, topk, 2 * hidden),
        "slice of wider rows": (tokens, topk, hidden + 24),
    }
    shape = shapes.get(layout, (tokens, topk, hidden))
    rows = (magnitude * torch.randn(shape, generator=generator)).to(dtype)
    if layout == "permuted":
        rows = rows.transpose(0, 1)
    elif layout == "slice with a step":
        rows = rows[..., ::2]
    elif layout:
        rows = rows[..., :hidden]
    if special:
        rows[0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        rows[0, 1, 0] = -float("inf")
    if ids is None:
        return (rows,)
    experts = 8
    chosen = torch.randint(0, experts, (tokens, topk), generator=generator)
    chosen[1::3] = -1
    expert_map = None
    dropped = chosen < 0
    if mapped:
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[::2] = torch.arange(experts // 2, dtype=torch.int32)
        dropped |= chosen % 2 == 1
    rows[dropped] = float("nan")
    return rows, chosen.to(ids), expert_map


_SUM_CASES: dict[str, dict[str, Any]] = {
    "several tokens": {},
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 67},
    **{f"top {k}": {"topk": k} for k in (1, 2, 3, 6, 8, 9, 33)},
    "odd and prime sizes": {"topk": 5, "hidden": 61},
    "wide": {"tokens": 2, "hidden": 4096},
    "permuted": {"layout": "permuted"},
    "slice with a step": {"layout": "slice with a step"},
    "slice of wider rows": {"layout": "slice of wider rows"},
    "rows of padding": {"ids": torch.int32},
    "rows of experts elsewhere": {"ids": torch.int32, "mapped": True},
    "rows of experts elsewhere, 64-bit ids": {"ids": torch.int64, "mapped": True},
    "tiny values": {"magnitude": 1e-3},
    "huge values": {"magnitude": 1e4},
    "inf and nan": {"special": True},
}

# ------------------------------------------------------------------------------- the contracts

MOE_ALIGN_BLOCK_SIZE = OpContract(
    signature=OpSignature.parse(
        "moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None, "
        "pad_sorted_ids=False, ignore_invalid_experts=False)",
        facts=_align_facts,
        fact_names=("num_experts",),
        summary=(
            "Sorts the choices of all tokens, numbered in row order, by expert, each expert's "
            "padded to whole blocks with the number of choices; ids outside 0 .. num_experts-1 "
            "are left out; returns (sorted_ids, the expert of each block, the used entries), all "
            "int32. expert_map: from global ids to those here, or -1. Experts elsewhere keep "
            "their blocks, marked -1, unless ignore_invalid_experts leaves them out. The order "
            "within an expert is open, and so is what lies behind the used entries."
        ),
    ),
    schema=(
        "(Tensor topk_ids, SymInt block_size, SymInt num_experts, Tensor? expert_map=None, "
        "bool pad_sorted_ids=False, bool ignore_invalid_experts=False) -> (Tensor, Tensor, Tensor)"
    ),
    reference=_moe_align_block_size,
    fake=_align_fake,
    arrays={"topk_ids": "index[tokens, topk]", "expert_map": "int32[num_experts]?"},
    results=("int32[entries]", "int32[blocks]", "int32[1]"),
    constraints=("block_size >= 1",),
    canonical=_align_canonical,
    without={
        "leading shapes": "tokens are one dimension, as in vLLM's kernels",
        "tiny values": "ids are integers, and there is nothing else",
        "huge values": "ids are integers, and there is nothing else",
        "inf and nan": "ids are integers, and there is nothing else",
    },
    call_sites=(
        CallSite(
            "vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size",
            "the function, there and where the experts import it by name",
            device_types=("cuda",),
            note="vLLM on CPU has experts that sort for themselves; the kernel's scatter_idx "
            "(vLLM 0.32) is not part of this op",
        ),
    ),
    source="vLLM, csrc/libtorch_stable/moe/moe_align_sum_kernels.cu: moe_align_block_size",
    cases=tuple(Case(name, partial(_align_inputs, **kw)) for name, kw in _ALIGN_CASES.items()),
    tolerances=exactly(
        torch.float32, why="integers; no argument is of a floating-point dtype, so one is enough"
    ),
)

MOE_SUM = OpContract(
    signature=OpSignature.parse(
        "moe_sum(input, topk_ids=None, expert_map=None)",
        facts=_sum_facts,
        fact_names=("topk", "hidden_size"),
        summary=(
            "Sums (tokens, topk, hidden) over topk, in float32; with topk_ids it leaves out, and "
            "does not read, the rows of negative ids and of those that expert_map sends to -1."
        ),
    ),
    schema="(Tensor input, Tensor? topk_ids=None, Tensor? expert_map=None) -> Tensor",
    reference=_moe_sum,
    fake=_sum_fake,
    arrays={
        "input": "T[tokens, topk, hidden]",
        "topk_ids": "index[tokens, topk]?",
        "expert_map": "int32[experts]?",
    },
    results=("T[tokens, hidden]",),
    without={"leading shapes": "tokens are one dimension, as in vLLM's kernels"},
    exact=_sum_exact,
    magnitude=_sum_magnitude,
    batched=("input", "topk_ids"),
    call_sites=(
        CallSite(
            "vllm._custom_ops:moe_sum",
            "the function, which the experts call through its module",
            device_types=("cuda",),
            note="topk_ids and expert_map since vLLM 0.28; vLLM on CPU sums inside its experts",
        ),
    ),
    source="vLLM, csrc/libtorch_stable/moe/moe_align_sum_kernels.cu: moe_sum",
    cases=tuple(Case(name, partial(_sum_inputs, **kw)) for name, kw in _SUM_CASES.items()),
    tolerances=half_and_single(
        half=0.52,
        single=16,
        why="half precision is rounded once, from a float32 sum whose error is 2^-8 of its ulp "
        "at most (float16, 33 terms); float32: k terms in sequence err by (k - 1)/2 ulp of the "
        "sum of their sizes at most, and k is 33 at most",
    ),
)

CONTRACTS: tuple[OpContract, ...] = (MOE_ALIGN_BLOCK_SIZE, MOE_SUM)
