# SPDX-License-Identifier: Apache-2.0
"""Logits on their way to a sampled token."""

from __future__ import annotations

from .contract import OpContract

__all__ = ["CONTRACTS"]

CONTRACTS: tuple[OpContract, ...] = ()
