# SPDX-License-Identifier: Apache-2.0
"""The norms of query and key heads and their rotary embedding in one pass over a projection, as
Qwen3 has them (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single
from .inputs import MAX_POSITION, cos_sin_cache, rows, with_special
from .normalization import RMS_NORM
from .rotary import ROTARY_EMBEDDING

__all__ = ["CONTRACTS", "FUSED_QK_NORM_ROPE"]

# --------------------------------------------------------------------------- the reference
#
# vLLM's own layers one after the other: it rounds where they round, so that it is equal to
# their forward_native bit for bit.


def _normed(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query and key with each head normed, and value: (tokens, heads * head_dim)."""
    heads = (num_heads_q, num_heads_k, num_heads_v)
    q, k, v = qkv.split([count * head_dim for count in heads], dim=-1)
    q, k = (
        RMS_NORM.reference(x.unflatten(-1, (count, head_dim)), weight, eps).flatten(-2)
        for x, count, weight in ((q, num_heads_q, q_weight), (k, num_heads_k, k_weight))
    )
    return q, k, v


def _fused_qk_norm_rope(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    q, k, v = _normed(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight)
    q, k = ROTARY_EMBEDDING.reference(position_ids, q, k, head_dim, cos_sin_cache, is_neox)
    return torch.cat((q, k, v), dim=-1)


# --------------------------------------------------------------------------- fake and facts


def _fake(qkv: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return qkv.new_empty(qkv.shape)


def _facts(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> dict[str, Any]:
    return {
        "num_heads_q": num_heads_q,
        "num_heads_k": num_heads_k,
        "num_heads_v": num_heads_v,
        "head_dim": head_dim,
        "rotary_dim": cos_sin_cache.shape[-1],
        "is_neox": is_neox,
        "q_weight_dtype": q_weight.dtype,
        "k_weight_dtype": k_weight.dtype,
    }


_FACTS = (
    "num_heads_q",
    "num_heads_k",
    "num_heads_v",
    "head_dim",
    "rotary_dim",
    "is_neox",
    "q_weight_dtype",
    "k_weight_dtype",
)

# -------------------------------------------------------------------------------- the cases


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 5,
    heads: tuple[int, int, int] = (3, 2, 2),
    head_dim: int = 64,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    index: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    repeated: bool = False,
    special: bool = False,
    eps: float = 1e-6,
    **settings: Any,
) -> tuple[Any, ...]:
    """heads: of query, key and value. settings: of `rows`."""
    qkv = rows((tokens, sum(heads) * head_dim), dtype, generator, **settings)
    if special:
        with_special(qkv)
    q_weight, k_weight = (
        (torch.rand(head_dim, generator=generator) + 0.5).to(weight_dtype or dtype)
        for _ in range(2)
    )
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator).to(index)
    if repeated:
        positions[1:] = positions[:1]
    cache = cos_sin_cache(rotary_dim or head_dim, dtype, generator)
    return (qkv, *heads, head_dim, eps, q_weight, k_weight, cache, is_neox, positions)


_VARIANTS: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 33},
    "heads of 80": {"head_dim": 80},
    "heads of 128, grouped": {"head_dim": 128, "heads": (8, 2, 2)},
    "heads of 256, one key head": {"head_dim": 256, "heads": (4, 1, 1)},
    "as many key heads": {"heads": (3, 3, 3)},
    "another number of value heads": {"heads": (4, 2, 3)},
    "odd size, partial": {"head_dim": 45, "rotary_dim": 20},
    "prime sizes, partial": {"tokens": 7, "head_dim": 61, "rotary_dim": 34},
    "partial": {"head_dim": 128, "rotary_dim": 64},
    "one pair": {"rotary_dim": 2},
    "slice of wider rows": {"pad": 32},
    "slice of wider rows, odd pitch": {"pad": 3},
    "permuted, tokens innermost": {"layout": "transposed"},
    "float32 weights": {"weight_dtype": torch.float32},
    "a large eps": {"eps": 1e-2},
    "int32 positions": {"index": torch.int32},
    "repeated positions": {"repeated": True},
    "tiny values": {"scale": 1e-3},
    "huge values": {"scale": 1e4},
    "inf and nan": {"special": True},
}

