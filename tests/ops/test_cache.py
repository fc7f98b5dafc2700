# SPDX-License-Identifier: Apache-2.0
"""The cache ops against a cache that is a dict of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_fl.backends.reference.impl import cache as in_place
from vllm_fl.ops.cache import CONTRACTS, FP8, RESHAPE_AND_CACHE_FLASH
from vllm_fl.ops.contract import OpContract
from vllm_fl.testing import outputs_of, worst_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY_CASE = [
    pytest.param(contract, case, id=f"{contract.name}-{case.name}")
    for contract in CONTRACTS
    for case in contract.cases
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(contract: OpContract, name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return next(c for c in contract.cases if c.name == name).make(dtype, generator())


def parts(contract: OpContract, args: tuple[Any, ...]) -> list[tuple[torch.Tensor, ...]]:
    """(rows, cache, scale) of each cache, the rows one for each slot."""
    if contract is RESHAPE_AND_CACHE_FLASH:
        key, value, key_cache, value_cache, slots, _, k_scale, v_scale = args
        count = slots.shape[0]
        return [(key[:count], key_cache, k_scale), (value[:count], value_cache, v_scale)]
    kv_c, k_pe, cache, slots, _, scale = args
    count = slots.shape[0]
    return [(torch.cat((kv_c[:count], k_pe[:count]), dim=1), cache, scale)]


def slots_of(contract: OpContract, args: tuple[Any, ...]) -> list[int]:
    return args[contract.signature.parameter_names.index("slot_mapping")].tolist()


def numbers(cache: torch.Tensor, kind: str) -> torch.Tensor:
    """A cache in float64."""
    return (cache.view(FP8[kind]) if cache.dtype is torch.uint8 else cache).double()


def nearest(values: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """The finite fp8 number that is nearest, looked up in the table of all of them."""
    table = torch.arange(256, dtype=torch.uint8).view(fp8).double()
    table = table[table.isfinite()].unique()
    index = torch.searchsorted(table, values.contiguous()).clamp(1, table.numel() - 1)
    low, high = table[index - 1], table[index]
    return torch.where((values - low) <= (high - values), low, high)


@each_dtype
@pytest.mark.parametrize(("contract", "case"), EVERY_CASE)
def test_a_cache_that_is_a_dict_of_slots_holds_the_same(contract, case, dtype) -> None:
    args = case.make(dtype, generator())
    kind = args[contract.signature.parameter_names.index("kv_cache_dtype")]
    new_caches = outputs_of(contract.reference(*args))
    for (rows, cache, scale), new in zip(parts(contract, args), new_caches, strict=True):
        block_size, before = cache.shape[1], numbers(cache, kind)
        held = {
            block * block_size + row: before[block, row]
            for block in range(cache.shape[0])
            for row in range(block_size)
        }
        written = set()
        for token, slot in enumerate(slots_of(contract, args)):
            if slot < 0:
                continue
            row = rows[token].double()
            if kind != "auto":
                row = row / (scale.double()[:, None] if scale.numel() > 1 else scale.double())
            held[slot] = row
            written.add(slot)
        after = numbers(new, kind)
        for slot, expected in held.items():
            found = after[slot // block_size, slot % block_size]
            if kind == "auto" or slot not in written:
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                continue
            limit = torch.finfo(FP8[kind]).max
            wanted = expected.clamp(-limit, limit)
            assert torch.equal(found.isnan(), wanted.isnan())
            best = (nearest(wanted, FP8[kind]) - wanted).abs()
            # A quotient in float32 may fall to the other side of a tie.
            slack = wanted.abs() * 2.0**-23
            assert ((found - wanted).abs() <= best + slack)[~wanted.isnan()].all()


@pytest.mark.parametrize(("contract", "case"), EVERY_CASE)
def test_in_place_nothing_but_the_slots_is_written_whatever_the_strides(contract, case) -> None:
    args = case.make(torch.bfloat16, generator())
    expected = outputs_of(contract.reference(*args))
    caches = [args[contract.signature.parameter_names.index(n)] for n in contract.signature.inplace]
    memory = [torch.empty(0, dtype=torch.uint8).set_(c.untyped_storage()) for c in caches]
    before = [(m.clone(), c.clone()) for m, c in zip(memory, caches, strict=True)]
    result = outputs_of(getattr(in_place, contract.name)(*args))
    for cache, out, want in zip(caches, result, expected, strict=True):
        assert out is cache
        assert torch.equal(bits(cache), bits(want))
    for cache, (_, kept) in zip(caches, before, strict=True):
        cache.copy_(kept)  # then all of the memory is as it was, gaps and neighbours as well
    for now, (then, _) in zip(memory, before, strict=True):
        assert torch.equal(now, then)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


@each_contract
def test_rows_beyond_the_slots_are_not_read(contract) -> None:
    args = make(contract, "more rows than slots")
    count = len(slots_of(contract, args))
    for rows in args[:2]:
        rows[count:] = float("nan")
    for new in outputs_of(contract.reference(*args)):
        assert not new.isnan().any()


@each_contract
def test_a_functional_call_leaves_its_arguments_alone(contract) -> None:
    for case in contract.cases:
        args = case.make(torch.float16, generator())
        kept = [bits(a).clone() if isinstance(a, torch.Tensor) else a for a in args]
        outputs = outputs_of(contract.reference(*args))
        for given, before in zip(args, kept, strict=True):
            if isinstance(given, torch.Tensor):
                assert torch.equal(bits(given), before), case.name
                assert all(o.data_ptr() != given.data_ptr() or not o.numel() for o in outputs)


@each_contract
def test_what_a_cache_cannot_hold_is_an_error_that_lists_what_it_can(contract) -> None:
    args = list(make(contract, "fp8"))
    index = contract.signature.parameter_names.index("kv_cache_dtype")
    for wrong in ("fp8_ds_mla", "nvfp4"):
        args[index] = wrong
        with pytest.raises(ValueError, match=rf"'{wrong}' is none .*auto.*fp8, fp8_e4m3, fp8_e5m2"):
            contract.reference(*args)
    args = list(make(contract, "fp8_e5m2"))
    args[index] = "fp8"
    with pytest.raises(ValueError, match=r"'fp8' needs a cache of uint8 or torch.float8_e4m3fn"):
        contract.reference(*args)
    args = list(make(contract, "one token"))
    args[index] = "fp8"
    with pytest.raises(ValueError, match=r"found torch.float32"):
        contract.reference(*args)


@each_contract
def test_a_cache_without_blocks_takes_padding(contract) -> None:
    args = make(contract, "only negative slots")
    empty = tuple(
        a[:0] if name.endswith("cache") else a
        for name, a in zip(contract.signature.parameter_names, args, strict=True)
    )
    assert all(new.numel() == 0 for new in outputs_of(contract.reference(*empty)))


@each_contract
def test_the_reference_depends_on_no_data_for_its_shapes(contract) -> None:
    compiled = torch.compile(contract.reference, fullgraph=True, backend="aot_eager")
    for name in ("negative slots are skipped", "fp8"):
        torch.compiler.reset()
        args = make(contract, name)
        for found, expected in zip(
            outputs_of(compiled(*args)), outputs_of(contract.reference(*args)), strict=True
        ):
            assert torch.equal(bits(found), bits(expected))


# ------------------------------------------------------------------- wrong ones are found out


def as_if_packed(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
    """Takes every block to be packed (block_size, heads, head_size)."""
    results = []
    for rows, cache in ((key, key_cache), (value, value_cache)):
        flat = torch.as_strided(
            cache.clone(), cache.shape, (cache.stride(0), *cache[0].contiguous().stride())
        ).clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                flat[slot // cache.shape[1], slot % cache.shape[1]] = rows[token]
        results.append(
            torch.as_strided(flat, cache.shape, cache.stride()) if flat.numel() else flat
        )
    return tuple(results)


def with_arguments(**changes):
    """The reference, called with other arguments than it was given."""

    def wrong(*args):
        names = RESHAPE_AND_CACHE_FLASH.signature.parameter_names
        changed = [
            changes[n](a, args) if n in changes else a for n, a in zip(names, args, strict=True)
        ]
        return RESHAPE_AND_CACHE_FLASH.reference(*changed)

    return wrong


WRONG = {
    "an HND cache taken for a packed one": (as_if_packed, "HND, a permuted cache"),
    "no scale": (with_arguments(k_scale=lambda a, _: torch.ones_like(a)), "fp8"),
    "one scale for all heads": (
        with_arguments(v_scale=lambda a, _: a[:1]),
        "fp8, scale for each head",
    ),
    "the scale multiplied": (with_arguments(k_scale=lambda a, _: 1 / a), "fp8"),
    "a negative slot taken for the last": (
        with_arguments(slot_mapping=lambda a, _: torch.where(a < 0, 31, a)),
        "negative slots are skipped",
    ),
    "a negative slot taken for the first": (
        with_arguments(slot_mapping=lambda a, _: a.clamp(min=0)),
        "only negative slots",
    ),
    "the last row left out": (
        with_arguments(slot_mapping=lambda a, _: a[:-1]),
        "one token",
    ),
    "e4m3 for e5m2": (
        with_arguments(kv_cache_dtype=lambda a, _: "fp8_e4m3"),
        "fp8_e5m2 in uint8",
    ),
    "values for keys": (with_arguments(key=lambda _, args: args[1]), "one token"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_found_out_by_a_case(name) -> None:
    wrong, case = WRONG[name]
    args = make(RESHAPE_AND_CACHE_FLASH, case, torch.bfloat16)
    tolerance = RESHAPE_AND_CACHE_FLASH.tolerances[torch.bfloat16]
    errors = worst_errors(RESHAPE_AND_CACHE_FLASH, wrong(*args), args)
    assert any(error > tolerance.for_output(i) for i, error in enumerate(errors)), errors


def test_an_fp8_cache_that_does_not_saturate_is_found_out() -> None:
    def overflowing(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
        new = RESHAPE_AND_CACHE_FLASH.reference(
            key, value, key_cache, value_cache, slots, kind, k_scale, v_scale
        )
        return tuple(torch.where(cache == 0x7E, 0x7F, cache) for cache in new)  # 448 to NaN

    name = "fp8, huge values saturate"
    args = make(RESHAPE_AND_CACHE_FLASH, name, torch.bfloat16)
    assert max(worst_errors(RESHAPE_AND_CACHE_FLASH, overflowing(*args), args)) > 1
