# SPDX-License-Identifier: Apache-2.0
"""The norms of query and key with their rotary embedding: the contract's own reference."""

from __future__ import annotations

from ....ops import qk_norm_rope as ops
from ..reference import backend

fused_qk_norm_rope = backend.serves(ops.FUSED_QK_NORM_ROPE)
