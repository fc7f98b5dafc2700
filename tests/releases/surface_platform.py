# SPDX-License-Identifier: Apache-2.0
"""What vllm_fl's own platform, and its stand-ins for vLLM's extension, rely on."""

from __future__ import annotations

from .checks import Does, Entry, Equals, Has, Kind, Takes

__all__ = ["OWN_PLATFORM"]

INTERFACE = "vllm.platforms.interface"
BACKENDS = "vllm.v1.attention.backends.registry:AttentionBackendEnum"
VIEW = "get_accelerator_view_from_cpu_tensor"

OWN_PLATFORM = (
    Entry(
        "vllm.plugins:PLATFORM_PLUGINS_GROUP",
        "the group of the platform's entry point",
        (Equals("vllm.platform_plugins"),),
    ),
    Entry("vllm.envs:VLLM_PLUGINS", "whether a platform of another package may be chosen"),
    Entry(
        f"{INTERFACE}:Platform",
        "the base class of ours",
        (Has(("device_control_env_var", "get_device_name", "device_type")),),
    ),
    Entry(f"{INTERFACE}:Platform.device_control_env_var", "which devices are visible"),
    Entry("vllm.platforms:current_platform.get_device_name", "the product, for shipped policies"),
    Entry(f"{INTERFACE}:DeviceCapability", "what ours answers", (Kind("class"),)),
    Entry(f"{INTERFACE}:PlatformEnum", "what ours is", (Has(("OOT",)),)),
    Entry(f"{INTERFACE}:PlatformEnum.OOT", "what ours is"),
    Entry("vllm.utils.import_utils:import_pynvml", "asks NVML for devices", (Takes(""),)),
    Entry(
        "vllm.compilation.cuda_graph:CUDAGraphWrapper",
        "named as the wrapper of static graphs",
        (Kind("class"),),
    ),
    Entry(f"{BACKENDS}.TRITON_ATTN", "the attention backend without compiled kernels"),
    Entry(
        "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
        "says what an attention backend cannot do",
        (Kind("function"),),
    ),
    Entry(
        f"{INTERFACE}:Platform.get_punica_wrapper",
        "asks for LoRA's kernels",
        (Takes(""),),
    ),
    Entry(
        "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
        "LoRA's kernels, which are Triton's",
        (Kind("class"),),
    ),
    *(
        Entry(
            f"vllm.v1.worker.gpu_worker:Worker.{name}",
            "runs the model before the first request",
            (Kind("function"),),
        )
        for name in (
            "load_model",
            "determine_available_memory",
            "initialize_from_config",
            "compile_or_warm_up_model",
            "_maybe_get_memory_pool_context",
        )
    ),
    *(
        Entry(
            f"{module}:{VIEW}",
            "has the view of host memory under its own name, where a stand-in is put",
            (Kind("function"),),
        )
        for module in (
            "vllm.utils.torch_utils",
            "vllm.v1.worker.gpu.buffer_utils",
            "vllm.model_executor.model_loader.utils",
            "vllm.model_executor.offloader.uva",
        )
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "select_unquantized_moe_backend",
        "the layers' own name for the choice of experts, where ours is put",
        (Takes("moe_config"), Does("return UnquantizedMoeBackend.OOT, None")),
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend",
        "vLLM's names of the experts",
        (Has(("OOT", "TRITON")),),
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend.TRITON",
        "vLLM's name of the experts that PlatformFL chooses",
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts",
        "the experts that PlatformFL chooses",
        (Kind("class"),),
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts._supports_activation",
        "which activations they have",
        (Takes("activation"),),
    ),
    Entry(
        "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts.moe_sum",
        "how they sum",
        (Does("ops.moe_sum(input, output)"),),
    ),
)
