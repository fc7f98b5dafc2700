# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: the contract's own reference."""

from __future__ import annotations

from ....ops.rotary import ROTARY_EMBEDDING
from ..reference import backend

rotary_embedding = backend.serves(ROTARY_EMBEDDING)
