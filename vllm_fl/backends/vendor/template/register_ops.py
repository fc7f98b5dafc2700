# SPDX-License-Identifier: Apache-2.0
"""Registers the vendor's implementations."""

from __future__ import annotations

from ....dispatch.registry import OpRegistry
from .impl import activation  # noqa: F401  (importing marks them)
from .template import backend

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    registry.register_many(backend.implementations)
