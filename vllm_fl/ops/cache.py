# SPDX-License-Identifier: Apache-2.0
"""The paged key-value cache: rows of new tokens go to the slots that the scheduler gave them.

A slot is a token's place: block `slot // block_size`, row `slot % block_size`. A negative slot
is padding and is skipped. Slots are otherwise distinct, or hold equal rows: on a GPU the tokens
of a batch race.

An op's meaning is functional: it returns the new caches. An implementation that writes them in
place says so, and a call site donates them, because nobody can afford a second cache.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.types import OpSignature
from .cache_cases import LATENT_CASES, PAGE_CASES
from .contract import CallSite, OpContract, half_and_single

__all__ = [
    "CONCAT_AND_CACHE_MLA",
    "CONTRACTS",
    "RESHAPE_AND_CACHE_FLASH",
    "write_latent",
    "write_pages",
]

UNQUANTIZED = frozenset({"auto", "float16", "half", "bfloat16", "float32", "float"})
"""vLLM's names for a cache that holds the rows as they are."""

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's names for a quantized cache, and what one that is stored as uint8 holds."""


def _fp8_of(cache: torch.Tensor, kv_cache_dtype: str) -> torch.dtype:
    """What the bytes of a quantized cache mean.

    Raises:
        ValueError: no such quantization, or one that the cache's dtype contradicts.
    """
    if kv_cache_dtype not in FP8:
        raise ValueError(
            f"kv_cache_dtype {kv_cache_dtype!r} is none that this op stores; valid: "
            f"{', '.join([*sorted(UNQUANTIZED), *FP8])}"
        )
    meant = FP8[kv_cache_dtype]
    if cache.dtype is torch.uint8:
        return meant
    wide_exponent = cache.dtype is torch.float8_e5m2
    if cache.dtype.itemsize != 1 or wide_exponent != (meant is torch.float8_e5m2):
        raise ValueError(
            f"kv_cache_dtype {kv_cache_dtype!r} needs a cache of uint8 or {meant}, "
            f"found {cache.dtype}"
        )
    return cache.dtype


def _stored(
    rows: torch.Tensor, cache: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor
) -> torch.Tensor:
    """The rows as the cache holds them: divided by the scale, saturated, rounded to nearest."""
    if kv_cache_dtype in UNQUANTIZED:
        return rows.to(cache.dtype)
    fp8 = _fp8_of(cache, kv_cache_dtype)
    limit = torch.finfo(fp8).max
    scaled = rows.float() / scale.reshape(-1, 1)
    return scaled.clamp(-limit, limit).to(fp8).view(cache.dtype)


