# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/platform_checks.py: what it says of what it finds; the engines need a GPU."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def checks():
    return importlib.import_module("platform_checks")


def result(tokens=((1, 2), (3, 4)), logprob=-1.0, others=()):
    return {
        "platform": "vllm_fl.vllm_plugin.platform.PlatformFL",
        "tokens": [list(each) for each in tokens],
        "prompt_logprobs": [[logprob, -2.0]],
        "compiled": {"vllm": ["vllm.attention.kernel"], "others": list(others)},
    }


def test_every_check_is_an_engine_with_something_to_say(checks) -> None:
    for name, check in checks.CHECKS.items():
        said = {"same", "mostly", "close", "compiles", "merge"} & set(check)
        assert said or name == "base", name
        assert check.get("to", "base") in checks.CHECKS


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [
        ("offload", ((1, 2), (3, 4)), "ok"),
        ("offload", ((1, 2), (3, 5)), "FAILED"),
        ("ngram", ((1, 2), (3, 5)), "ok"),
        ("ngram", ((1, 7), (9, 4)), "FAILED"),
    ],
)
def test_tokens_are_compared_with_the_bases(checks, name, tokens, said) -> None:
    found = {"base": result(), name: result(tokens)}
    assert checks.verdict(name, found)[0] == said


def test_log_probabilities_may_be_as_far_as_rounding_puts_them(checks) -> None:
    found = {
        "base": result(),
        "graph": result(logprob=-1.02),
        "fp8-cache": result(logprob=-1.3),
    }
    assert checks.verdict("fp8-cache", found) == (
        "ok",
        "2 of 2 sequences, d logprob 0.1500 (limit 0.1600)",
    )
    found["fp8-cache"] = result(logprob=-1.4)
    assert checks.verdict("fp8-cache", found)[0] == "FAILED"


def test_a_kernel_that_is_compiled_while_requests_wait_fails_unless_it_is_vllms(checks) -> None:
    found = {"warm-eager": result(), "cold": result()}
    assert checks.verdict("warm-eager", found)[0] == "ok"
    assert checks.verdict("cold", found)[0] == "FAILED"  # without warm-up there must be some
    found = {name: result(others=("gems.silu",)) for name in found}
    assert checks.verdict("warm-eager", found) == (
        "FAILED",
        "1 of others compiled while requests waited: gems.silu",
    )
    assert checks.verdict("cold", found)[0] == "ok"


def test_an_engine_that_did_not_start_is_a_failure_with_its_error(checks) -> None:
    assert checks.verdict("lora", {"lora": {"error": "no memory"}}) == ("FAILED", "no memory")


def test_compiled_kernels_are_told_by_whose_they_are(checks, monkeypatch) -> None:
    seen = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **told: seen.append(told))
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton", triton)
    compiled = checks.Compiled()
    for module, name in (
        ("vllm.v1.ops", "attention"),
        ("_generated", "silu"),
        ("_generated", "silu"),
    ):
        runtime.jit_post_compile_hook(fn=SimpleNamespace(module=module, name=name), key="k")
    assert compiled.told() == {"vllm": ["vllm.v1.ops.attention"], "others": ["_generated.silu"]}
    assert len(seen) == 3  # who hooked before is still called


def test_an_adapter_of_scale_zero_changes_nothing_and_its_names_are_pefts(checks) -> None:
    zero, one = checks.adapter_tensors(0.0), checks.adapter_tensors(1.0)
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in one
    assert all(not t.any() for name, t in zero.items() if ".lora_B." in name)
    assert all(t.any() for t in one.values())


def test_a_weight_has_its_seed_with_loras_wrapper_and_without(checks) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(3, 3, bias=False)

    plain, wrapped = torch.nn.Module(), torch.nn.Module()
    plain.o_proj, wrapped.o_proj = torch.nn.Linear(3, 3, bias=False), Wrapped()
    for module in (plain, wrapped):
        checks.seed_weights(checks.Unwrapped(module))
    assert torch.equal(plain.o_proj.weight, wrapped.o_proj.base_layer.weight)
