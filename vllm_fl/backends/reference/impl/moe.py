# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing and experts: the contracts' own reference."""

from __future__ import annotations

from ....ops.moe import (
    FUSED_EXPERTS,
    GROUPED_TOPK,
    MOE_ALIGN_BLOCK_SIZE,
    MOE_SUM,
    TOPK_SOFTMAX,
)
from ..reference import backend

topk_softmax = backend.serves(TOPK_SOFTMAX)
grouped_topk = backend.serves(GROUPED_TOPK)
moe_align_block_size = backend.serves(MOE_ALIGN_BLOCK_SIZE)
moe_sum = backend.serves(MOE_SUM)
fused_experts = backend.serves(FUSED_EXPERTS)
