# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM's CUDA kernels (its compiled extension of a CUDA or ROCm build)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ....dispatch.types import BackendImplKind
from ...base import Backend

__all__ = ["CudaBackend", "backend"]


class CudaBackend(Backend):
    """The kernels that vLLM itself calls on NVIDIA and AMD.

    Args:
        kernels: those that its functions call, as "_C.rms_norm".
    """

    impl_id = "vendor.cuda"
    kind = BackendImplKind.VENDOR
    vendor = "cuda"
    device_types = ("cuda",)
    vendors = ("cuda", "rocm")
    requires = ("torch", "vllm")

    def __init__(self, kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.kernels = kernels

    def calling(self, *kernels: str) -> CudaBackend:
        """This backend, for functions that call these kernels: where a build lacks one of them,
        those functions are unavailable, and no others."""
        part = CudaBackend(kernels)
        part._implementations = self._implementations
        return part

    def is_available(self) -> bool | str:
        """Whether vLLM was installed with a compiled extension; nothing is imported."""
        spec = importlib.util.find_spec("vllm")
        folders = spec.submodule_search_locations if spec is not None else None
        if any(next(Path(folder).glob("_C*.so"), None) for folder in folders or ()):
            return True
        return "this vLLM has no compiled extension (_C*.so): an 'empty' build"

    def load(self) -> None:
        """Load vLLM's extensions and make sure that they have the kernels, for CUDA."""
        import torch
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        missing = []
        for name in self.kernels:
            namespace, _, op = name.partition(".")
            if not hasattr(getattr(torch.ops, namespace), op):
                missing.append(name)
            elif not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op}", "CUDA"):
                missing.append(f"{name} for CUDA")
        if missing:
            raise RuntimeError(f"vLLM's extension has no {', '.join(missing)}")


backend = CudaBackend()
