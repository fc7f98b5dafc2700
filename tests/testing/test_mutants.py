# SPDX-License-Identifier: Apache-2.0
"""The kit catches every implementation that is wrong, says in which way, and passes those that
are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.testing import mutants_dense, mutants_fused, mutants_sparse
from tests.testing.mutants import Mutant, implementation
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.ops.moe_blocks import MOE_ALIGN_BLOCK_SIZE
from vllm_fl.ops.normalization import FUSED_ADD_RMS_NORM, RMS_NORM
from vllm_fl.ops.qk_norm_rope import FUSED_QK_NORM_ROPE
from vllm_fl.ops.rotary import ROTARY_EMBEDDING
from vllm_fl.testing import check_implementation

MUTANTS: list[Mutant] = [
    *mutants_dense.MUTANTS,
    *mutants_fused.MUTANTS,
    *mutants_sparse.MUTANTS,
]


def check(mutant: Mutant):
    return check_implementation(
        mutant.impl,
        contract=mutant.contract,
        dtypes=[mutant.dtype],
        cases=mutant.cases or None,
        compile=False,
        timeout=mutant.timeout,
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.contract.name}: {m.name}")
def test_a_wrong_implementation_is_caught_and_named(mutant: Mutant) -> None:
    report = check(mutant)
    assert not report.passed
    assert [f for f in report.failures if f.kind in mutant.kinds and mutant.says in f.what], report


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 90
    assert len({(m.contract.name, m.name) for m in MUTANTS}) == len(MUTANTS)


# ------------------------------------------------------------------------- right ones pass


def silu_in_half_precision(x):
    d = x.shape[-1] // 2
    return (F.silu(x[..., :d]) * x[..., d:]).contiguous()


def silu_rounded_once(x):
    # Copied first: torch's sigmoid of a strided row differs in bits from that of a dense one.
    gate, up = x.contiguous().float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def norm_rounded_once(x, weight, epsilon, variance_size=None):
    wide = None if weight is None else weight.float()
    out = RMS_NORM.reference(x.float(), wide, epsilon, variance_size)
    return out.to(x.dtype).contiguous()


def norm_in_blocks(x, weight, epsilon, variance_size=None):
    head = (x if variance_size is None else x[..., :variance_size]).float()
    squares = sum(part.pow(2).sum(-1, keepdim=True) for part in head.split(32, dim=-1))
    scaled = x.float() * torch.rsqrt(squares / head.shape[-1] + epsilon)
    return (scaled if weight is None else scaled * weight.float()).to(x.dtype).contiguous()


def fused_in_place(x, residual, weight, epsilon, variance_size=None):
    out, total = FUSED_ADD_RMS_NORM.reference(x, residual, weight, epsilon, variance_size)
    return x.copy_(out), residual.copy_(total)


def rotary_in_place(positions, query, key, head_size, cos_sin_cache, is_neox):
    found = ROTARY_EMBEDDING.reference(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query.copy_(found[0]), None if key is None else key.copy_(found[1])


def sorted_in_another_order_each_time(
    topk_ids,
    block_size,
    num_experts,
    expert_map=None,
    pad_sorted_ids=False,
    ignore_invalid_experts=False,
):
    """As kernels with atomic counters do: the order within an expert's blocks is open."""
    order = torch.randperm(topk_ids.numel())
    shuffled = topk_ids.reshape(-1)[order].reshape(topk_ids.shape)
    rest = (block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
    sorted_ids, experts, used = MOE_ALIGN_BLOCK_SIZE.reference(shuffled, *rest)
    back = torch.cat((order, torch.tensor([topk_ids.numel()]))).int()
    return back[sorted_ids.long()], experts, used


RIGHT = [
    implementation(SILU_AND_MUL, silu_in_half_precision),
    implementation(SILU_AND_MUL, silu_rounded_once, batch_invariant=True),
    implementation(RMS_NORM, norm_rounded_once),
    implementation(RMS_NORM, norm_in_blocks, batch_invariant=True),
    implementation(FUSED_ADD_RMS_NORM, fused_in_place, mutates=("x", "residual")),
    implementation(ROTARY_EMBEDDING, rotary_in_place, mutates=("query", "key")),
    implementation(FUSED_QK_NORM_ROPE, mutants_fused.in_place, mutates=("qkv",)),
    implementation(FUSED_QK_NORM_ROPE, mutants_fused.rounded_once),
]


@pytest.mark.parametrize("impl", RIGHT, ids=lambda i: i.fn.__name__)
def test_a_right_implementation_that_rounds_once_or_twice_passes(impl) -> None:
    report = check_implementation(impl, compile=False)
    assert report.passed, report
    assert {result.dtype for result in report.results} == {"bfloat16", "float16", "float32"}


def test_an_order_that_the_contract_leaves_open_may_change_from_call_to_call() -> None:
    impl = implementation(MOE_ALIGN_BLOCK_SIZE, sorted_in_another_order_each_time)
    report = check_implementation(impl, compile=False)
    assert report.passed, report
