# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM's CPU kernels (torch.ops._C of a CPU build of vLLM)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ....dispatch.types import BackendImplKind
from ...base import Backend

__all__ = ["CpuBackend", "backend"]


class CpuBackend(Backend):
    """Kernels that vLLM compiles for CPUs but, on x86, mostly does not call itself.

    Args:
        kernels: those that its functions call, of torch.ops._C.
    """

    impl_id = "vendor.cpu"
    kind = BackendImplKind.VENDOR
    vendor = "cpu"
    device_types = ("cpu",)
    requires = ("torch", "vllm")

    def __init__(self, kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.kernels = kernels

    def calling(self, *kernels: str) -> CpuBackend:
        """This backend, for functions that call these kernels: where a release lacks one of
        them, those functions are unavailable, and no others."""
        part = CpuBackend(kernels)
        part._implementations = self._implementations
        return part

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
        missing = [name for name in self.kernels if not hasattr(torch.ops._C, name)]
        if missing:
            raise RuntimeError(f"vLLM's extension has no {', '.join(missing)}")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("_C::rms_norm", "CPU"):
            raise RuntimeError("vLLM's extension was not built for CPU")


backend = CpuBackend()
