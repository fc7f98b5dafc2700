# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernels run, and in float32 they change no greedy token."""

import pytest

from tests.native import CPU_NAMESPACE

pytestmark = pytest.mark.e2e

KERNELS = {f"{CPU_NAMESPACE}::rms_norm", f"{CPU_NAMESPACE}::fused_add_rms_norm"}


@pytest.fixture(params=["demo", pytest.param("tiny", marks=pytest.mark.extended)])
def model(request: pytest.FixtureRequest) -> str:
    """The demo's Llama, and a Qwen3, whose norms over heads get slices."""
    return request.param


def test_the_cpus_first_kernels_run_with_the_plugin_alone(engine, model) -> None:
    assert set(engine(model)["operators"]) >= KERNELS
    assert not KERNELS & set(engine.stock(model)["operators"])


@pytest.mark.parametrize("changes", [{}, {"VLLM_FL_PREFER": "reference"}], ids=["default", "ref"])
def test_float32_tokens_equal_those_of_vllm_alone(engine, model, changes) -> None:
    ours, theirs = engine(model, changes)["tokens"], engine.stock(model)["tokens"]
    assert [len(tokens) for tokens in theirs] == [64] * 8
    assert len({tuple(tokens) for tokens in theirs}) == 8  # they depend on the prompt
    assert ours == theirs


def test_the_demo_model_answers_the_question(engine) -> None:
    assert "The capital of France is Paris." in engine("demo")["texts"][0]


def test_the_choice_is_pinned_once_the_model_is_loaded(engine) -> None:
    assert [rank["frozen"] for rank in engine("demo")["routes"]] == [True]
