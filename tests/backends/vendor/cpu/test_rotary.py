# SPDX-License-Identifier: Apache-2.0
"""The kernel computes in float32 and rounds once, in place."""

from __future__ import annotations

import pytest
import torch

from tests.backends import truth
from tests.backends.helpers import (
    DIES,
    assert_same,
    assert_within,
    at_offset,
    bits,
    in_child,
    name_of,
    off_by,
    randn,
    rounding,
)
from tests.backends.vendor.cpu.refusals import SERVED, SERVED_HALF
from vllm_fl.backends.reference.impl import rotary as reference
from vllm_fl.backends.vendor.cpu.impl.rotary import rotary_embedding

pytestmark = pytest.mark.usefixtures("kernels")

STYLES = (True, False)
STYLE_IDS = ("neox", "gptj")
HEADS = ((64, 64), (128, 128), (64, 32), (80, 80), (96, 48), (256, 16), (40, 32))
"""(head_size, rotary_dim); vectors of 8 divide the heads, and both halves of what turns."""


def cache_of(rotary_dim, dtype):
    angles = randn((64, rotary_dim // 2), torch.float32, seed=3)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def some_positions(*shape):
    return ((torch.arange(torch.Size(shape).numel()) * 37) % 64).view(shape)


@pytest.mark.parametrize("tokens", (1, 7))
@pytest.mark.parametrize("head_size, rotary_dim", HEADS)
@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_rotation_is_rounded_once_from_the_float64_formula(
    dtype, is_neox, head_size, rotary_dim, tokens
):
    positions, cache = some_positions(tokens), cache_of(rotary_dim, dtype)
    query = randn((tokens, 3 * head_size), dtype)
    key = randn((tokens, 2 * head_size), dtype, seed=1)
    originals = (query.clone(), key.clone())
    rotated = rotary_embedding(positions, query, key, head_size, cache, is_neox)
    for found, original in zip(rotated, originals, strict=True):
        expected, size = truth.rotary_embedding(positions, original, head_size, cache, is_neox)
        tolerance = truth.rotary_float32_error(size) + rounding(expected, dtype)
        assert_within(found, expected, tolerance)
        kept = expected.view(tokens, -1, head_size)[..., rotary_dim:]
        assert_same(found.view(tokens, -1, head_size)[..., rotary_dim:], kept.to(dtype))


@pytest.mark.parametrize("head_size, rotary_dim", ((36, 36), (20, 6), (63, 2), (64, 20)))
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_gptj_style_turns_sizes_that_no_vector_divides(dtype, head_size, rotary_dim):
    positions, cache = some_positions(5), cache_of(rotary_dim, dtype)
    query = randn((5, 3 * head_size), dtype)
    expected, size = truth.rotary_embedding(positions, query, head_size, cache, False)
    found, _ = rotary_embedding(positions, query, None, head_size, cache, False)
    assert_within(found, expected, truth.rotary_float32_error(size) + rounding(expected, dtype))


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_rotation_is_within_the_roundings_of_the_reference(dtype, is_neox):
    """One here; there both products, then their sum."""
    positions, cache, query = some_positions(64), cache_of(64, dtype), randn((64, 576), dtype)
    expected, size = truth.rotary_embedding(positions, query, 64, cache, is_neox)
    unit = torch.finfo(dtype).eps / 2
    other = reference.rotary_embedding(positions, query, None, 64, cache, is_neox)[0].double()
    found, _ = rotary_embedding(positions, query, None, 64, cache, is_neox)
    tolerance = (
        2 * truth.rotary_float32_error(size) + size * unit * 1.01 + 2 * rounding(expected, dtype)
    )
    # The reference's sum may round in the next binade: its last place is then twice as wide.
    assert_within(found, other, tolerance + rounding(other, dtype))


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED_HALF, ids=name_of)
def test_half_precision_is_nearer_to_the_truth_than_the_reference(dtype, is_neox):
    positions, cache, query = some_positions(64), cache_of(64, dtype), randn((64, 576), dtype)
    expected, _ = truth.rotary_embedding(positions, query, 64, cache, is_neox)
    other, _ = reference.rotary_embedding(positions, query, None, 64, cache, is_neox)
    found, _ = rotary_embedding(positions, query, None, 64, cache, is_neox)
    ours, theirs = (
        (found.double() - expected).abs().mean(),
        (other.double() - expected).abs().mean(),
    )
    assert ours < 0.9 * theirs


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_query_and_key_split_from_one_projection_turn_in_place_and_the_values_stay(dtype, is_neox):
    positions, cache = some_positions(5), cache_of(64, dtype)
    projected = randn((5, 7 * 64), dtype)
    query, key, value = projected.split((3 * 64, 2 * 64, 2 * 64), dim=-1)
    kept = value.clone()
    expected = rotary_embedding(positions, query.clone(), key.clone(), 64, cache, is_neox)
    found = rotary_embedding(positions, query, key, 64, cache, is_neox)
    assert found[0] is query and found[1] is key
    assert_same(found, expected)
    assert_same(value, kept)


def query_of_batch(dtype):
    return randn((2, 3, 128), dtype)


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_a_batch_of_sequences_turns_as_its_tokens_do(dtype, is_neox):
    cache, query = cache_of(64, dtype), query_of_batch(dtype)
    flat = query.clone().view(6, 128)
    found, _ = rotary_embedding(some_positions(2, 3), query, None, 64, cache, is_neox)
    expected, _ = rotary_embedding(some_positions(6), flat, None, 64, cache, is_neox)
    assert_same(found, expected.view(2, 3, 128))
    flat = query_of_batch(dtype).view(6, 128)
    found, _ = rotary_embedding(some_positions(2, 3), flat, None, 64, cache, is_neox)
    assert_same(found, expected)


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
def test_no_tokens_stay_none(is_neox):
    query, key, _ = torch.empty(0, 320).split((128, 64, 128), dim=-1)
    found = rotary_embedding(some_positions(0), query, key, 64, cache_of(64, query.dtype), is_neox)
    assert (found[0].shape, found[1].shape) == ((0, 128), (0, 64))


@pytest.mark.parametrize("elements", (1, 3, 4, 8))
@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_where_the_arguments_start_in_memory_does_not_matter(dtype, is_neox, elements):
    """In a child: bfloat16 in neox style at an odd address ended the process."""
    positions, cache = some_positions(5), cache_of(64, dtype)
    query, key = randn((5, 192), dtype), randn((5, 128), dtype)

    def moved(tensor):
        return at_offset(tensor, elements)

    def experiment():
        expected = rotary_embedding(positions, query.clone(), key.clone(), 64, cache, is_neox)
        args = (moved(positions), moved(query), moved(key), 64, moved(cache), is_neox)
        found = rotary_embedding(*args)
        assert found[0] is args[1] and found[1] is args[2]
        assert_same(found, expected)
        return "right"

    assert in_child(experiment) == "returned right"


@pytest.mark.usefixtures("aligned_stores")
@pytest.mark.parametrize("which", (1, 2), ids=("query", "key"))
def test_the_kernel_itself_ends_the_process_where_it_writes_at_an_odd_address(kernels, which):
    dtype = torch.bfloat16
    args = [some_positions(5), randn((5, 128), dtype), randn((5, 64), dtype)]
    args[which] = at_offset(args[which], 4)
    found = in_child(lambda: kernels.rotary_embedding(*args, 64, cache_of(64, dtype), True))
    assert found.startswith(DIES)


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
def test_a_key_that_is_the_query_is_turned_once(is_neox):
    positions, cache = some_positions(5), cache_of(64, torch.float32)
    query = randn((5, 128), torch.float32)
    expected, _ = rotary_embedding(positions, query.clone(), None, 64, cache, is_neox)
    found = rotary_embedding(positions, query, query, 64, cache, is_neox)
    assert found[0] is query and found[1] is query
    assert_same(query, expected)


def test_the_kernel_itself_turns_twice_a_key_that_is_the_query(kernels):
    positions, cache = some_positions(5), cache_of(64, torch.float32)
    query = randn((5, 128), torch.float32)
    expected, _ = rotary_embedding(positions, query.clone(), None, 64, cache, True)
    kernels.rotary_embedding(positions, query, query, 64, cache, True)
    assert off_by(query, expected) > 0.5


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_infinities_and_nan_are_where_the_reference_has_them(dtype, is_neox):
    positions, cache, query = some_positions(4), cache_of(32, dtype), randn((4, 64), dtype)
    query[:, 3] = torch.tensor([float("inf"), -float("inf"), float("nan"), 6e4])
    expected, _ = reference.rotary_embedding(positions, query, None, 64, cache, is_neox)
    found, _ = rotary_embedding(positions, query, None, 64, cache, is_neox)
    assert expected.isnan().any() and expected.isinf().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_positions_and_cache_are_never_written(dtype, is_neox):
    positions, cache = some_positions(5), cache_of(64, dtype)
    before = [bits(positions).clone(), bits(cache).clone()]
    rotary_embedding(positions, randn((5, 192), dtype), randn((5, 64), dtype), 64, cache, is_neox)
    assert torch.equal(bits(positions), before[0]) and torch.equal(bits(cache), before[1])


def test_a_position_beyond_the_cache_reads_whatever_lies_behind_it():
    """No guard can refuse it, because positions are data; vLLM bounds them by max_model_len."""
    cache = torch.cat((cache_of(64, torch.float32), torch.full((64, 64), 1000.0)))[:64]
    query = randn((1, 64), torch.float32)
    found, _ = rotary_embedding(torch.tensor([64]), query, None, 64, cache, True)
    assert found.abs().max() > 100
