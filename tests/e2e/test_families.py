# SPDX-License-Identifier: Apache-2.0
"""Families of models with small random weights: in float32 the plugin changes no greedy token,
and the route table shows what serves each op of the family."""

import pytest

from tests.native import CPU_IMPL, CPU_NAMESPACE, NATIVE

pytestmark = pytest.mark.e2e

FUSED = "fused_qk_norm_rope"
PART = f"part of {FUSED}"
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
    rows = [row for row in rank["ops"] if row["op"] in FAMILIES[model]]
    assert {row["op"]: row["impl_id"] for row in rows} == FAMILIES[model]
    assert all(row["calls"] > 0 for row in rows if row["reason"] != PART), rows
    for norm in (op for op in FAMILIES[model] if "norm" in op):
        bound = [row["bound"] for row in rows if row["op"] == norm]
        assert sum(bound) == LAYERS_BOUND[model]


QWEN3 = [pytest.mark.extended, pytest.mark.skipif(not NATIVE, reason="vLLM has no kernel for CPUs")]


@pytest.mark.parametrize("model", [pytest.param("tiny", marks=QWEN3, id="tiny_qwen3")])
def test_norms_and_rope_of_qwen3_are_one_kernel_that_changes_no_token(
    engine, model, sampling
) -> None:
    ours = engine(model, sampling=sampling)
    apart = engine(model, {"VLLM_FL_PER_OP": f"{FUSED}=native"}, sampling=sampling)
    stock = engine.stock(model, sampling=sampling)
    assert ours["tokens"] == apart["tokens"] == stock["tokens"]
    kernel = f"{CPU_NAMESPACE}::{FUSED}"
    assert kernel in ours["operators"]
    assert kernel not in apart["operators"]
    assert f"{CPU_NAMESPACE}::rotary_embedding" in apart["operators"]
    assert f"{CPU_NAMESPACE}::rotary_embedding" not in ours["operators"]
    [rank], [other] = ours["routes"], apart["routes"]
    found = [(r["op"], r["impl_id"], r["bound"]) for r in rank["ops"] if r["reason"] == PART]
    assert found == [("rms_norm", CPU_IMPL, 4), ("rotary_embedding", CPU_IMPL, 1)]
    calls = {r["op"]: r["calls"] for r in rank["ops"] if r["reason"] != PART}
    assert calls[FUSED] > 0 and calls[FUSED] % 2 == 0  # a call of each of the two layers a step
    assert calls["rms_norm"] < calls[FUSED]  # the first layer's input alone
    [row] = [r for r in other["ops"] if r["op"] == FUSED]
    assert (row["impl_id"], row["bound"], row["calls"]) == ("native", 2, 0)
    assert not [r for r in other["ops"] if r["reason"] == PART]
