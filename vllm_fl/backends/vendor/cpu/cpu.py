# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM's CPU kernels (torch.ops._C of a CPU build of vLLM)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ....dispatch.types import BackendImplKind
from ...base import Backend

__all__ = ["CpuBackend", "backend"]

KERNELS = (
    "fused_add_rms_norm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
)


class CpuBackend(Backend):
    """Kernels that vLLM compiles for CPUs but, on x86, mostly does not call itself."""

    impl_id = "vendor.cpu"
    kind = BackendImplKind.VENDOR
    vendor = "cpu"
    device_types = ("cpu",)
    requires = ("torch", "vllm")

    def is_available(self) -> bool | str:
        """Whether vLLM was installed with a compiled extension; nothing is imported."""
        spec = importlib.util.find_spec("vllm")
        folders = spec.submodule_search_locations if spec is not None else None
        if any(next(Path(folder).glob("_C*.so"), None) for folder in folders or ()):
            return True
        return "this vLLM has no compiled extension (_C*.so)"

    def load(self) -> None:
        """Load vLLM's extension and make sure that it is the CPU build."""
        import torch
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        missing = [name for name in KERNELS if not hasattr(torch.ops._C, name)]
        if missing:
            raise RuntimeError(f"vLLM's extension has no {', '.join(missing)}")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("_C::rms_norm", "CPU"):
            raise RuntimeError("vLLM's extension was not built for CPU")


backend = CpuBackend()
