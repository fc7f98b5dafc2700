# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM's CUDA kernels (its compiled extension of a CUDA or ROCm build)."""

from __future__ import annotations

from ....dispatch.types import BackendImplKind
from ..vllm_extension import VllmKernels

__all__ = ["CudaBackend", "backend"]


class CudaBackend(VllmKernels):
    """The kernels that vLLM itself calls on NVIDIA and AMD."""

    impl_id = "vendor.cuda"
    kind = BackendImplKind.VENDOR
    vendor = "cuda"
    device_types = ("cuda",)
    vendors = ("cuda", "rocm")
    dispatch_key = "CUDA"


backend = CudaBackend()