_CASES = tuple(
    Case(f"{name}, {style}", partial(_inputs, is_neox=style == "neox", **settings))
    for style in ("neox", "gptj")
    for name, settings in _VARIANTS.items()
)

# ------------------------------------------------------- the tolerance and the terms behind

_WHY = (
    "the error of a norm enters a rotation twice, with the cosine and the sine; of two numbers "
    "only one can have the ulp of their sum, so at most sqrt(1 + 1/4) times as large relative to "
    "the terms. Half precision: 2 ulp of the norm (the scaled value and the product, a rounding "
    "each) become 2.24, the two products of the rotation and their sum are 2 more, and 0.5 for the "
    "float32 inside an implementation that rounds only at the end; float32: the norm's 16 become "
    "17.9, and 2.5 of the rotation as in half precision"
)


def _magnitude(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> tuple[torch.Tensor]:
    """What the products of the rotation add up to; a value has its own size."""
    q, k, v = _normed(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight)
    assert ROTARY_EMBEDDING.magnitude is not None
    terms = ROTARY_EMBEDDING.magnitude(position_ids, q, k, head_dim, cos_sin_cache, is_neox)
    found = [t for t in terms if t is not None]
    return (torch.cat((*found, v.abs()), dim=-1),)


# ----------------------------------------------------------------------------- the contract

FUSED_QK_NORM_ROPE = OpContract(
    signature=OpSignature.parse(
        "fused_qk_norm_rope(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, "
        "k_weight, cos_sin_cache, is_neox, position_ids)",
        inplace=("qkv",),
        facts=_facts,
        fact_names=_FACTS,
        fuses=("rms_norm", "rotary_embedding"),
        summary=(
            "Norms each query and key head by its root mean square, times q_weight or k_weight, "
            "and rotates its first rotary_dim channels by its token's position; values stay as "
            "they are. qkv: (tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim); "
            "weights: (head_dim,); cos_sin_cache: (max_position, rotary_dim), cosines then sines; "
            "position_ids: (tokens,). Returns qkv. Rounded as rms_norm and rotary_embedding round."
        ),
    ),
    schema=(
        "(Tensor qkv, SymInt num_heads_q, SymInt num_heads_k, SymInt num_heads_v, "
        "SymInt head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
        "bool is_neox, Tensor position_ids) -> Tensor"
    ),
    reference=_fused_qk_norm_rope,
    fake=_fake,
    arrays={
        "qkv": "T[tokens, width]",
        "q_weight": "T[head_dim] or float32[head_dim]",
        "k_weight": "T[head_dim] or float32[head_dim]",
        "cos_sin_cache": "T[max_position, rotary_dim]",
        "position_ids": "index[tokens]",
    },
    results=("T[tokens, width]",),
    constraints=(
        "width == (num_heads_q + num_heads_k + num_heads_v) * head_dim",
        "rotary_dim <= head_dim",
        "rotary_dim % 2 == 0",
    ),
    without={
        "leading shapes": "a projection has tokens, and nothing else, before its last dimension"
    },
    batched=("qkv", "position_ids"),
    call_sites=(
        CallSite(
            "vllm.model_executor.models.qwen3:Qwen3Attention",
            "the module's forward",
            note="without Inductor",
        ),
        CallSite(
            "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention",
            "the module's forward",
            note="without Inductor",
        ),
    ),
    source="https://arxiv.org/abs/1910.07467 and https://arxiv.org/abs/2104.09864",
    cases=_CASES,
    tolerances=half_and_single(half=4.75, single=20.5, why=_WHY),
    magnitude=_magnitude,
)

CONTRACTS = (FUSED_QK_NORM_ROPE,)
