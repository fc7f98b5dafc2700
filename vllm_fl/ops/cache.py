# SPDX-License-Identifier: Apache-2.0
"""The key-value cache."""

from __future__ import annotations

from .contract import OpContract

__all__ = ["CONTRACTS"]

CONTRACTS: tuple[OpContract, ...] = ()
