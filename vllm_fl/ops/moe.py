# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, blocks of tokens for one expert, the experts themselves."""

from __future__ import annotations

from .contract import OpContract
from .moe_blocks import MOE_ALIGN_BLOCK_SIZE, MOE_SUM
from .moe_experts import FUSED_EXPERTS
from .moe_routing import GROUPED_TOPK, TOPK_SOFTMAX

__all__ = [
    "CONTRACTS",
    "FUSED_EXPERTS",
    "GROUPED_TOPK",
    "MOE_ALIGN_BLOCK_SIZE",
    "MOE_SUM",
    "TOPK_SOFTMAX",
]

CONTRACTS: tuple[OpContract, ...] = (
    TOPK_SOFTMAX,
    GROUPED_TOPK,
    MOE_ALIGN_BLOCK_SIZE,
    MOE_SUM,
    FUSED_EXPERTS,
)
