# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8 bits, and matrix products of its results: the contracts' own reference."""

from __future__ import annotations

from ....ops.quantization import (
    DYNAMIC_PER_TOKEN_QUANT_INT8,
    PER_TOKEN_GROUP_QUANT_FP8,
    SCALED_FP8_QUANT,
    W8A8_BLOCK_FP8_MATMUL,
)
from ..reference import backend

scaled_fp8_quant = backend.serves(SCALED_FP8_QUANT)
per_token_group_quant_fp8 = backend.serves(PER_TOKEN_GROUP_QUANT_FP8)
w8a8_block_fp8_matmul = backend.serves(W8A8_BLOCK_FP8_MATMUL)
dynamic_per_token_quant_int8 = backend.serves(DYNAMIC_PER_TOKEN_QUANT_INT8)
