# SPDX-License-Identifier: Apache-2.0
"""Registers torch_npu's operators."""

from __future__ import annotations

from ....dispatch.registry import OpRegistry
from .ascend import backend, backend_310p, backend_a5
from .impl import (  # noqa: F401  (importing marks them)
    activation,
    attention,
    cache,
    moe,
    normalization,
    other_chips,
    quantization,
    rotary,
    sampling,
)

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    for chips in (backend, backend_310p, backend_a5):
        registry.register_many(chips.implementations)
