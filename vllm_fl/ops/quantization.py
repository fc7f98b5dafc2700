# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8 bits, and matrix products of its results."""

from __future__ import annotations

from .contract import OpContract

__all__ = ["CONTRACTS"]

CONTRACTS: tuple[OpContract, ...] = ()
