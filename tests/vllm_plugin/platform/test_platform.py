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
    assert answer["passes"] == ["eliminate_noops"]


SENTENCE = "ValueError: vllm_fl's platform for cuda does not serve "
ELSEWHERE = "use a vLLM with its compiled extension, or the vendor's own platform plugin"


def test_attention_is_tritons_and_one_with_kernels_is_refused_by_name(answer) -> None:
    assert answer["attention"].endswith("TritonAttentionBackend")
    assert answer["flash"] == (
        f"{SENTENCE}attention by FLASH_ATTN: it needs kernels of vLLM's compiled extension or "
        "packages for vLLM's own platforms; use TRITON_ATTN, which is what is chosen where "
        "nothing is"
    )


def test_a_layer_that_tritons_attention_cannot_serve_is_refused_with_the_reason(answer) -> None:
    text = f"{SENTENCE}this model's attention: TRITON_ATTN: %s not supported; {ELSEWHERE}"
    assert answer["attention, small heads"] == text % "head_size"
    assert answer["attention, cache"] == text % "kv_cache_dtype"


NO_KERNEL = "vllm_fl does not reach vLLM's function"
REFUSED = {
    "two devices": "more than one device (tensor, pipeline or data parallelism): vLLM captures "
    "graphs with the communicators of its own platforms only; use one device, or "
    + ELSEWHERE.removeprefix("use "),
    "lora on experts": "LoRA adapters on a mixture of experts: their tokens are sorted by "
    "moe_lora_align_block_size of vLLM's compiled extension; merge the adapter into the weights",
    "experts that nothing serves": f"mixtures of experts: nothing serves topk_softmax ({NO_KERNEL})"
    f", moe_align_block_size ({NO_KERNEL}), moe_sum ({NO_KERNEL}); {ELSEWHERE}",
    "quantized": "weights quantized as 'fp8': the kernels are in vLLM's compiled extension, and "
    f"are chosen on its own platforms; load unquantized weights, or {ELSEWHERE}",
    "latent attention": "multi-head latent attention (MLA): its cache is written and gathered by "
    f"kernels of vLLM's compiled extension; {ELSEWHERE}",
    "mamba": "MambaForCausalLM: it calls selective_scan_fwd, Mamba's scan, of vLLM's compiled "
    f"extension; {ELSEWHERE}",
    "encoder and decoder on vLLM 0.25": "encoder-decoder models: this vLLM refuses two attention "
    "layers of one index on a platform out of its tree; use vLLM 0.28 or later",
    "draft model on vLLM 0.25": "speculative decoding by a draft model: this vLLM refuses two "
    "attention layers of one index on a platform out of its tree; use ngram or eagle, or vLLM "
    "0.28 or later",
    "dflash": "speculative decoding by 'dflash': its draft model calls rms_norm and "
    "rotary_embedding of vLLM's compiled extension; use ngram, eagle or a draft model",
    "quantized draft": "a draft model's weights quantized as 'fp8': the kernels are in vLLM's "
    "compiled extension, and are chosen on its own platforms; load unquantized weights, or "
    + ELSEWHERE,
    "Mamba draft": "a draft model's MambaForCausalLM: it calls selective_scan_fwd, Mamba's scan, "
    f"of vLLM's compiled extension; {ELSEWHERE}",
    "minimax": "MiniMaxM3SparseForCausalLM: it calls fused_minimax_m3_qknorm_rope_kv_insert of "
    f"vLLM's compiled extension; {ELSEWHERE}",
    "kv connector": "a KV connector (transfer or offloading of the KV cache): its copies are "
    f"kernels of vLLM's compiled extension, or ask for vLLM's own platform; {ELSEWHERE}",
    "nvfp4 cache": "a KV cache of type 'nvfp4': vLLM's Triton attention has no such cache; use "
    "--kv-cache-dtype auto or fp8",
    "fp8 cache on an A100": "a KV cache of type 'fp8' on compute capability 8.0: Triton converts "
    "to FP8 from 8.9 on; use --kv-cache-dtype auto",
    "another device type": "devices of PyTorch's type 'musa': vLLM's own worker drives devices of "
    "type 'cuda' only; use the vendor's own platform plugin",
    "flex attention": "attention by FLEX_ATTENTION: it needs kernels of vLLM's compiled extension "
    "or packages for vLLM's own platforms; use TRITON_ATTN, which is what is chosen where nothing "
    "is",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_serve_is_refused_at_the_start_in_a_sentence(answer, what) -> None:
    assert answer["refused"][what] == SENTENCE + REFUSED[what]


def test_a_chip_without_bfloat16_falls_back_to_float16(answer) -> None:
    assert answer["dtypes"] == {"7.5": "torch.float16", "9.0": "torch.bfloat16"}


def test_nothing_else_is_refused(answer) -> None:
    assert set(answer["refused"]) == {*REFUSED, "data parallelism", "two at once"}
    assert answer["served"] == [
        "lora",
        "experts",
        "bitsandbytes",
        "encoder and decoder",
        "ngram",
        "eagle",
        "draft_model",
        "plain draft",
        "fp8 cache",
        "offloaded weights",
    ]
    assert answer["refused"]["two at once"].splitlines() == [
        SENTENCE + REFUSED["two devices"],
        (SENTENCE + REFUSED["quantized"]).removeprefix("ValueError: "),
    ]


def test_sleep_mode_is_refused_by_vllm_itself(answer) -> None:
    assert "Sleep mode is not supported on current platform" in answer["sleep"]


def test_lora_has_vllms_triton_kernels_and_layers_may_share_an_index(answer) -> None:
    assert answer["lora"] == "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
    assert answer["two layers of one index"] == "None"


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'_OpNamespace' '_moe_C' object has no attribute 'topk_sigmoid'"),
        NotImplementedError("Could not run '_C::silu_and_mul' with arguments from the 'CUDA'"),
        RuntimeError("InductorError: AttributeError: '_OpNamespace' '_C' object has no attribute"),
        NotImplementedError(),
    ],
)
def test_a_kernel_that_is_missing_all_the_same_is_named_for_what_it_is(error) -> None:
    from vllm_fl.vllm_plugin.explained import explained

    with (
        pytest.raises(
            RuntimeError, match="vllm_fl's platform cannot serve this model: loading"
        ) as caught,
        explained("loading the model"),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).endswith(ELSEWHERE)


