# SPDX-License-Identifier: Apache-2.0
"""What backends of vLLM's own kernels have in common: its compiled extension."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar, Self

from ..base import Backend

__all__ = ["NO_EXTENSION", "VllmKernels", "has_extension", "has_kernel"]

NO_EXTENSION = "this vLLM has no compiled extension (_C*.so)"


def has_extension() -> bool:
    """Whether vLLM was installed with its compiled extension; nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(next(Path(folder).glob("_C*.so"), None) for folder in folders or ())


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether a loaded extension has a kernel, such as "_C.rms_norm", for torch's dispatch key."""
    import torch

    namespace, _, op = name.partition(".")
    return hasattr(getattr(torch.ops, namespace), op) and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op}", dispatch_key)
    )


class VllmKernels(Backend):
    """Operators of vLLM's extension, built for one dispatch key.

    Args:
        kernels: those that its functions call, as "_C.rms_norm".

    Attributes:
        dispatch_key: torch's name of the device that they have to be built for.
    """

    dispatch_key: ClassVar[str]
    requires = ("torch", "vllm")

    def __init__(self, kernels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.kernels = kernels

    def calling(self, *kernels: str) -> Self:
        """This backend, for functions that call these kernels: where a release or build lacks one
        of them, those functions are unavailable, and no others."""
        part = type(self)(kernels)
        part._implementations = self._implementations
        return part

    def is_available(self) -> bool | str:
        """Whether vLLM was installed with a compiled extension; nothing is imported."""
        return has_extension() or NO_EXTENSION

    def load(self) -> None:
        """Load vLLM's extensions and make sure that they have the kernels, for this device."""
        import torch
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        missing, elsewhere = [], []
        for name in self.kernels:
            namespace, _, op = name.partition(".")
            if not hasattr(getattr(torch.ops, namespace), op):
                missing.append(name)
            elif not has_kernel(name, self.dispatch_key):
                elsewhere.append(name)
        if missing:
            raise RuntimeError(f"vLLM's extension has no {', '.join(missing)}")
        if elsewhere:
            raise RuntimeError(
                f"vLLM's extension was not built for {self.dispatch_key}: {', '.join(elsewhere)}"
            )
