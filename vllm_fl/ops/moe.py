# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing and experts."""

from __future__ import annotations

from .contract import OpContract

__all__ = ["CONTRACTS"]

CONTRACTS: tuple[OpContract, ...] = ()
