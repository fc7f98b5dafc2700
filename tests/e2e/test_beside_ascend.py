# SPDX-License-Identifier: Apache-2.0
"""vllm_fl and a package that makes vllm-ascend's claims, installed together."""

from pathlib import Path

import pytest

from tests.native import CPU_IMPL

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

BOTH = {"PYTHONPATH": str(Path(__file__).parent / "standin_ascend")}


def test_both_start_and_generate_and_each_layer_that_is_left_is_reported(engine) -> None:
    reply = engine("tiny", BOTH)
    assert reply["tokens"] == engine.stock("tiny")["tokens"]
    claimed = reply["vllm"]["op_registry_oot"]
    assert {"RMSNorm", "SiluAndMul", "RotaryEmbedding"} <= set(claimed)
    rows = {row["op"]: row for row in reply["routes"][0]["ops"]}
    for op in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"):
        row = rows[op]
        assert row["impl_id"] == "native", row
        assert "Ascend" in row["reason"] and "has its own forward_" in row["reason"], row


def test_without_it_the_same_layers_are_served(engine) -> None:
    rows = {row["op"]: row for row in engine("tiny")["routes"][0]["ops"]}
    assert rows["rms_norm"]["impl_id"] == rows["silu_and_mul"]["impl_id"] == CPU_IMPL
