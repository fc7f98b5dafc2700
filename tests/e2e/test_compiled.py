# SPDX-License-Identifier: Apache-2.0
"""vLLM's default mode: its own forwards, untouched, which the compiler can fuse."""

import json
import sysconfig
from pathlib import Path

import pytest

from tests.native import CPU_IMPL, CPU_NAMESPACE

pytestmark = [pytest.mark.e2e, pytest.mark.extended]


def test_the_compiled_demo_is_right_and_leaves_everything_to_the_compiler(run, demo_model) -> None:
    program = Path(sysconfig.get_path("scripts")) / "vllm-fl"
    document = json.loads(run([program, "demo", "--json", "--compiled"]).stdout)
    assert "Paris" in document["answer"]
    assert document["mode"] == "compiled"
    # vLLM's warm-up samples, so the sampling functions may be there too; they are not compiled.
    layers = [row for row in document["ops"] if not row["op"].startswith("apply_")]
    assert [row["op"] for row in layers] == [
        "fused_add_rms_norm",
        "rms_norm",
        "rotary_embedding",
        "silu_and_mul",
    ]
    for row in layers:
        assert (row["impl_id"], row["reason"]) == ("native", "left to the compiler")
        assert row["bound"] > 0


def test_compiled_results_are_those_of_vllm_alone(engine) -> None:
    settings = {"enforce_eager": False, "dtype": "bfloat16"}
    ours, theirs = engine("tiny", **settings), engine.stock("tiny", **settings)
    assert ours["tokens"] == theirs["tokens"]
    assert ours["logprobs"] == theirs["logprobs"]


@pytest.mark.parametrize(
    ("changes", "llm"),
    [
        ({"VLLM_FL_PER_OP": "rms_norm=vendor:cpu"}, {}),
        ({}, {"custom_ops": ["none", "+rms_norm"]}),
    ],
    ids=["per_op", "custom_ops"],
)
def test_an_op_that_is_asked_for_runs_from_inside_the_graph(engine, tmp_path, changes, llm) -> None:
    cache = tmp_path / "cache"
    reply = engine(
        "tiny",
        {"TORCH_COMPILE_DEBUG": "0", "TORCHINDUCTOR_CACHE_DIR": str(cache), **changes},
        enforce_eager=False,
        compilation_config=llm,
    )
    rows = [row for row in reply["routes"][0]["ops"] if row["op"] == "rms_norm"]
    assert [row["impl_id"] for row in rows] == [CPU_IMPL]
    assert rows[0]["calls"] > 0
    assert "vllm_fl::rms_norm" in reply["operators"]  # the node of the graph
    assert f"{CPU_NAMESPACE}::rms_norm" in reply["operators"]  # and what it ran
    others = {row["op"]: row["impl_id"] for row in reply["routes"][0]["ops"]}
    assert others["silu_and_mul"] == "native"
    assert reply["tokens"] == engine.stock("tiny", enforce_eager=False)["tokens"]
