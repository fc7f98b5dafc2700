# SPDX-License-Identifier: Apache-2.0
"""Families of models with small random weights: in float32 the plugin changes no greedy token,
and the route table shows what serves each op of the family."""

import pytest

from tests.native import CPU_IMPL, NATIVE

pytestmark = pytest.mark.e2e

LLAMA = {
    "rms_norm": CPU_IMPL,
    "fused_add_rms_norm": CPU_IMPL,
    "silu_and_mul": CPU_IMPL,
    "rotary_embedding": CPU_IMPL,
}
GEMMA = {
    # vLLM has no kernel of it for CPUs, but we have.
    "gemma_rms_norm": CPU_IMPL if NATIVE else "reference.torch",
    "fused_add_gemma_rms_norm": CPU_IMPL if NATIVE else "reference.torch",
    "gelu_and_mul": CPU_IMPL,
    "rotary_embedding": CPU_IMPL,
}
FAMILIES = {"tiny_llama": LLAMA, "tiny": LLAMA, "tiny_gemma": GEMMA}
LAYERS_BOUND = {
    # Two layers: each has two norms, and in Qwen3 one over the heads of query and key each;
    # one norm comes after them.
    "tiny_llama": 5,
    "tiny": 9,
    "tiny_gemma": 5,
}

each_family = pytest.mark.parametrize(
    "model",
    [
        # Those beside Gemma are built of the demo's ops.
        pytest.param("tiny_llama", marks=pytest.mark.extended),
        pytest.param("tiny", marks=pytest.mark.extended, id="tiny_qwen3"),
        "tiny_gemma",
    ],
)


@pytest.fixture(params=[{}], ids=["greedy"])
def sampling(request: pytest.FixtureRequest) -> dict[str, float]:
    """More arguments of SamplingParams."""
    return request.param


@each_family
def test_float32_tokens_equal_those_of_vllm_alone(engine, model, sampling) -> None:
    ours = engine(model, sampling=sampling)["tokens"]
    theirs = engine.stock(model, sampling=sampling)["tokens"]
    assert [len(tokens) for tokens in theirs] == [64] * 8
    assert len({tuple(tokens) for tokens in theirs}) == 8  # they depend on the prompt
    assert len({token for tokens in theirs for token in tokens}) > 64  # and on what came before
    assert ours == theirs


@each_family
def test_the_route_table_shows_the_ops_of_the_family(engine, model, sampling) -> None:
    [rank] = engine(model, sampling=sampling)["routes"]
    rows = {row["op"]: row for row in rank["ops"] if row["op"] in FAMILIES[model]}
    assert {op: row["impl_id"] for op, row in rows.items()} == FAMILIES[model]
    assert all(row["calls"] > 0 for row in rows.values()), rows
    norms = [row["bound"] for op, row in rows.items() if "norm" in op]
    assert norms == [LAYERS_BOUND[model]] * 2
