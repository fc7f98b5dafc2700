# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: PlatformFL as on an NVIDIA GPU with an `empty` vLLM.

NVML is faked, and vLLM's extension is said to be absent. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
}


UUID = "GPU-8b4a1c1e-0000-0000-0000-000000000000"


def fake_nvml(capability: tuple[int, int]) -> None:
    import vllm.third_party

    nvml = types.ModuleType("vllm.third_party.pynvml")
    values: dict[str, Any] = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": {UUID: 1}.__getitem__,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: capability,
        "nvmlDeviceGetName": lambda handle: [b"NVIDIA H200", b"NVIDIA A100"][handle],
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=141 << 30),
    }
    for name, value in values.items():
        setattr(nvml, name, value)
    vllm.third_party.pynvml = nvml
    sys.modules[nvml.__name__] = nvml


def attempt(make: Any) -> str:
    try:
        return str(make())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def changes(config: Any) -> Iterator[tuple[str, list[Any]]]:
    """What is asked of the platform: a name, and what to patch."""
    from vllm.config.lora import LoRAConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_fl.vllm_plugin import functions, refusals

    def of(owner: Any, **values: Any) -> list[Any]:
        return [mock.patch.object(owner, name, value) for name, value in values.items()]

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    kind = type(model)
    moe = of(kind, is_moe=True)
    served = of(functions, FUNCTIONS=[types.SimpleNamespace(op=op) for op in refusals.ROUTING])
    lora = of(config, lora_config=LoRAConfig())
    drafts = {
        name: of(config, speculative_config=types.SimpleNamespace(method=name))
        for name in ("ngram", "eagle", "draft_model", "dflash")
    }
    old = of(refusals, _shares_indices=lambda: False)
    yield "two devices", of(parallel, world_size=2)
    yield "data parallelism", of(parallel, data_parallel_size=2)
    yield "lora", lora
    yield "lora on experts", [*lora, *moe, *served]
    yield "experts that nothing serves", [*moe, *of(functions, FUNCTIONS=())]
    yield "experts", [*moe, *served]
    yield "quantized", of(model, quantization="fp8")
    yield "bitsandbytes", of(model, quantization="bitsandbytes")
    yield "latent attention", of(kind, use_mla=True)
    yield "mamba", of(kind, architectures=["MambaForCausalLM"])
    both = of(model, is_encoder_decoder=True)
    yield "encoder and decoder", both
    yield "encoder and decoder on vLLM 0.25", [*old, *both]
    yield "draft model on vLLM 0.25", [*old, *drafts["draft_model"]]
    yield from drafts.items()
    plain = {"quantization": None, "use_mla": False, "architectures": ["LlamaForCausalLM"]}
    for name, change in (
        ("quantized draft", {"quantization": "fp8"}),
        ("Mamba draft", {"architectures": ["MambaForCausalLM"]}),
        ("plain draft", {}),
    ):
        draft = types.SimpleNamespace(**{**plain, **change})
        spoken = types.SimpleNamespace(method="eagle", draft_model_config=draft)
        yield name, of(config, speculative_config=spoken)
    yield "minimax", of(kind, architectures=["MiniMaxM3SparseForCausalLM"])
    yield "kv connector", of(config, kv_transfer_config=types.SimpleNamespace())
    yield "fp8 cache", of(cache, cache_dtype="fp8")
    yield "nvfp4 cache", of(cache, cache_dtype="nvfp4")
    attention = config.attention_config
    yield "flex attention", of(attention, backend=AttentionBackendEnum.FLEX_ATTENTION)
    yield "two at once", [*of(parallel, world_size=2), *of(model, quantization="fp8")]


def outcomes(config: Any, platform: Any) -> tuple[dict[str, str], list[str]]:
    """What is refused, with the words, and what is served."""
    refused, served = {}, []

    def check(name: str, patches: list[Any]) -> None:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            told = attempt(lambda: platform.check_and_update_config(config))
        if told == "None":
            served.append(name)
        else:
            refused[name] = told

    for name, patches in changes(config):
        check(name, patches)
    fp8 = mock.patch.object(config.cache_config, "cache_dtype", "fp8")
    fake_nvml((8, 0))
    check("fp8 cache on an A100", [fp8])
    fake_nvml((9, 0))
    musa = mock.patch.object(type(platform), "device_type", "musa")
    offload = types.SimpleNamespace(uva=types.SimpleNamespace(cpu_offload_gb=4))
    check("offloaded weights", [mock.patch.object(config, "offload_config", offload)])
    check("another device type", [musa])
    return refused, served