def test_other_errors_stay_what_they_are() -> None:
    from vllm_fl.vllm_plugin.explained import explained

    with pytest.raises(AttributeError, match="no attribute 'weight'"), explained("loading"):
        raise AttributeError("'Linear' object has no attribute 'weight'")


def test_the_stand_ins_are_listed_and_let_vllms_passes_be_imported(answer) -> None:
    assert "_C::rotary_embedding (schema)" in answer["shims"]
    assert "_C::weak_ref_tensor" in answer["shims"]
    assert answer["rotary"].startswith("_C::rotary_embedding(Tensor positions, Tensor")


def test_vllms_passes_meet_an_operator_that_writes_into_its_arguments(answer) -> None:
    assert answer["functionalized"] == "None"


STAND_INS = (
    "schemas of _C",
    "_C::weak_ref_tensor",
    "get_accelerator_view_from_cpu_tensor",
    "Triton's experts",
)


def test_a_stand_in_is_needed_and_once_there_is_a_configuration_in_place(answer) -> None:
    pool = {"the worker's memory pool": "in place"}
    assert answer["before"] == dict.fromkeys(STAND_INS, "needed") | pool
    assert answer["after"] == dict.fromkeys(STAND_INS, "in place") | pool


def test_what_vllms_extension_has_needs_no_stand_in(monkeypatch) -> None:
    monkeypatch.setattr(shims, "_is_real", lambda name: True)
    told = {shim["name"]: (shim["state"], shim["reason"]) for shim in shims.survey("x", ours=True)}
    assert told["schemas of _C"] == ("not needed", "vLLM's extension has them")
    assert told["_C::weak_ref_tensor"] == ("not needed", "vLLM's extension has it")


def test_on_vllms_own_platform_nothing_is_needed() -> None:
    told = shims.survey("vllm.platforms.cuda.NvmlCudaPlatform", ours=False)
    assert {(shim["state"], shim["reason"]) for shim in told} == {
        ("not needed", "vLLM's platform here is vllm.platforms.cuda.NvmlCudaPlatform")
    }


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


def test_a_chip_may_be_named_by_its_uuid(answer) -> None:
    assert answer["name of GPU-8b4a1c1e-0000-0000-0000-000000000000"] == "NVIDIA A100"
    assert answer["name of GPU-unknown"] == (
        "ValueError: vllm_fl's platform for cuda: CUDA_VISIBLE_DEVICES has to name an index or the "
        "whole UUID of a chip of this machine, found 'GPU-unknown'; name its index"
    )
    with pytest.raises(ValueError, match="MUSA_VISIBLE_DEVICES has to name an index, found 'a'"):
        device_queries.physical_index(device_of("mthreads"), "a", "MUSA_VISIBLE_DEVICES")
    assert device_queries.physical_index(device_of("mthreads"), "3", "MUSA_VISIBLE_DEVICES") == 3


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
