# SPDX-License-Identifier: Apache-2.0
import json
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

OPS = {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"}


def test_the_demo_prints_one_json_document_with_the_answer_and_what_served_it(
    run, demo_model
) -> None:
    outcome = run([Path(sysconfig.get_path("scripts")) / "vllm-fl", "demo", "--json"])
    document = json.loads(outcome.stdout)  # refuses anything before or after it
    assert sorted(document) == ["answer", "mode", "ops"]
    assert "Paris" in document["answer"]
    assert document["mode"] == "eager"
    rows = {row["op"]: row for row in document["ops"]}
    assert set(rows) == OPS
    assert len(rows) == len(document["ops"])
    for row in rows.values():
        assert (row["impl_id"], row["kind"]) == ("vendor.cpu", "vendor")
        assert row["bound"] > 0
        assert row["calls"] > 0
        assert row["rejected"] == []
