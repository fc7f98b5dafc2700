# SPDX-License-Identifier: Apache-2.0
"""Merging of two parts of an attention, under both names that vLLM has for it."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.ops.attention import MERGE_ATTN_STATES

from .helpers import inputs, right, vllm_module


@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("module", ["_custom_ops", "v1.attention.ops.triton_merge_attn_states"])
def test_both_results_are_written_where_vllm_wants_them(load, module, with_lse) -> None:
    args = inputs(MERGE_ATTN_STATES, "some tokens with context")
    output = torch.full_like(args[0], float("nan"))
    lse = torch.full_like(args[1], float("nan")) if with_lse else None
    merge = vllm_module(module)
    load()
    assert merge.merge_attn_states(output, *args[:4], lse, args[4]) is None
    wanted = (*args[:6], with_lse)
    assert right(MERGE_ATTN_STATES, (output, lse), wanted)


def test_the_chooser_finds_the_served_one_at_each_call(load, monkeypatch) -> None:
    chooser = vllm_module("v1.attention.ops.merge_attn_states")
    from vllm.platforms import current_platform

    vllm_module("v1.attention.ops.triton_merge_attn_states")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    args = inputs(MERGE_ATTN_STATES, "several tokens")
    output = torch.empty_like(args[0])
    load()
    chooser.merge_attn_states(output, *args[:4])
    assert right(MERGE_ATTN_STATES, (output, None), (*args[:6], False))


def test_an_output_of_fp8_is_written(load) -> None:
    ops = vllm_module("_custom_ops")
    args = inputs(MERGE_ATTN_STATES, "fp8")
    output = torch.empty(args[0].shape, dtype=torch.float8_e4m3fn)
    load()
    ops.merge_attn_states(output, *args[:4], None, args[4], args[5])
    expected, _ = MERGE_ATTN_STATES.reference(*args)
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))
