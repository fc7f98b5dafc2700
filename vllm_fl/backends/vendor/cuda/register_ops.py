# SPDX-License-Identifier: Apache-2.0
"""Registers vLLM's CUDA kernels, and our own."""

from __future__ import annotations

from ....dispatch.registry import OpRegistry
from .cuda import backend
from .fl import backend as fl_backend
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
from .impl_fl import activation as fl_activation  # noqa: F401
from .impl_fl import cache as fl_cache  # noqa: F401
from .impl_fl import normalization as fl_normalization  # noqa: F401
from .impl_fl import qk_norm_rope as fl_qk_norm_rope  # noqa: F401
from .impl_fl import rotary as fl_rotary  # noqa: F401

__all__ = ["register_builtins"]


def register_builtins(registry: OpRegistry) -> None:
    """Register every function that the impl modules marked."""
    registry.register_many(backend.implementations)
    registry.register_many(fl_backend.implementations)
