# SPDX-License-Identifier: Apache-2.0
"""What the guards refuse, what FlagGems does to such arguments, and the nearest accepted case."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.backends.helpers import randn

F32, F16, F64 = torch.float32, torch.float16, torch.float64
ONE = torch.ones(1)


class Harm(enum.Enum):
    """What the unguarded function does."""

    WRONG = "its result is beyond the contract's tolerance"
    RAISES = "it raises, so that nothing serves the call"
    UNWRITTEN = "the arguments that it promises to write keep their values"
    SILENT = "it serves what the reference refuses as malformed"
    LAYOUT = "its result has another dtype or other strides than the contract says"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused case, as in tests/backends/vendor/cpu/refusals.py."""

    op: str
    name: str
    arguments: Callable[[], tuple[Any, ...]]
    says: str
    harm: Harm
    neighbour: Callable[[], tuple[Any, ...]]


def norm(x: Any = None, weight: Any = 64, variance_size: int | None = None) -> tuple[Any, ...]:
    x = randn((3, 64), F32) if x is None else x
    weight = randn((weight,), x.dtype, seed=7) if isinstance(weight, int) else weight
    return x, weight, 1e-5, variance_size


def fused(x: Any = None, residual: Any = None, **more: Any) -> tuple[Any, ...]:
    args = norm(x, **more)
    residual = randn((3, 64), args[0].dtype, seed=1) if residual is None else residual
    return args[0], residual, *args[1:]


def short_weight() -> torch.Tensor:
    """Behind its end lies something else."""
    buffer = torch.full((64,), math.nan)
    buffer[:32] = 1.0
    return buffer[:32]


def rope(
    query: Any = None, head_size: int = 32, cache: Any = None, tokens: int = 5
) -> tuple[Any, ...]:
    query = randn((5, 2 * head_size), F32) if query is None else query
    cache = randn((50, head_size), F32, seed=3) if cache is None else cache
    return torch.arange(tokens), query, randn((5, head_size), F32, seed=2), head_size, cache, True


def pages(
    key: Any = None,
    caches: Callable[[], torch.Tensor] | None = None,
    slots: Any = None,
    name: str = "auto",
) -> tuple[Any, ...]:
    key = randn((5, 2, 16), F32) if key is None else key
    value = randn((5, 2, 16), F32, seed=1)
    make = caches or (lambda: torch.zeros(4, 8, 2, 16))
    slots = torch.arange(5) * 3 if slots is None else slots
    return key, value, make(), make(), slots, name, ONE, ONE


def other_blocks() -> tuple[Any, ...]:
    args = list(pages())
    args[3] = torch.zeros(4, 2, 8, 2, 16)[:, 0]
    return tuple(args)


def latent(
    kv_c: Any = None, cache: Any = None, slots: Any = None, name: str = "auto", rank: int = 32
) -> tuple[Any, ...]:
    kv_c = randn((5, rank), F32) if kv_c is None else kv_c
    cache = torch.zeros(4, 8, rank + 16) if cache is None else cache
    slots = torch.arange(5) * 3 if slots is None else slots
    return kv_c, randn((5, 16), F32, seed=1), cache, slots, name, ONE


def logits(tokens: int = 4, experts: int = 16) -> torch.Tensor:
    return randn((tokens, experts), F32)


def wide_logits() -> torch.Tensor:
    """The best expert is the last one."""
    x = logits(2, 1100)
    x[:, -1] = 50.0
    return x


def groups(**changes: Any) -> tuple[Any, ...]:
    settings = {"experts": 16, "topk": 2, "groups": 4, "topk_group": 2, "bias": True} | changes
    experts = settings["experts"]
    bias = randn((experts,), F32, seed=5) if settings["bias"] else None
    x = logits(4, experts)
    choice = (settings["topk"], True, settings["groups"], settings["topk_group"])
    return x, *choice, "sigmoid", 1.0, bias


def choices(ignore: bool = False, mapped: bool = True) -> tuple[Any, ...]:
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    where = torch.tensor([-1, 0, -1, 1], dtype=torch.int32) if mapped else None
    return ids, 4, 4, where, False, ignore


def chosen_rows(step: int = 1, ids: bool = False) -> tuple[Any, ...]:
    rows = randn((3, 2, 16 * step), F32)[..., ::step]
    if not ids:
        return rows, None, None
    return rows, torch.tensor([[0, -1], [1, 2], [-1, 0]], dtype=torch.int32), None


