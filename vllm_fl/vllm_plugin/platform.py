# SPDX-License-Identifier: Apache-2.0
"""PlatformFL: a vLLM platform made of device facts, for chips and builds that vLLM has none for.

It is imported while `import vllm` is still running, so of vLLM only what `vllm.platforms` itself
has imported by then is imported at the top. It is no subclass of CudaPlatform: `is_cuda()` is
False, by which vLLM itself leaves its CUDA extension alone; the layers' forwards are native, and
vllm_fl's dispatch serves them as everywhere.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..backends.vendor.devices import detect, device_of
from ..dispatch.config import load_config
from . import device_queries, shims
from .platform_choice import has_extension

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PlatformFL", "refusal"]

_DEVICE = device_of(detect(load_config().platform).vendor)
_WORKER = "vllm_fl.vllm_plugin.worker.Worker"
_EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C")
"""The names of vLLM's extensions in the releases."""

_ATTENTION = (AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLEX_ATTENTION)
"""The attention backends in vLLM that need no compiled extension."""


def refusal(config: VllmConfig) -> str | None:
    """Why this platform cannot serve a configuration, or None."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "more than one device (tensor, pipeline or data parallelism)"
    if config.lora_config is not None:
        return "LoRA adapters"
    if model is None:
        return None
    if model.quantization is not None:
        return f"weights quantized as '{model.quantization}'"
    if model.use_mla:
        return "multi-head latent attention (MLA)"
    if model.is_moe:
        return "mixtures of experts"
    return None


class PlatformFL(Platform):
    """A platform for one device type, by the facts of the vendor's row in the device table."""

    _enum = PlatformEnum.OOT
    # vLLM builds torch device strings from the name too, so both are torch's device type.
    device_name: str = _DEVICE.device_type
    device_type: str = _DEVICE.device_type
    vendor: ClassVar[str] = _DEVICE.name
    dispatch_key: str = _DEVICE.dispatch_key
    dist_backend: str = _DEVICE.communication
    ray_device_key: str = "GPU" if _DEVICE.device_type == "cuda" else ""
    device_control_env_var: str = next(
        iter(_DEVICE.visible_devices), Platform.device_control_env_var
    )

    # ------------------------------------------------------------------- configuration

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's extensions where they were built after all; what is missing stands in `shims`."""
        if has_extension():
            for name in _EXTENSIONS:
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"vllm.{name}")
        shims.install()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Choose the worker, and what needs kernels that are not here.

        Raises:
            ValueError: the configuration needs what this platform does not have.
        """
        why = refusal(vllm_config)
        if why is not None:
            raise ValueError(
                f"vllm_fl's platform for {cls.vendor} does not serve {why} yet. It serves dense, "
                "unquantized models on one device. Use a vLLM with its compiled extension, or the "
                "vendor's own platform plugin."
            )
        cls.import_kernels()
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _WORKER
        passes = vllm_config.compilation_config.pass_config
        # Their passes are not imported for platforms out of vLLM's tree: a NameError otherwise.
        for name in ("fuse_norm_quant", "fuse_act_quant"):
            if hasattr(passes, name):
                setattr(passes, name, False)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The attention backend's path; Triton unless another one without kernels was asked for.

        Raises:
            ValueError: a backend that needs vLLM's compiled extension was asked for.
        """
        backend = selected_backend or AttentionBackendEnum.TRITON_ATTN
        if backend not in _ATTENTION:
            names = ", ".join(b.name for b in _ATTENTION)
            raise ValueError(
                f"vllm_fl's platform for {cls.vendor} has no attention backend {backend.name}, "
                f"which needs kernels that this vLLM lacks; available: {names}"
            )
        return str(backend.get_path())

    # ------------------------------------------------------------------- abilities

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is one node of the graph."""
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Layers with different attention may share the cache."""
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Whether torch has graphs for the device."""
        return hasattr(getattr(torch, cls.device_type, None), "CUDAGraph")

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """vLLM's wrapper of torch.cuda graphs."""
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Collectives are nodes of the graph."""
        return True

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuse a dtype that the device does not compute in.

        Raises:
            ValueError: naming the dtype and what to do.
        """
        capability = cls.get_device_capability()
        if dtype is torch.bfloat16 and capability is not None and capability < (8, 0):
            raise ValueError(
                f"{cls.get_device_name()} (compute capability {capability.as_version_str()}) has "
                "no bfloat16, which needs 8.0; use --dtype half"
            )

    # ------------------------------------------------------------------- the device

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """CUDA's compute capability, or None on other devices; CUDA is not initialised."""
        found = device_queries.capability(_DEVICE, device_id, cls.device_id_to_physical_device_id)
        return None if found is None else DeviceCapability(*found)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The device's name."""
        return device_queries.name(_DEVICE, device_id, cls.device_id_to_physical_device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """The device's memory in bytes."""
        return device_queries.memory(_DEVICE, device_id, cls.device_id_to_physical_device_id)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make a device the current one."""
        getattr(torch, cls.device_type).set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all devices."""
        getattr(torch, cls.device_type).manual_seed_all(seed)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """The most memory in use since the last call, in bytes."""
        module = getattr(torch, cls.device_type)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
        return float(module.max_memory_allocated(device))

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Multiprocessors; 1 where the device does not say."""
        properties = getattr(torch, cls.device_type).get_device_properties(device_id)
        return int(getattr(properties, "multi_processor_count", 1))

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        """Whether it shares the host's memory."""
        properties = getattr(torch, cls.device_type).get_device_properties(device_id)
        return bool(getattr(properties, "is_integrated", False))
