# SPDX-License-Identifier: Apache-2.0
"""On a platform out of vLLM's tree, layers of experts get vLLM's Triton experts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.vllm_plugin import hooks, platform_experts


@pytest.fixture
def method() -> Any:
    """The module whose layers choose their experts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(platform_experts.METHOD)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)


def moe_config(activation: str = "silu", backend: str = "auto") -> Any:
    """As much of a FusedMoEConfig as is looked at."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return SimpleNamespace(activation=MoEActivation(activation), moe_backend=backend)


def out_of_tree(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM answers on such a platform."""
    oracle = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized"
    ).UnquantizedMoeBackend
    monkeypatch.setattr(method, "select_unquantized_moe_backend", lambda config: (oracle.OOT, None))


def test_the_layers_choose_tritons_experts(method, monkeypatch, triton) -> None:
    out_of_tree(method, monkeypatch)
    platform_experts.await_method()
    backend, experts = method.select_unquantized_moe_backend(moe_config())
    assert (backend.name, experts.__name__) == ("TRITON", "TritonExperts")
    [hook] = hooks.installed()
    assert hook.name == f"{platform_experts.METHOD}.select_unquantized_moe_backend"
    hooks.uninstall_all()
    assert method.select_unquantized_moe_backend(moe_config())[1] is None


def test_a_platform_of_vllms_own_keeps_its_experts(method) -> None:
    platform_experts.await_method()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            backend, _ = method.select_unquantized_moe_backend(moe_config())
        except AttributeError:  # later releases ask the configuration for more, on the CPU
            return
    assert backend.name == "CPU"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"backend": "flashinfer_cutlass"},
            "experts by 'flashinfer_cutlass': they need packages for vLLM's own platforms; use "
            "--moe-backend triton, which is what is chosen where nothing is",
        ),
        (
            {"activation": "relu2"},
            "experts with the activation 'relu2': vLLM's Triton experts do not have it; use a vLLM "
            "with its compiled extension, or the vendor's own platform plugin",
        ),
    ],
)
def test_what_the_experts_do_not_have_is_refused_in_a_sentence(triton, changes, said) -> None:
    with pytest.raises(ValueError) as caught:
        platform_experts.triton_experts(moe_config(**changes))
    assert str(caught.value) == f"vllm_fl's platform for cpu does not serve {said}"


def test_an_activation_that_is_a_kernel_of_the_extension_is_refused(triton) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if "situ" not in {activation.value for activation in MoEActivation}:
        pytest.skip("this vLLM has no activation 'situ'")
    with pytest.raises(ValueError, match="leave it to situ_and_mul of vLLM's compiled extension"):
        platform_experts.triton_experts(moe_config(activation="situ"))


def test_without_triton_there_are_none(monkeypatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    with pytest.raises(ValueError, match="there is no Triton for this chip here; install the"):
        platform_experts.triton_experts(moe_config())


def test_a_layer_of_experts_runs_on_the_platform_without_vllms_extension(tmp_path: Path) -> None:
    script = Path(__file__).with_name("experts_dry_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "VLLM_FL_PLATFORM": "cuda", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["experts"] == "TritonExperts"
    assert found["off"] < 1e-5 < found["size"]
    assert found["calls"] == {
        op: ["reference.torch", 1]
        for op in ("topk_softmax", "moe_align_block_size", "silu_and_mul", "moe_sum")
    }
