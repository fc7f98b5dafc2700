# SPDX-License-Identifier: Apache-2.0
"""Watched memory: sizes, strides and sharing are kept, and every written byte is seen."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.testing.memory import (
    bits,
    fresh_memory_is_nan,
    place,
    same_bits,
    share_memory,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
AB = ("a", "b")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[1:, :3],
        lambda x: x.t(),
        lambda x: x[:0],
        lambda x: x[2, 3],
        lambda x: x[:, :1].expand(5, 7),
        lambda x: x[:, ::2],
    ],
    ids=["whole", "slice", "transposed", "empty", "one", "expanded", "steps"],
)
def test_a_view_keeps_its_values_sizes_strides_and_dtype(view, dtype) -> None:
    x = view(torch.arange(40).view(5, 8).remainder(2).to(dtype))
    [placed] = place((x,)).args
    assert (placed.dtype, placed.shape, placed.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(placed.float(), x.float())
    assert placed.data_ptr() % 8 == x.data_ptr() % 8 or not x.numel()


def test_what_is_no_tensor_is_handed_on() -> None:
    assert place((1, None, "none", [2])).args == (1, None, "none", [2])


def test_arguments_of_one_storage_share_one_and_others_do_not() -> None:
    qkv = torch.randn(3, 12)
    q, k, other = place((qkv[:, :4], qkv[:, 4:8], qkv.clone())).args
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert not share_memory(q, k)
    assert other.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


def test_what_lies_beside_an_argument_reads_as_nan() -> None:
    wide = torch.zeros(3, 8)
    [x] = place((wide[:, :5],)).args
    around = x.as_strided((3, 8), (8, 1), x.storage_offset())
    assert around[:, 5:].isnan().all()
    assert x.as_strided((4,), (1,), x.storage_offset() - 4).isnan().all()
    assert x.as_strided((4,), (1,), x.storage_offset() + 24).isnan().all()
    assert not x.isnan().any()


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda a, b: a.zero_(), ["a was written (30 bytes changed)"]),
        (lambda a, b: b[0, :1].add_(1), ["b was written (1 bytes changed)"]),
        (
            lambda a, b: a.as_strided((1,), (1,), a.storage_offset() + 5).zero_(),
            ["4 bytes were written beside a: between its rows or past its ends"],
        ),
        (
            lambda a, b: b.as_strided((1,), (1,), b.storage_offset() + 6).zero_(),
            ["8 bytes were written beside b: between its rows or past its ends"],
        ),
        (
            lambda a, b: a.as_strided((1,), (1,), a.storage_offset() - 1).zero_(),
            ["4 bytes were written beside a: between its rows or past its ends"],
        ),
        (lambda a, b: a.add_(0), []),
        (lambda a, b: (a + 1, b + 1), []),
    ],
    ids=["all", "one element", "between", "behind", "before", "the same", "none"],
)
def test_every_write_is_told(write, says) -> None:
    a, b = torch.ones(3, 8)[:, :5], torch.zeros(2, 3, dtype=torch.int64)
    placed = place((a, b))
    write(*placed.args)
    assert placed.writes(AB, ()) == says


def test_a_declared_write_is_not_told_but_what_is_beside_it_is() -> None:
    placed = place((torch.ones(3, 8)[:, :5], torch.ones(2)))
    a, b = placed.args
    a.zero_()
    assert placed.writes(AB, ("a",)) == []
    a.as_strided((3, 8), (8, 1), a.storage_offset()).zero_()
    b.zero_()
    assert placed.writes(AB, ("a",)) == [
        "36 bytes were written beside a: between its rows or past its ends",
        "b was written (4 bytes changed)",
    ]


def test_sharing_is_told_by_elements_and_not_by_storages() -> None:
    qkv = torch.randn(3, 12)
    placed = place((qkv[:, :4], qkv[:, 4:8]))
    a, b = placed.args
    assert placed.shared_with(a[1:], AB) == ["a"]
    assert placed.shared_with(b, AB) == ["b"]
    both = a.as_strided((3, 8), (12, 1), a.storage_offset())
    assert placed.shared_with(both, AB) == ["a", "b"]
    assert placed.shared_with(a.clone(), AB) == []
    assert share_memory(both, b) and not share_memory(a, b)


def test_equal_bits_are_more_than_equal_values() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero.view(1, 2))
    assert same_bits(None, None) and not same_bits(zero, None)
    assert bits(torch.tensor(1, dtype=torch.int32)).tolist() == [1, 0, 0, 0]


def test_fresh_memory_is_nan_inside_and_settings_are_put_back() -> None:
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    with fresh_memory_is_nan():
        assert torch.empty(1000).isnan().all()
        assert torch.ones(3, 4).new_empty(7).isnan().all()
        assert (torch.empty(5, dtype=torch.int32) == 2**31 - 1).all()
    after = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    assert after == before
