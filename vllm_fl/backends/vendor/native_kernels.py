# SPDX-License-Identifier: Apache-2.0
"""The functions of our own extensions, which are loaded when one of them is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ...native import MODULES, native_refusal

__all__ = ["NativeKernels"]


class NativeKernels:
    """The functions of an extension, as attributes: each is looked up once, when first used.

    Where the extension cannot be loaded its guards, `supports_<op>`, answer with the reason: they
    are also asked for a device that is assumed only.

    Args:
        device: gives the name of the device whose extension it is, a key of `native.MODULES`.
    """

    def __init__(self, device: Callable[[], str]) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        importlib.import_module("torch")  # brings along the libraries that the kernels need
        device = self._device()
        try:
            found = getattr(importlib.import_module(MODULES[device]), name)
        except ImportError as error:
            if not name.startswith("supports_"):
                raise
            refusal = native_refusal(device) or f"{type(error).__name__}: {error}"
            return lambda *args: refusal
        setattr(self, name, found)
        return found
