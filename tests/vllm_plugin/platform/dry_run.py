# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: PlatformFL as on an NVIDIA GPU with an `empty` vLLM.

NVML is faked, and vLLM's extension is said to be absent. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

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


def fake_nvml(capability: tuple[int, int]) -> None:
    import vllm.third_party

    nvml = types.ModuleType("vllm.third_party.pynvml")
    values: dict[str, Any] = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: capability,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
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


def main(folder: str) -> None:
    fake_nvml((9, 0))
    from vllm_fl.vllm_plugin import platform_choice

    platform_choice.has_extension = lambda: False
    import vllm.platforms

    from vllm_fl.vllm_plugin import hooks, shims
    from vllm_fl.vllm_plugin import platform as ours

    vllm.platforms.current_platform = ours.PlatformFL()
    import torch
    from vllm.config.lora import LoRAConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

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
    made = config()
    answer["worker"] = made.parallel_config.worker_cls
    answer["norm_quant"] = made.compilation_config.pass_config.fuse_norm_quant
    answer["shims"] = [shim.name for shim in shims.installed()]
    choose = current_platform.get_attn_backend_cls
    answer["attention"] = choose(None, None)
    answer["flash"] = attempt(lambda: choose(AttentionBackendEnum.FLASH_ATTN, None))
    check = current_platform.check_and_update_config
    refused = {}
    made.parallel_config.world_size = 2
    refused["two devices"] = attempt(lambda: check(made))
    made.parallel_config.world_size = 1
    made.lora_config = LoRAConfig()
    refused["lora"] = attempt(lambda: check(made))
    made.lora_config = None
    made.model_config.quantization = "fp8"
    refused["quantized"] = attempt(lambda: check(made))
    made.model_config.quantization = None
    answer["refused"] = refused
    # What vLLM's passes name when they are imported: an AttributeError without the schemas.
    import vllm.compilation.passes.fusion.matcher_utils
    import vllm.compilation.passes.fusion.rms_quant_fusion
    import vllm.compilation.passes.utility.fix_functionalization

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