def penalized(pad: int = 0) -> tuple[Any, ...]:
    wide = randn((3, 16 + pad), F32)
    seen = (torch.arange(48) % 3 == 0).view(3, 16)
    return wide[:, :16], seen, seen.clone(), torch.tensor([1.5, 0.5, 2.0])


def grouped_rows(*shape: int, column_major: bool = True, tma: bool = False) -> tuple[Any, ...]:
    return randn(shape, F32), 16, 1e-10, None, column_major, tma, False


REFUSALS = (
    Refusal("silu_and_mul", "float64", lambda: (randn((3, 64), F64),),
            "dtype float64 is not float32, bfloat16 or float16", Harm.WRONG,
            lambda: (randn((3, 64), F32),)),
    Refusal("gelu_and_mul", "another approximation", lambda: (randn((3, 64), F32), "quick"),
            "approximate 'quick' is not none or tanh", Harm.RAISES,
            lambda: (randn((3, 64), F32), "tanh")),
    Refusal("rms_norm", "no weight", lambda: norm(weight=None),
            "there is no weight", Harm.RAISES, norm),
    Refusal("rms_norm", "short weight", lambda: norm(weight=short_weight()),
            "the weight has 32 elements, a row has 64", Harm.SILENT, norm),
    Refusal("rms_norm", "variance of a part", lambda: norm(variance_size=32),
            "variance_size 32 is given", Harm.WRONG, norm),
    Refusal("fused_add_rms_norm", "strided x", lambda: fused(randn((3, 96), F32)[:, :64]),
            "x or residual is not contiguous", Harm.UNWRITTEN, fused),
    Refusal("fused_add_rms_norm", "strided residual",
            lambda: fused(residual=randn((3, 96), F32)[:, :64]),
            "x or residual is not contiguous", Harm.UNWRITTEN, fused),
    Refusal("fused_add_rms_norm", "longer residual",
            lambda: fused(residual=randn((4, 64), F32)),
            "residual has shape [4, 64], x has [3, 64]", Harm.LAYOUT, fused),
    Refusal("fused_add_rms_norm", "residual of another dtype",
            lambda: fused(randn((3, 64), F16), randn((3, 64), F32)),
            "residual is float32, x is float16", Harm.LAYOUT,
            lambda: fused(randn((3, 64), F16))),
    Refusal("rotary_embedding", "odd rotary_dim",
            lambda: rope(cache=randn((50, 15), F32)),
            "rotary_dim 15 is not even and within 1 and head_size 32", Harm.RAISES,
            lambda: rope(cache=randn((50, 16), F32))),
    Refusal("rotary_embedding", "rotary_dim beyond the head",
            lambda: rope(cache=randn((50, 64), F32)),
            "rotary_dim 64 is not even and within 1 and head_size 32", Harm.RAISES, rope),
    Refusal("rotary_embedding", "other tokens", lambda: rope(tokens=4),
            "query has shape [5, 64] for 4 positions and heads of 32", Harm.RAISES, rope),
    Refusal("rotary_embedding", "strided cache",
            lambda: rope(cache=randn((50, 64), F32)[:, ::2]),
            "cos_sin_cache is not contiguous", Harm.RAISES, rope),
    Refusal("reshape_and_cache_flash", "HND",
            lambda: pages(caches=lambda: torch.zeros(4, 2, 8, 16).transpose(1, 2)),
            "the rows of key_cache are not packed: strides [256, 16, 128, 1]", Harm.WRONG, pages),
    Refusal("reshape_and_cache_flash", "fp8",
            lambda: pages(name="fp8", caches=lambda: torch.zeros(4, 8, 2, 16, dtype=torch.uint8)),
            "kv_cache_dtype 'fp8': scales would be ignored", Harm.WRONG, pages),
    Refusal("reshape_and_cache_flash", "heads apart",
            lambda: pages(randn((5, 2, 24), F32)[..., :16]),
            "the heads of key are not packed: strides [48, 24, 1]", Harm.WRONG,
            lambda: pages(randn((5, 48), F32)[:, :32].unflatten(-1, (2, 16)))),
    Refusal("reshape_and_cache_flash", "strided slots",
            lambda: pages(slots=(torch.arange(10) * 3)[::2]),
            "slot_mapping is not contiguous", Harm.WRONG, pages),
    Refusal("reshape_and_cache_flash", "blocks of other strides", other_blocks,
            "the blocks of key_cache and value_cache have different strides", Harm.RAISES, pages),
    Refusal("concat_and_cache_mla", "another layout of fp8",
            lambda: latent(name="fp8_ds_mla"),
            "kv_cache_dtype 'fp8_ds_mla' is not known to it", Harm.SILENT, latent),
    Refusal("concat_and_cache_mla", "fp8 of floats",
            lambda: latent(name="fp8"), "kv_cache is float32, not uint8", Harm.RAISES, latent),
    Refusal("concat_and_cache_mla", "a cache of another dtype",
            lambda: latent(cache=torch.zeros(4, 8, 48, dtype=F16)),
            "kv_cache is float16, not float32", Harm.RAISES, latent),
    Refusal("concat_and_cache_mla", "strided columns",
            lambda: latent(randn((5, 64), F32)[:, ::2]),
            "the columns of kv_c, k_pe or kv_cache are not packed", Harm.WRONG,
            lambda: latent(randn((5, 64), F32)[:, :32])),
    Refusal("concat_and_cache_mla", "strided slots",
            lambda: latent(slots=(torch.arange(10) * 3)[::2]),
            "slot_mapping is not contiguous", Harm.WRONG, latent),
    Refusal("concat_and_cache_mla", "a cache elsewhere",
            lambda: latent(cache=torch.zeros(4, 8, 48, device="meta")),
            "kv_cache is on meta, kv_c on cpu", Harm.RAISES, latent),
    Refusal("topk_softmax", "1100 experts", lambda: (wide_logits(), 2),
            "1100 experts are more than 1024", Harm.WRONG, lambda: (logits(2, 1024), 2)),
    Refusal("topk_softmax", "top 33", lambda: (logits(2, 64), 33),
            "topk 33 is above 32", Harm.RAISES, lambda: (logits(2, 64), 32)),
    Refusal("topk_softmax", "strided logits", lambda: (logits(4, 32)[:, :16], 2),
            "gating_output is not contiguous", Harm.WRONG, lambda: (logits(), 2)),
    Refusal("topk_softmax", "bias", lambda: (logits(), 2, False, 9 * randn((16,), F32)),
            "a correction bias is given", Harm.WRONG, lambda: (logits(), 2)),
    Refusal("topk_softmax", "padding",
            lambda: (logits(), 2, False, None, torch.tensor([False, True, False, True])),
            "padding is told", Harm.WRONG, lambda: (logits(), 2)),
    Refusal("grouped_topk", "no bias", lambda: groups(bias=False),
            "there is no correction bias", Harm.RAISES, groups),
    Refusal("grouped_topk", "33 groups", lambda: groups(experts=66, groups=33),
            "33 groups are more than 32", Harm.RAISES, lambda: groups(experts=64, groups=32)),
    Refusal("grouped_topk", "top 64", lambda: groups(experts=128, topk=64),
            "topk 64 is above 32", Harm.RAISES, lambda: groups(experts=128, topk=32)),
    Refusal("grouped_topk", "groups of one", lambda: groups(groups=16, topk_group=4),
            "groups of one expert have no best two", Harm.WRONG,
            lambda: groups(groups=8, topk_group=4)),
    Refusal("moe_align_block_size", "elsewhere is ignored", lambda: choices(ignore=True),
            "experts elsewhere are to be ignored", Harm.WRONG, choices),
    Refusal("moe_sum", "every second column", lambda: chosen_rows(step=2),
            "the last dimension is not packed", Harm.WRONG, chosen_rows),
    Refusal("moe_sum", "rows left out", lambda: chosen_rows(ids=True),
            "rows are to be left out", Harm.WRONG, chosen_rows),
    Refusal("per_token_group_quant_fp8", "aligned scales", lambda: grouped_rows(5, 64, tma=True),
            "column-major scales are aligned, or those of more than rows", Harm.LAYOUT,
            lambda: grouped_rows(5, 64)),
    Refusal("per_token_group_quant_fp8", "column-major scales of 3-D",
            lambda: grouped_rows(2, 3, 64),
            "column-major scales are aligned, or those of more than rows", Harm.LAYOUT,
            lambda: grouped_rows(2, 3, 64, column_major=False)),
    Refusal("apply_repetition_penalties", "strided logits", lambda: penalized(pad=8),
            "an argument is not contiguous", Harm.RAISES, penalized),
)  # fmt: skip
