# SPDX-License-Identifier: Apache-2.0
"""Registers vLLM's CPU kernels."""

from __future__ import annotations

from ....dispatch.registry import OpRegistry
from .cpu import backend
from .impl import activation, attention, normalization, rotary  # noqa: F401  (importing marks them)

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    registry.register_many(backend.implementations)
