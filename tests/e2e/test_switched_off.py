# SPDX-License-Identifier: Apache-2.0
"""VLLM_FL_ENABLED=0: vLLM is as it is without the plugin."""

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture
def off(engine):
    return engine("demo", {"VLLM_FL_ENABLED": "0"})


@pytest.fixture
def stock(engine):
    return engine.stock("demo")


def test_every_module_has_the_same_class_and_calls_the_same_forward(off, stock) -> None:
    forwards = {forward for _, _, forward in stock["layers"] if forward is not None}
    assert any(forward.startswith("vllm.") for forward in forwards)
    assert off["layers"] == stock["layers"]


def test_the_layer_registries_and_constructors_are_the_same(off, stock) -> None:
    assert stock["vllm"]["op_registry"]["rms_norm"].endswith(".RMSNorm")
    for name in ("op_registry", "op_registry_oot", "constructors"):
        assert off["vllm"][name] == stock["vllm"][name]


def test_nothing_of_vllm_is_hooked_and_no_backend_is_imported(off) -> None:
    assert off["vllm"]["hooks"] == []
    assert off["vllm"]["finders"] == []
    assert not off["vllm"]["answers_rpc"]
    imported = off["vllm"]["imported"]
    assert not [name for name in imported if name.startswith(("vllm_fl.backends", "vllm_fl.ops"))]
    assert {name for name in imported if name.startswith("vllm_fl.vllm_plugin")} == {
        "vllm_fl.vllm_plugin",
        "vllm_fl.vllm_plugin.hooks",
        "vllm_fl.vllm_plugin.platform_choice",  # vLLM asks whether there is a platform: no
        "vllm_fl.vllm_plugin.plugin",
    }


def test_the_tokens_are_the_same(off, stock) -> None:
    assert off["tokens"] == stock["tokens"]


def test_the_plugin_changes_no_class_and_no_registry_when_it_is_on(engine, stock) -> None:
    on = engine("demo")
    assert [layer[:2] for layer in on["layers"]] == [layer[:2] for layer in stock["layers"]]
    for name in ("op_registry", "op_registry_oot"):
        assert on["vllm"][name] == stock["vllm"][name]
    assert on["vllm"]["constructors"] != stock["vllm"]["constructors"]  # the probe sees hooks
    assert len(on["vllm"]["hooks"]) >= 6
