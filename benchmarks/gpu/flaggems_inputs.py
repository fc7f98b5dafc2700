# SPDX-License-Identifier: Apache-2.0
"""Arguments of the sizes that models have, for each op that FlagGems serves; bfloat16."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["TOKENS", "inputs"]

TOKENS = (1, 32, 512, 8192)
HIDDEN = 4096
HALF = torch.bfloat16


def inputs(op: str, tokens: int, device: str) -> tuple[Any, ...]:
    """Positional arguments of a call with that many tokens.

    Raises:
        KeyError: no sizes are known for the op.
    """
    with torch.device(device):
        return _MAKERS[op](tokens)


def _rows(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def _rope(tokens: int) -> tuple[Any, ...]:
    heads, kv_heads, head_size = 32, 8, 128
    widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    query, key, _ = _rows(tokens, sum(widths)).split(widths, dim=-1)
    positions = torch.arange(tokens) % 4096
    return positions, query, key, head_size, _rows(4096, head_size), True


def _pages(tokens: int) -> tuple[Any, ...]:
    heads, head_size, block = 8, 128, 16
    blocks = tokens // block + 64
    caches = (torch.zeros(blocks, block, heads, head_size, dtype=HALF) for _ in range(2))
    one = torch.ones(1, dtype=torch.float32)
    rows = (_rows(tokens, heads, head_size), _rows(tokens, heads, head_size))
    return *rows, *caches, torch.arange(tokens), "auto", one, one


def _latent(tokens: int) -> tuple[Any, ...]:
    rank, rope, block = 512, 64, 16
    cache = torch.zeros(tokens // block + 64, block, rank + rope, dtype=HALF)
    one = torch.ones(1, dtype=torch.float32)
    return _rows(tokens, rank), _rows(tokens, rope), cache, torch.arange(tokens), "auto", one


def _ids(tokens: int, experts: int, topk: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(topk, dim=-1).indices.int()


def _experts(tokens: int) -> tuple[Any, ...]:
    experts, inner, hidden, topk = 64, 1024, 2048, 8
    weights = torch.rand(tokens, topk, dtype=torch.float32)
    w1, w2 = _rows(experts, 2 * inner, hidden), _rows(experts, hidden, inner)
    return _rows(tokens, hidden), w1, w2, weights, _ids(tokens, experts, topk)


def _matmul(tokens: int) -> tuple[Any, ...]:
    n, k, block = 4096, 7168, 128
    fp8 = torch.float8_e4m3fn
    a, b = _rows(tokens, k).to(fp8), _rows(n, k).to(fp8)
    a_scales = torch.rand(tokens, k // block, dtype=torch.float32)
    b_scales = torch.rand(n // block, k // block, dtype=torch.float32)
    return a, b, a_scales, b_scales, [block, block], HALF


def _penalties(tokens: int) -> tuple[Any, ...]:
    seqs, vocab = min(tokens, 256), 151936
    seen = torch.rand(seqs, vocab) < 0.01
    return torch.randn(seqs, vocab), seen, seen.clone(), torch.ones(seqs)


_MAKERS: dict[str, Any] = {
    "silu_and_mul": lambda n: (_rows(n, 2 * HIDDEN),),
    "gelu_and_mul": lambda n: (_rows(n, 2 * HIDDEN), "tanh"),
    "rms_norm": lambda n: (_rows(n, HIDDEN), _rows(HIDDEN), 1e-6),
    "fused_add_rms_norm": lambda n: (_rows(n, HIDDEN), _rows(n, HIDDEN), _rows(HIDDEN), 1e-6),
    "rotary_embedding": _rope,
    "reshape_and_cache_flash": _pages,
    "concat_and_cache_mla": _latent,
    "topk_softmax": lambda n: (_rows(n, 128), 8, True),
    "grouped_topk": lambda n: (
        _rows(n, 256), 8, True, 8, 4, "sigmoid", 2.5, torch.rand(256, dtype=torch.float32),
    ),
    "moe_align_block_size": lambda n: (_ids(n, 128, 8), 64, 128),
    "moe_sum": lambda n: (_rows(n, 8, 2048),),
    "fused_experts": _experts,
    "per_token_group_quant_fp8": lambda n: (_rows(n, 7168), 128),
    "w8a8_block_fp8_matmul": _matmul,
    "apply_repetition_penalties": _penalties,
}  # fmt: skip
