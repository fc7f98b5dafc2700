# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE whose experts go the way that they go on PlatformFL: router, blocks, activation and
sum are dispatched, and the model says what it says with vLLM's own experts for the CPU."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

EMULATED = {"PYTHONPATH": str(Path(__file__).parent / "emulated_experts")}
SERVED = ("topk_softmax", "moe_align_block_size", "silu_and_mul", "moe_sum")


def rows_of(reply: dict, op: str) -> list[dict]:
    [worker] = reply["routes"]
    return [row for row in worker["ops"] if row["op"] == op]


def test_experts_are_routed_sorted_and_summed_by_what_was_chosen(engine) -> None:
    stock = engine.stock("tiny_moe")
    reply = engine("tiny_moe", EMULATED)
    assert len({token for tokens in stock["tokens"] for token in tokens}) > 10
    assert reply["tokens"] == stock["tokens"]
    for ours, theirs in zip(reply["logprobs"], stock["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)
    for op in SERVED:
        called = [row for row in rows_of(reply, op) if row["calls"]]
        assert called and all(row["impl_id"] != "native" for row in called), op
    # 4 steps of two layers, each of which has an activation; the model has no other.
    assert sum(row["calls"] for row in rows_of(reply, "silu_and_mul")) == 8


def test_a_broken_sum_shows(engine, tmp_path: Path) -> None:
    (tmp_path / "wrong_sum.py").write_text(
        "from vllm_fl.types import BackendImplKind, OpImpl\n"
        "def register_builtins(registry):\n"
        "    registry.register_impl(OpImpl('moe_sum', 'vendor.cpu.wrong', BackendImplKind.VENDOR,\n"
        "        lambda input, topk_ids=None, expert_map=None: input[:, 0].contiguous(),\n"
        "        vendor='cpu', priority=300))\n"
    )
    paths = f"{EMULATED['PYTHONPATH']}:{tmp_path}"
    wrong = {"PYTHONPATH": paths, "VLLM_FL_PLUGIN_MODULES": "wrong_sum"}
    assert engine("tiny_moe", wrong)["tokens"] != engine("tiny_moe", EMULATED)["tokens"]
