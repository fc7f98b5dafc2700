# SPDX-License-Identifier: Apache-2.0
"""PlatformFL without a GPU: NVML is faked, the process is real."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fl.backends.vendor.devices import device_of
from vllm_fl.vllm_plugin import device_queries, shims


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process saw that ran under the platform."""
    script = Path(__file__).with_name("dry_run.py")
    # No plugins: vLLM looks at the model in a process of its own, where NVML is not faked.
    environment = {**os.environ, "VLLM_FL_PLATFORM": "cuda", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("model"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_device_is_asked_through_nvml(answer) -> None:
    assert answer["platform"] == "PlatformFL"
    assert answer["name"] == "NVIDIA H200"
    assert answer["capability"] == [9, 0]
    assert answer["memory"] == 141 << 30
    assert answer["is_cuda"] is False  # so vLLM leaves its CUDA extension alone


def test_a_configuration_gets_the_worker_and_loses_the_passes_that_are_not_there(answer) -> None:
    assert answer["worker"] == "vllm_fl.vllm_plugin.worker.Worker"
    assert answer["norm_quant"] is False


def test_attention_is_tritons_and_one_with_kernels_is_refused_by_name(answer) -> None:
    assert answer["attention"].endswith("TritonAttentionBackend")
    assert answer["flash"] == (
        "ValueError: vllm_fl's platform for cuda has no attention backend FLASH_ATTN, which needs "
        "kernels that this vLLM lacks; available: TRITON_ATTN, FLEX_ATTENTION"
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("two devices", "more than one device (tensor, pipeline or data parallelism)"),
        ("lora", "LoRA adapters"),
        ("quantized", "weights quantized as 'fp8'"),
    ],
)
def test_what_it_cannot_serve_is_refused_at_the_start(answer, what, said) -> None:
    assert answer["refused"][what] == (
        f"ValueError: vllm_fl's platform for cuda does not serve {said} yet. It serves dense, "
        "unquantized models on one device. Use a vLLM with its compiled extension, or the "
        "vendor's own platform plugin."
    )


def test_the_stand_ins_are_listed_and_let_vllms_passes_be_imported(answer) -> None:
    assert "_C::rotary_embedding (schema)" in answer["shims"]
    assert "_C::weak_ref_tensor" in answer["shims"]
    assert answer["rotary"].startswith("_C::rotary_embedding(Tensor positions, Tensor")


def test_a_schema_is_no_kernel(answer) -> None:
    assert answer["called"].startswith("NotImplementedError")


def test_views_of_host_memory_are_hooked_where_they_are_imported_by_name(answer) -> None:
    name = "get_accelerator_view_from_cpu_tensor"
    assert f"vllm.v1.worker.gpu.buffer_utils.{name}" in answer["hooks"]
    assert "vllm.utils.torch_utils." + name in answer["hooks"]
    assert "needs pinned memory, found a pageable tensor of shape [3]" in answer["pageable"]


def test_a_weak_reference_sees_the_memory_with_its_sizes_and_strides() -> None:
    owner = torch.arange(24.0).reshape(4, 6)[1:, ::2]
    weak = shims.weak_ref(owner)
    assert weak.stride() == owner.stride() and torch.equal(weak, owner)
    owner.add_(1)
    assert torch.equal(weak, owner)
    assert weak.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


class Chips:
    """torch's module of a device type, of which the process sees one chip."""

    @staticmethod
    def get_device_name(index: int) -> str:
        return ["the chip that is seen"][index]


def test_torch_is_asked_for_the_chip_among_those_that_the_process_sees(monkeypatch) -> None:
    monkeypatch.setattr(torch, "musa", Chips, raising=False)
    device = device_of("mthreads")
    assert device_queries.name(device, 0, lambda index: 3) == "the chip that is seen"


def test_nvml_is_asked_for_the_chip_of_the_machine(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        device_queries, "_ask_nvml", lambda index, ask: asked.append(index) or "NVIDIA H200"
    )
    assert device_queries.name(device_of("cuda"), 0, lambda index: 3) == "NVIDIA H200"
    assert asked == [3]


def test_what_a_view_shows_stays_when_nobody_else_keeps_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)
    at = shims._at  # the CPU stands in for a device that sees the host's memory
    monkeypatch.setattr(shims, "_at", lambda a, _, like: at(a, torch.device("cpu"), like))
    owner = torch.full((1 << 24,), 7.0)
    view = shims.view_on_device(owner)
    del owner
    gc.collect()
    assert view[5].item() == 7.0
    assert shims.view_on_device(torch.empty(0, 3)).shape == (0, 3)
    shims._viewed.clear()
