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
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..backends.vendor.devices import detect, device_of
from ..dispatch.config import load_config
from ..dispatch.log import logger
from . import device_queries, shims
from .platform_choice import has_extension

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PlatformFL"]

_DEVICE = device_of(detect(load_config().platform).vendor)
_WORKER = "vllm_fl.vllm_plugin.worker.Worker"
_EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C")
"""The names of vLLM's extensions in the releases."""

_ATTENTION = AttentionBackendEnum.TRITON_ATTN
"""The attention backend that needs no compiled extension. FLEX_ATTENTION writes the cache by a
kernel of it."""


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
        from .refusals import refusals

        found = refusals(
            vllm_config,
            cls.vendor,
            device_type=cls.device_type,
            capability=cls.get_device_capability,
        )
        asked = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        reasons = [*found, *([] if asked is None else cls._attention_refusals(asked, None))]
        if reasons:
            raise ValueError("\n".join(reasons))
        cls.import_kernels()
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _WORKER
        _leave_out_passes(vllm_config.compilation_config.pass_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The attention backend's path: Triton's.

        Raises:
            ValueError: another backend was asked for, or it cannot do what the layer needs.
        """
        backend = selected_backend or _ATTENTION
        reasons = cls._attention_refusals(backend, attn_selector_config)
        if reasons:
            raise ValueError("\n".join(reasons))
        return str(backend.get_path())

    @classmethod
    def _attention_refusals(cls, backend: Any, needed: Any) -> list[str]:
        """Why an attention backend cannot serve, or cannot serve this layer; a sentence each."""
        from .refusals import sentence

        if backend is not _ATTENTION:
            return [
                sentence(
                    cls.vendor,
                    f"attention by {backend.name}",
                    "it needs kernels of vLLM's compiled extension or packages for vLLM's own "
                    "platforms",
                    f"use {_ATTENTION.name}, which is what is chosen where nothing is",
                )
            ]
        if needed is None:
            return []
        lacking = backend.get_class().validate_configuration(
            device_capability=cls.get_device_capability(), **needed._asdict()
        )
        if not lacking:
            return []
        return [
            sentence(cls.vendor, "this model's attention", f"{backend.name}: {', '.join(lacking)}")
        ]

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Two attention layers may have one index: the runner is vLLM's own for GPUs."""

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA's kernels: Triton's, which vLLM uses on its own GPUs too."""
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

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

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes of models; the first is what `--dtype auto` falls back to."""
        capability = self.get_device_capability()
        if capability is not None and capability < (8, 0):
            return [torch.float16, torch.float32]
        return [torch.bfloat16, torch.float16, torch.float32]

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
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """The index in the machine of what an entry of the visible-devices variable names.

        Raises:
            ValueError: it names nothing here.
        """
        return device_queries.physical_index(_DEVICE, device_id, cls.device_control_env_var)

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


def _leave_out_passes(passes: Any) -> None:
    """Switch off vLLM's fusions: they match kernels of the extension, and are not even imported
    for platforms out of vLLM's tree (a NameError otherwise)."""
    on = [
        field.name
        for field in fields(passes)
        if field.name.startswith(("fuse_", "enable_")) and getattr(passes, field.name)
    ]
    for name in on:
        setattr(passes, name, False)
    if on:
        logger.info("vllm_fl's platform leaves out vLLM's passes %s", ", ".join(on))
