# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with vendor.ascend, on a CPU: its operators are those of the harness."""

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

HERE = Path(__file__).parent
OPS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
ON_CPU = {
    "VLLM_FL_PLUGIN_MODULES": "ascend_on_cpu",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
}


def ordered(token: str, ops: tuple[str, ...] = OPS) -> dict[str, str]:
    return {**ON_CPU, "VLLM_FL_PER_OP": ";".join(f"{op}={token}" for op in ops)}


def test_it_generates_the_tokens_of_the_reference(engine) -> None:
    reply = engine("tiny", ordered("vendor:ascend"))
    rows = {row["op"]: row for row in reply["routes"][0]["ops"]}
    for op in OPS:
        assert rows[op]["impl_id"] == "vendor.ascend", rows[op]
        assert rows[op]["calls"] > 0
    assert {"npu::npu_rms_norm", "npu::npu_swiglu", "npu::npu_mrope"} <= set(reply["operators"])
    assert reply["tokens"] == engine("tiny", ordered("reference"))["tokens"]


def test_two_rotary_tables_in_one_process_are_two(engine) -> None:
    """Gemma 3 turns its local layers by another table than its global ones."""
    ops = ("rotary_embedding", "gemma_rms_norm", "fused_add_gemma_rms_norm", "gelu_and_mul")
    reply = engine("tiny_gemma3", ordered("vendor:ascend", ops))
    rows = {row["op"]: row for row in reply["routes"][0]["ops"]}
    assert rows["rotary_embedding"]["impl_id"] == "vendor.ascend"
    assert rows["rotary_embedding"]["bound"] == 2
    assert reply["tokens"] == engine("tiny_gemma3", ordered("reference", ops))["tokens"]
