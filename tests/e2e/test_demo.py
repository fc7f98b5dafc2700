# SPDX-License-Identifier: Apache-2.0
import json
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.native import CPU_IMPL, NATIVE, rejected
from vllm_fl.backends.vendor.cpu.impl.common import DTYPES

pytestmark = pytest.mark.e2e

OPS = {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"}


@pytest.fixture(scope="module")
def document(run, demo_model) -> dict[str, object]:
    outcome = run([Path(sysconfig.get_path("scripts")) / "vllm-fl", "demo", "--json"])
    return json.loads(outcome.stdout)  # refuses anything before or after the one document


def test_the_demo_prints_one_json_document_with_the_right_answer(document) -> None:
    assert sorted(document) == ["answer", "mode", "ops"]
    assert "Paris" in document["answer"]
    assert document["mode"] == "eager"
    assert {row["op"] for row in document["ops"]} == OPS
    for op in OPS:
        assert sum(row["calls"] for row in document["ops"] if row["op"] == op) > 0


@pytest.mark.skipif(
    not NATIVE and torch.bfloat16 not in DTYPES,
    reason="vendor.cpu refuses bfloat16 where vLLM truncates to it",
)
def test_the_cpus_first_kernels_serve_every_op_of_the_demo(document) -> None:
    assert len(document["ops"]) == len(OPS)
    for row in document["ops"]:
        assert (row["impl_id"], row["kind"]) == (CPU_IMPL, "vendor")
        assert row["bound"] > 0
        assert row["calls"] > 0
        assert rejected(row) == []
