# SPDX-License-Identifier: Apache-2.0
"""Attention: the contracts' own reference."""

from __future__ import annotations
