# SPDX-License-Identifier: Apache-2.0
"""Inputs of the cache ops: layouts, storages and slots of every kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .contract import Case

__all__ = ["LATENT_CASES", "PAGE_CASES"]

_SPECIAL = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0)
_FP8_STORAGE = {"uint8": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    magnitude: float,
    special: bool,
) -> torch.Tensor:
    rows = (magnitude * torch.randn(shape, generator=generator)).to(dtype)
    if special and rows.numel() >= len(_SPECIAL):
        rows.view(-1)[: len(_SPECIAL)] = torch.tensor(_SPECIAL, dtype=dtype)
    return rows


def _held(
    shape: tuple[int, ...], storage: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A cache that is not empty: what is not written must stay."""
    if storage == "T":
        return torch.randn(shape, generator=generator).to(dtype)
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return bits.view(_FP8_STORAGE[storage])


def _slots(kind: str, tokens: int, capacity: int, generator: torch.Generator) -> torch.Tensor:
    slots = torch.randperm(capacity, generator=generator)[:tokens]
    if kind == "some negative":
        slots[::3] = -1
        slots[1::7] = -5
    elif kind == "all negative":
        slots[:] = -1
    elif kind == "ends":  # the first and the last slot, and padding first and last
        slots = torch.tensor([-1, 0, capacity - 1, -1])
    return slots


def _page_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    padded: int = 0,
    heads: int = 3,
    head_size: int = 16,
    blocks: int = 4,
    block_size: int = 8,
    layout: str = "NHD",
    storage: str = "T",
    kv_cache_dtype: str = "auto",
    scale: str = "scalar",
    slots: str = "distinct",
    index: torch.dtype = torch.int64,
    split: bool = False,
    magnitude: float = 1.0,
    special: bool = False,
) -> tuple[Any, ...]:
    mapping = _slots(slots, tokens, blocks * block_size, generator)
    rows = partial(_rows, dtype=dtype, generator=generator, magnitude=magnitude, special=special)
    shape = (mapping.shape[0] + padded, heads, head_size)
    if split:  # columns of a projection that holds queries, keys and values
        wide = rows((shape[0], 4 * heads * head_size)).view(shape[0], 4 * heads, head_size)
        key, value = wide[:, 2 * heads : 3 * heads], wide[:, 3 * heads :]
    else:
        key, value = rows(shape), rows(shape)
    if slots == "repeated":
        mapping[-1], key[-1], value[-1] = mapping[0], key[0], value[0]
    held = partial(_held, storage=storage, dtype=dtype, generator=generator)
    if layout == "HND":
        key_cache, value_cache = (
            held((blocks, heads, block_size, head_size)).transpose(1, 2) for _ in range(2)
        )
    elif layout == "blocks of both":
        key_cache, value_cache = held((blocks, 2, block_size, heads, head_size)).unbind(1)
    elif layout == "rows of both, HND":
        both = held((blocks, heads, block_size, 2 * head_size)).transpose(1, 2)
        key_cache, value_cache = both.split(head_size, dim=-1)
    else:
        key_cache, value_cache = (held((blocks, block_size, heads, head_size)) for _ in range(2))
    scales = {
        "scalar": (torch.tensor(0.5), torch.tensor(0.03)),
        "one": (torch.tensor([0.7]), torch.tensor([1.3])),
        "one for each head": (
            torch.rand(heads, generator=generator) + 0.1,
            torch.rand(heads, generator=generator) + 0.1,
        ),
    }[scale]
    return key, value, key_cache, value_cache, mapping.to(index), kv_cache_dtype, *scales


