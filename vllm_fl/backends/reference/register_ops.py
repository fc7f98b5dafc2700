# SPDX-License-Identifier: Apache-2.0
"""Registers the reference implementations."""

from __future__ import annotations

from ...dispatch.registry import OpRegistry
from .impl import (  # noqa: F401  (importing marks them)
    activation,
    attention,
    cache,
    moe,
    normalization,
    qk_norm_rope,
    quantization,
    rotary,
    sampling,
)
from .reference import backend

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    registry.register_many(backend.implementations)