def _write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows to their slots, in place, through whatever strides the cache has.

    Nothing here depends on data for its shape, so that it can be traced, and captured in a
    graph: a padded token repeats the write of one that is not padded. Where all are, the first
    slot is written with what it holds.
    """
    if slots.shape[0] == 0 or cache.numel() == 0:
        return
    if cache.dtype.itemsize == 1:  # indexing knows more of bytes than of fp8
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    valid = slots >= 0
    token = valid.int().argmax().reshape(1)
    target = torch.where(valid, slots, slots.index_select(0, token)).clamp(min=0).long()
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), token)
    moved = torch.where(valid.any(), rows.index_select(0, source), cache[0, 0])
    block_size = cache.shape[1]
    block = torch.div(target, block_size, rounding_mode="floor")
    cache.index_put_((block, target % block_size), moved)


def write_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """`reshape_and_cache_flash` in place."""
    tokens = slot_mapping.shape[0]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        _write(cache, _stored(rows[:tokens], cache, kv_cache_dtype, scale), slot_mapping)


def write_latent(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """`concat_and_cache_mla` in place."""
    tokens = slot_mapping.shape[0]
    rows = torch.cat((kv_c[:tokens], k_pe[:tokens]), dim=-1)
    _write(kv_cache, _stored(rows, kv_cache, kv_cache_dtype, scale), slot_mapping)


def _copy(cache: torch.Tensor) -> torch.Tensor:
    return cache.clone(memory_format=torch.contiguous_format)


def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    new = _copy(key_cache), _copy(value_cache)
    write_pages(key, value, *new, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    return new


def _concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    new = _copy(kv_cache)
    write_latent(kv_c, k_pe, new, slot_mapping, kv_cache_dtype, scale)
    return new


def _pages_fake(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return key_cache.new_empty(key_cache.shape), value_cache.new_empty(value_cache.shape)


def _latent_fake(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    return kv_cache.new_empty(kv_cache.shape)


def _pages_facts(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> dict[str, Any]:
    return {
        "num_heads": key.shape[1],
        "head_size": key.shape[2],
        "kv_cache_dtype": kv_cache_dtype,
    }


def _latent_facts(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> dict[str, Any]:
    return {
        "kv_lora_rank": kv_c.shape[1],
        "rope_dim": k_pe.shape[1],
        "kv_cache_dtype": kv_cache_dtype,
    }


# ------------------------------------------------------------------------- the exact result


def _exact_cache(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    """The cache in float64, whose new rows are not rounded yet."""
    if kv_cache_dtype in UNQUANTIZED:
        values, held = rows.double(), cache.double()
    else:
        fp8 = FP8[kv_cache_dtype]
        limit = torch.finfo(fp8).max
        values = (rows.double() / scale.double().reshape(-1, 1)).clamp(-limit, limit)
        held = (cache.view(fp8) if cache.dtype is torch.uint8 else cache).double()
    held = _copy(held)
    _write(held, values, slots)
    return held


def _exact_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = slot_mapping.shape[0]
    return (
        _exact_cache(key[:tokens], key_cache, slot_mapping, kv_cache_dtype, k_scale),
        _exact_cache(value[:tokens], value_cache, slot_mapping, kv_cache_dtype, v_scale),
    )


def _exact_latent(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> torch.Tensor:
    tokens = slot_mapping.shape[0]
    rows = torch.cat((kv_c[:tokens], k_pe[:tokens]), dim=-1)
    return _exact_cache(rows, kv_cache, slot_mapping, kv_cache_dtype, scale)


def _read(
    outputs: tuple[torch.Tensor | None, ...], kv_cache_dtype: str
) -> tuple[torch.Tensor | None, ...]:
    """Bytes as the fp8 numbers that they mean, so that distances are in ulps."""
    return tuple(
        out.view(FP8[kv_cache_dtype]) if out is not None and out.dtype is torch.uint8 else out
        for out in outputs
    )


def _canonical_pages(
    outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    return _read(outputs, args[5])


def _canonical_latent(
    outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    return _read(outputs, args[4])


_TOLERANCES = half_and_single(
    half=0.501,
    single=0.501,
    why="an unquantized row is copied, bit for bit; a quantized one is divided in float32 and "
    "rounded once, to fp8, whose half ulp is 2^19 times the error of the division",
)

RESHAPE_AND_CACHE_FLASH = OpContract(
    signature=OpSignature.parse(
        "reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "
        "kv_cache_dtype, k_scale, v_scale)",
        inplace=("key_cache", "value_cache"),
        facts=_pages_facts,
        fact_names=("num_heads", "head_size", "kv_cache_dtype"),
        summary=(
            "Writes the keys and values of slot_mapping.shape[0] tokens to their slots; the "
            "caches are (blocks, block_size, heads, head_size) of any strides, so HND is a "
            "permuted view; kv_cache_dtype is vLLM's string: 'auto' copies, 'fp8', 'fp8_e4m3' "
            "and 'fp8_e5m2' divide by the scale and saturate; returns (key_cache, value_cache)."
        ),
    ),
    schema=(
        "(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, "
        "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> (Tensor, Tensor)"
    ),
    reference=_reshape_and_cache_flash,
    fake=_pages_fake,
    arrays={
        "key": "T[rows, heads, head_size]",
        "value": "T[rows, heads, head_size]",
        "key_cache": "T|uint8|fp8[blocks, block_size, heads, head_size]",
        "value_cache": "T|uint8|fp8[blocks, block_size, heads, head_size]",
        "slot_mapping": "index[tokens]",
        "k_scale": "float32[] or float32[1] or float32[heads]",
        "v_scale": "float32[] or float32[1] or float32[heads]",
    },
    results=(
        "T|uint8|fp8[blocks, block_size, heads, head_size]",
        "T|uint8|fp8[blocks, block_size, heads, head_size]",
    ),
    constraints=("tokens <= rows",),
    without={"leading shapes": "tokens are one dimension, as in vLLM's kernels"},
    exact=_exact_pages,
    canonical=_canonical_pages,
    call_sites=(
        CallSite(
            "vllm._custom_ops:reshape_and_cache_flash",
            "the function, there and where attention backends import it by name",
            device_types=("cuda",),
            note="vLLM on CPU writes a cache of another layout, by cpu_attn_reshape_and_cache; "
            "FlashInfer, FLEX_ATTENTION and AITER call torch's operator, which has no place for us",
        ),
        CallSite(
            "vllm.v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash",
            "the function, there and where TRITON_ATTN imports it by name",
            device_types=("cuda",),
            note="a Triton kernel in vLLM's tree, which needs no compiled extension",
        ),
    ),
    source="vLLM, csrc/libtorch_stable/cache_kernels.cu: reshape_and_cache_flash",
    cases=PAGE_CASES,
    tolerances=_TOLERANCES,
)

CONCAT_AND_CACHE_MLA = OpContract(
    signature=OpSignature.parse(
        "concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)",
        inplace=("kv_cache",),
        facts=_latent_facts,
        fact_names=("kv_lora_rank", "rope_dim", "kv_cache_dtype"),
        summary=(
            "Writes each token's latent kv_c and rotated key k_pe, one behind the other, to its "
            "slot; kv_cache: (blocks, block_size, rank + rope); kv_cache_dtype as in "
            "reshape_and_cache_flash ('fp8_ds_mla' is another layout, and refused)."
        ),
    ),
    schema=(
        "(Tensor kv_c, Tensor k_pe, Tensor kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
        "Tensor scale) -> Tensor"
    ),
    reference=_concat_and_cache_mla,
    fake=_latent_fake,
    arrays={
        "kv_c": "T[rows, rank]",
        "k_pe": "T[rows, rope]",
        "kv_cache": "T|uint8|fp8[blocks, block_size, width]",
        "slot_mapping": "index[tokens]",
        "scale": "float32[] or float32[1]",
    },
    results=("T|uint8|fp8[blocks, block_size, width]",),
    constraints=("tokens <= rows", "width == rank + rope"),
    without={"leading shapes": "tokens are one dimension, as in vLLM's kernels"},
    exact=_exact_latent,
    canonical=_canonical_latent,
    call_sites=(
        CallSite(
            "vllm._custom_ops:concat_and_cache_mla",
            "the function, which the MLA attention calls through its module",
            device_types=("cuda",),
            note="vLLM on CPU has its own, for packed caches of half precision, where the CPU has "
            "AMX: concat_and_cache_mla_cpu",
        ),
    ),
    source="vLLM, csrc/libtorch_stable/cache_kernels.cu: concat_and_cache_mla",
    cases=LATENT_CASES,
    tolerances=_TOLERANCES,
)

CONTRACTS: tuple[OpContract, ...] = (RESHAPE_AND_CACHE_FLASH, CONCAT_AND_CACHE_MLA)
