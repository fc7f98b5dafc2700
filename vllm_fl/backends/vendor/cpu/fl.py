# SPDX-License-Identifier: Apache-2.0
"""The backend of our own CPU kernels (csrc/cpu, compiled to vllm_fl._C)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ....dispatch.types import BackendImplKind
from ....native import native_refusal
from ...base import Backend
from ..native_kernels import NativeKernels

__all__ = ["CpuFlBackend", "backend", "kernels"]


kernels: Any = NativeKernels(lambda: "cpu")


class CpuFlBackend(Backend):
    """Kernels for AVX-512, AVX2 and, slower, any other CPU; chosen when the process starts.

    They take rows wherever they lie, any size, and weights of another dtype, and they round
    once. Each guard is a function of the extension, beside the kernel that it guards: read
    there, a tensor's metadata costs a tenth of what it costs in Python.
    """

    impl_id = "vendor.cpu.fl"
    kind = BackendImplKind.VENDOR
    vendor = "cpu"
    device_types = ("cpu",)
    requires = ("torch",)
    priority = 110
    graph_operators: ClassVar[Mapping[str, str]] = {
        "silu_and_mul": "vllm_fl_C::silu_and_mul.bound",
        "rms_norm": "vllm_fl_C::rms_norm.bound",
        "fused_add_rms_norm_": "vllm_fl_C::fused_add_rms_norm_.bound",
    }

    def is_available(self) -> bool | str:
        """Whether vllm_fl was built with native code for the torch that is installed."""
        return native_refusal("cpu") or True

    def load(self) -> None:
        """Load vllm_fl._C."""
        kernels.cpu_capability()

    def set_direct(self, binding: str, on: bool) -> None:
        """As csrc/cpu/bound.h says."""
        kernels.set_direct(binding, on)


backend = CpuFlBackend()
