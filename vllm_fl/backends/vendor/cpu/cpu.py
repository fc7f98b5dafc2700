# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM's CPU kernels (torch.ops._C of a CPU build of vLLM)."""

from __future__ import annotations

from ....dispatch.types import BackendImplKind
from ..vllm_extension import VllmKernels

__all__ = ["CpuBackend", "backend"]


class CpuBackend(VllmKernels):
    """Kernels that vLLM compiles for CPUs but, on x86, mostly does not call itself."""

    impl_id = "vendor.cpu"
    kind = BackendImplKind.VENDOR
    vendor = "cpu"
    device_types = ("cpu",)
    dispatch_key = "CPU"


backend = CpuBackend()
