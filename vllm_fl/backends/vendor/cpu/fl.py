# SPDX-License-Identifier: Apache-2.0
"""The backend of our own CPU kernels (csrc/cpu, compiled to vllm_fl._C)."""

from __future__ import annotations

import importlib
from typing import Any

from ....dispatch.types import BackendImplKind
from ....native import native_refusal
from ...base import Backend

__all__ = ["CpuFlBackend", "backend", "kernels"]


class _Kernels:
    """The functions of vllm_fl._C, as attributes: each is looked up once, when first used."""

    def __getattr__(self, name: str) -> Any:
        importlib.import_module("torch")  # brings along the libraries that the kernels need
        try:
            found = getattr(importlib.import_module("vllm_fl._C"), name)
        except ImportError as error:
            if not name.startswith("supports_"):
                raise
            refusal = native_refusal("cpu") or f"{type(error).__name__}: {error}"
            return lambda *args: refusal  # a guard is asked for a device that is assumed only
        setattr(self, name, found)
        return found


kernels: Any = _Kernels()


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

    def is_available(self) -> bool | str:
        """Whether vllm_fl was built with native code for the torch that is installed."""
        return native_refusal("cpu") or True

    def load(self) -> None:
        """Load vllm_fl._C."""
        kernels.cpu_capability()


backend = CpuFlBackend()