def writing_graph() -> Any:
    """A graph as vLLM's passes get it, with an operator that writes into its argument."""
    import torch
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    library = torch.library.Library("dry_run", "DEF")
    library.define("write(Tensor! x) -> ()")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    written = graph.call_function(auto_functionalized, (torch.ops.dry_run.write.default,), {"x": x})
    graph.output(written)
    return graph


def main(folder: str) -> None:
    fake_nvml((9, 0))
    from vllm_fl.vllm_plugin import platform_choice

    platform_choice.has_extension = lambda: False
    import vllm.platforms

    from vllm_fl.vllm_plugin import hooks, shims
    from vllm_fl.vllm_plugin import platform as ours

    vllm.platforms.current_platform = ours.PlatformFL()
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    Path(folder, "config.json").write_text(json.dumps(MODEL))

    def config(**options: Any) -> Any:
        settings = {"max_model_len": 256, "load_format": "dummy", "skip_tokenizer_init": True}
        return EngineArgs(model=folder, **settings, **options).create_engine_config()

    answer: dict[str, Any] = {
        "platform": type(current_platform).__name__,
        "name": current_platform.get_device_name(),
        "capability": list(current_platform.get_device_capability()),
        "memory": current_platform.get_device_total_memory(),
        "is_cuda": current_platform.is_cuda(),
        "old_gpu": attempt(lambda: current_platform.check_if_supports_dtype(torch.bfloat16)),
    }

    for entry in (UUID, "GPU-unknown"):
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": entry}):
            answer[f"name of {entry}"] = attempt(current_platform.get_device_name)

    def states() -> dict[str, str]:
        return {shim["name"]: shim["state"] for shim in shims.survey("PlatformFL", ours=True)}

    answer["dtypes"] = {}
    for capability in ((7, 5), (9, 0)):
        fake_nvml(capability)
        first = str(current_platform.supported_dtypes[0])
        answer["dtypes"][".".join(map(str, capability))] = first
    answer["before"] = states()
    made = config()
    answer["after"] = states()
    answer["worker"] = made.parallel_config.worker_cls
    answer["shims"] = [shim.name for shim in shims.installed()]
    answer["passes"] = sorted(
        field.name
        for field in fields(made.compilation_config.pass_config)
        if getattr(made.compilation_config.pass_config, field.name) is True
    )
    choose = current_platform.get_attn_backend_cls
    answer["attention"] = choose(None, None)
    for name, layer in (("small heads", {"head_size": 16}), ("cache", {"kv_cache_dtype": "nvfp4"})):
        usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": None}
        needed = AttentionSelectorConfig(**{**usual, "block_size": 16, **layer})
        answer[f"attention, {name}"] = attempt(lambda needed=needed: choose(None, needed))
    answer["flash"] = attempt(lambda: choose(AttentionBackendEnum.FLASH_ATTN, None))
    answer["lora"] = current_platform.get_punica_wrapper()
    answer["two layers of one index"] = attempt(current_platform.check_runner_kv_caches_multi_layer)
    answer["sleep"] = attempt(lambda: config(enable_sleep_mode=True))
    answer["refused"], answer["served"] = outcomes(made, current_platform)
    # What vLLM's passes name when they are imported: an AttributeError without the schemas.
    import vllm.compilation.passes.fusion.matcher_utils
    import vllm.compilation.passes.fusion.rms_quant_fusion
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

    # And what this one names when it meets an operator that writes into its arguments.
    answer["functionalized"] = attempt(lambda: FixFunctionalizationPass(made)(writing_graph()))
    answer["rotary"] = str(torch.ops._C.rotary_embedding.default._schema)
    answer["called"] = attempt(
        lambda: torch.ops._C.silu_and_mul(torch.zeros(1, 2), torch.zeros(1, 4))
    )
    import vllm.v1.worker.gpu.buffer_utils

    answer["hooks"] = [hook.name for hook in hooks.installed()]
    from vllm.v1.worker.gpu import buffer_utils

    answer["pageable"] = attempt(
        lambda: buffer_utils.get_accelerator_view_from_cpu_tensor(torch.zeros(3))
    )
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