def _latent_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    padded: int = 0,
    rank: int = 32,
    rope: int = 16,
    blocks: int = 4,
    block_size: int = 8,
    layout: str = "",
    storage: str = "T",
    kv_cache_dtype: str = "auto",
    slots: str = "distinct",
    index: torch.dtype = torch.int64,
    split: bool = False,
    magnitude: float = 1.0,
    special: bool = False,
) -> tuple[Any, ...]:
    mapping = _slots(slots, tokens, blocks * block_size, generator)
    rows = partial(_rows, dtype=dtype, generator=generator, magnitude=magnitude, special=special)
    count = mapping.shape[0] + padded
    if split:  # columns of one projection, the key with a dimension for its one head
        wide = rows((count, rank + rope + 8))
        kv_c, k_pe = wide[:, :rank], wide[:, rank : rank + rope].unsqueeze(1).squeeze(1)
    else:
        kv_c, k_pe = rows((count, rank)), rows((count, rope))
    if slots == "repeated":
        mapping[-1], kv_c[-1], k_pe[-1] = mapping[0], kv_c[0], k_pe[0]
    width = rank + rope
    held = partial(_held, storage=storage, dtype=dtype, generator=generator)
    if layout == "gaps":  # as where several layers share a page
        cache = held((blocks, 2 * block_size, width))[:, :block_size]
    elif layout == "permuted":
        cache = held((block_size, blocks, width)).transpose(0, 1)
    else:
        cache = held((blocks, block_size, width))
    return kv_c, k_pe, cache, mapping.to(index), kv_cache_dtype, torch.tensor(0.3)


_QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"storage": "uint8", "kv_cache_dtype": "fp8"},
    "fp8_e4m3 in uint8": {"storage": "uint8", "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2 in uint8": {"storage": "uint8", "kv_cache_dtype": "fp8_e5m2"},
    "fp8_e4m3": {"storage": "e4m3", "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"storage": "e5m2", "kv_cache_dtype": "fp8_e5m2"},
    "fp8, negative slots": {
        "storage": "uint8",
        "kv_cache_dtype": "fp8",
        "slots": "some negative",
    },
    "fp8, tiny values": {"storage": "uint8", "kv_cache_dtype": "fp8", "magnitude": 1e-3},
    "fp8, huge values saturate": {"storage": "uint8", "kv_cache_dtype": "fp8", "magnitude": 1e4},
    "fp8_e5m2, inf and nan": {"storage": "e5m2", "kv_cache_dtype": "fp8_e5m2", "special": True},
    "fp8, inf and nan": {"storage": "uint8", "kv_cache_dtype": "fp8", "special": True},
}

_COMMON: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "every slot": {"tokens": 32},
    "negative slots are skipped": {"slots": "some negative"},
    "only negative slots": {"slots": "all negative"},
    "first and last slot": {"slots": "ends"},
    "a slot twice, with equal rows": {"slots": "repeated"},
    "32-bit slots": {"index": torch.int32},
    "more rows than slots": {"padded": 4},
    "more rows than slots, no slot": {"tokens": 0, "padded": 3},
    "slices of a projection": {"split": True},
    "one block of prime size": {"blocks": 1, "block_size": 13},
    "tiny values": {"magnitude": 1e-3},
    "huge values": {"magnitude": 1e4},
    "inf and nan": {"special": True},
}

_PAGES: dict[str, dict[str, Any]] = {
    **_COMMON,
    "odd sizes": {"heads": 5, "head_size": 19, "block_size": 7},
    "one head": {"heads": 1, "head_size": 128},
    "HND, a permuted cache": {"layout": "HND"},
    "HND, negative slots": {"layout": "HND", "slots": "some negative", "split": True},
    "HND, odd sizes": {"layout": "HND", "heads": 5, "head_size": 19, "block_size": 7},
    "keys and values in one block": {"layout": "blocks of both"},
    "keys and values in one row, HND": {"layout": "rows of both, HND"},
    **_QUANTIZED,
    "fp8, HND": {"layout": "HND", "storage": "uint8", "kv_cache_dtype": "fp8"},
    "fp8, scale of one element": {"storage": "uint8", "kv_cache_dtype": "fp8", "scale": "one"},
    "fp8, scale for each head": {
        "storage": "uint8",
        "kv_cache_dtype": "fp8",
        "scale": "one for each head",
    },
}

_LATENT: dict[str, dict[str, Any]] = {
    **_COMMON,
    "odd sizes": {"rank": 37, "rope": 11, "block_size": 7},
    "rank 512 and 64": {"rank": 512, "rope": 64},
    "blocks with gaps between them": {"layout": "gaps"},
    "permuted cache": {"layout": "permuted"},
    **_QUANTIZED,
}

PAGE_CASES = tuple(Case(name, partial(_page_inputs, **kw)) for name, kw in _PAGES.items())
LATENT_CASES = tuple(Case(name, partial(_latent_inputs, **kw)) for name, kw in _LATENT.items())
