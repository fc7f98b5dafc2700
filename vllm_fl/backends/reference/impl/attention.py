# SPDX-License-Identifier: Apache-2.0
"""Attention: the contracts' own reference."""

from __future__ import annotations

from ....ops.attention import MERGE_ATTN_STATES
from ..reference import backend

merge_attn_states = backend.serves(MERGE_ATTN_STATES)
