# SPDX-License-Identifier: Apache-2.0
"""The backend of our own GPU kernels (csrc/cuda, compiled to vllm_fl._C_cuda)."""

from __future__ import annotations

from typing import Any

from ....dispatch.types import BackendImplKind
from ....native import native_build, native_refusal
from ...base import Backend
from ..native_kernels import NativeKernels

__all__ = ["CudaFlBackend", "backend", "kernels"]


def _device() -> str:
    """What the extension was built for: PyTorch calls the chips of both makers cuda."""
    return "hip" if "hip" in native_build().built else "cuda"


kernels: Any = NativeKernels(_device)


class CudaFlBackend(Backend):
    """Kernels for NVIDIA's and AMD's GPUs.

    They take rows wherever they lie, any size, and weights of another dtype, compute in float32 and
    round once. A row's result does not depend on the batch: its sum is taken by a number of
    threads that its size alone decides. Nothing waits, and nothing is allocated but the results
    and, where arguments overlap, copies, so that a graph can capture them. Each guard is a
    function of the extension, beside the kernel that it guards.
    """

    impl_id = "vendor.cuda.fl"
    kind = BackendImplKind.VENDOR
    vendor = "cuda"
    device_types = ("cuda",)
    vendors = ("cuda", "rocm")
    requires = ("torch",)
    priority = 110

    def is_available(self) -> bool | str:
        """Whether vllm_fl was built with GPU kernels for the torch that is installed."""
        return native_refusal(_device()) or True

    def load(self) -> None:
        """Load vllm_fl._C_cuda."""
        _ = kernels.rms_norm


backend = CudaFlBackend()
