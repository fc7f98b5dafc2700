# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing and experts: the contracts' own reference."""

from __future__ import annotations
