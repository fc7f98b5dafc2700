# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8 bits, and matrix products of its results: the contracts' own reference."""

from __future__ import annotations
