# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: the contracts' own reference."""

from __future__ import annotations

from ....ops import rotary as ops
from ..reference import backend

rotary_embedding = backend.serves(ops.ROTARY_EMBEDDING)
mrotary_embedding = backend.serves(ops.MROTARY_EMBEDDING)
