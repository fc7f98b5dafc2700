# SPDX-License-Identifier: Apache-2.0
"""bfloat16: the plugin is nearer to eager vLLM than compiled vLLM is, and as close to float32.

The measure is the mean absolute difference of the log-probabilities of the prompts' tokens.
Show the numbers with `pytest -s`.

Our own CPU kernels round where PyTorch does. vLLM's, which serve where ours were not built, round
otherwise, and between two bfloat16 runs that differ in any operator the measure saturates: 0.042 to
0.045 on the demo's model for one, 0.044 for all four.
"""

import random
from pydoc_data import topics  # prose of many kinds that every Python brings along

import pytest

from tests.native import NATIVE

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

LONG_TEXTS = [text[:500] for _, text in sorted(topics.topics.items()) if len(text) > 1000][:24]
LONG_IDS = [random.Random(seed).choices(range(1024), k=128) for seed in range(24)]

NOISE = 1.1
"""The ratio of two means over 2,400 tokens is known to 5 %. Plugin to eager vLLM, each from
float32: 0.96 (demo), 1.00 (tiny)."""
FARTHEST = 1.0 if NATIVE else 1.25
"""Plugin to compiled vLLM, each from eager vLLM: with our kernels 0.80 (demo) and 0.05 (tiny), with
vLLM's 1.04 and 1.12."""


def mean_difference(
    ours: dict[str, list[list[float]]], theirs: dict[str, list[list[float]]]
) -> float:
    differences = [
        abs(a - b)
        for prompts in zip(ours["logprobs"], theirs["logprobs"], strict=True)
        for a, b in zip(*prompts, strict=True)
    ]
    assert len(differences) > 2400
    return sum(differences) / len(differences)


@pytest.mark.parametrize(
    ("model", "prompts"), [("demo", LONG_TEXTS), ("tiny", LONG_IDS)], ids=["demo", "tiny"]
)
def test_bfloat16_logprobs_are_as_close_to_float32_as_those_of_vllm_alone(
    engine, record_property, model, prompts
) -> None:
    usual = {"prompts": prompts, "max_tokens": 1, "max_model_len": 512}
    half = {**usual, "dtype": "bfloat16"}
    exact = engine.stock(model, **usual)
    eager = engine.stock(model, **half)
    compiled = engine.stock(model, **half, enforce_eager=False)
    plugin = engine(model, **half)
    means = {
        "plugin from eager vLLM": mean_difference(plugin, eager),
        "compiled vLLM from eager vLLM": mean_difference(compiled, eager),
        "plugin from float32": mean_difference(plugin, exact),
        "eager vLLM from float32": mean_difference(eager, exact),
        "compiled vLLM from float32": mean_difference(compiled, exact),
    }
    print(f"\n{model}, bfloat16, mean |difference| of prompt log-probabilities:")
    for name, mean in means.items():
        record_property(name, mean)
        print(f"  {name}: {mean:.5f}")
    assert means["plugin from eager vLLM"] > 0
    assert means["plugin from float32"] <= NOISE * means["eager vLLM from float32"]
    assert means["plugin from eager vLLM"] <= FARTHEST * means["compiled vLLM from eager vLLM"]
