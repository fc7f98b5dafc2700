# SPDX-License-Identifier: Apache-2.0
"""Gated activations: the contracts' own reference."""

from __future__ import annotations

from ....ops.activation import GELU_AND_MUL, SILU_AND_MUL
from ..reference import backend

silu_and_mul = backend.serves(SILU_AND_MUL)
gelu_and_mul = backend.serves(GELU_AND_MUL)
