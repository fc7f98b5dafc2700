# SPDX-License-Identifier: Apache-2.0
"""Registers torch_npu's operators."""

from __future__ import annotations

from ....dispatch.registry import OpRegistry
from .ascend import backend
from .impl import (  # noqa: F401  (importing marks them)
    activation,
    attention,
    cache,
    moe,
    normalization,
    quantization,
    rotary,
    sampling,
)

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    registry.register_many(backend.implementations)
