# SPDX-License-Identifier: Apache-2.0
"""bfloat16: the plugin moves vLLM's results less than vLLM's own compiled mode does.

The measure is the mean absolute difference of the log-probabilities of the prompts' tokens,
each from vLLM alone in eager mode. Show the numbers with `pytest -s`.
"""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]


def mean_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = [
        pair for prompts in zip(ours, theirs, strict=True) for pair in zip(*prompts, strict=True)
    ]
    assert len(pairs) > 300
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("model", ["demo", "tiny"])
def test_bfloat16_logprobs_move_no_more_than_by_compiling(engine, record_property, model) -> None:
    settings = {"dtype": "bfloat16"}
    eager = engine.stock(model, **settings)["logprobs"]
    by_plugin = mean_difference(engine(model, **settings)["logprobs"], eager)
    compiled = engine.stock(model, **settings, enforce_eager=False)["logprobs"]
    by_compiling = mean_difference(compiled, eager)
    record_property("by_plugin", by_plugin)
    record_property("by_compiling", by_compiling)
    print(
        f"\n{model}, bfloat16, mean |difference| of prompt log-probabilities from eager vLLM: "
        f"plugin {by_plugin:.5f}, compiled vLLM {by_compiling:.5f}"
    )
    assert 0 < by_plugin <= by_compiling
