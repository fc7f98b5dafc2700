# SPDX-License-Identifier: Apache-2.0
"""Backends: FlagGems, the vendors' kernels, and the PyTorch reference."""

from .base import Backend

__all__ = ["Backend"]
