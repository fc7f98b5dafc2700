# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.backends import truth
from tests.backends.helpers import (
    DTYPES,
    assert_same,
    assert_within,
    bits,
    name_of,
    randn,
    rounding,
)
from vllm_fl.backends.reference.impl.rotary import rotary_embedding

STYLES = (True, False)
STYLE_IDS = ("neox", "gptj")
HEADS = ((64, 64), (64, 16), (80, 20), (6, 2), (36, 36))
"""(head_size, rotary_dim): whole, partial, and sizes that no vector divides."""


def layer(layers, head_size, rotary_dim, is_neox, dtype):
    return layers.RotaryEmbedding(head_size, rotary_dim, 128, 10000, is_neox, dtype)


def some_positions(tokens):
    return (torch.arange(tokens) * 37) % 128


def both(made, positions, query, key):
    args = (positions, query, key)
    ours = rotary_embedding(*args, made.head_size, made.cos_sin_cache, made.is_neox_style)
    return ours, made.forward_native(positions, query.clone(), None if key is None else key.clone())


@pytest.mark.parametrize("tokens", (1, 7))
@pytest.mark.parametrize("head_size, rotary_dim", HEADS)
@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rotation_is_vllms_native_bit_for_bit(
    vllm_layers, dtype, is_neox, head_size, rotary_dim, tokens
):
    made = layer(vllm_layers, head_size, rotary_dim, is_neox, dtype)
    query = randn((tokens, 3 * head_size), dtype)
    key = randn((tokens, 2 * head_size), dtype, seed=1)
    assert_same(*both(made, some_positions(tokens), query, key))
    assert_same(*both(made, some_positions(tokens), query, None))


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_query_and_key_split_from_one_projection_give_what_vllm_gives(vllm_layers, dtype, is_neox):
    made = layer(vllm_layers, 64, 64, is_neox, dtype)
    query, key, _ = randn((5, 7 * 64), dtype).split((3 * 64, 2 * 64, 2 * 64), dim=-1)
    ours = rotary_embedding(some_positions(5), query, key, 64, made.cos_sin_cache, is_neox)
    assert_same(ours, made.forward_native(some_positions(5), query, key))


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_heads_and_batches_as_dimensions_of_their_own_give_what_vllm_gives(
    vllm_layers, dtype, is_neox
):
    made = layer(vllm_layers, 64, 32, is_neox, dtype)
    heads = randn((6, 3, 64), dtype)
    assert_same(*both(made, some_positions(6), heads, heads[:, :2]))
    batch = randn((2, 3, 128), dtype)
    assert_same(*both(made, some_positions(6).view(2, 3), batch, None))
    assert_same(*both(made, some_positions(6).view(2, 3), batch.view(6, 128), None))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_cache_of_another_dtype_and_32_bit_positions_give_what_vllm_gives(vllm_layers, dtype):
    made = layer(vllm_layers, 64, 64, True, torch.float32)
    query, positions = randn((5, 128), dtype), some_positions(5)
    ours = rotary_embedding(positions, query, None, 64, made.cos_sin_cache, True)
    assert_same(ours, made.forward_native(positions, query))
    ours = rotary_embedding(positions.int(), query, None, 64, made.cos_sin_cache, True)
    assert_same(ours, made.forward_native(positions, query))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinities_and_nan_come_out_where_vllms_native_has_them(vllm_layers, dtype):
    made = layer(vllm_layers, 64, 32, True, dtype)
    query = randn((4, 64), dtype)
    query[:, 3] = torch.tensor([float("inf"), -float("inf"), float("nan"), 6e4])
    ours, theirs = both(made, some_positions(4), query, None)
    assert theirs[0].isnan().any() and theirs[0].isinf().any()
    assert_same(ours, theirs)


@pytest.mark.parametrize("shape", ((0, 128), (0, 2, 64)), ids=name_of)
@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
def test_no_tokens_give_empty_tensors_of_the_same_shape(is_neox, shape):
    query, cache = torch.empty(shape), torch.empty(128, 64)
    positions = torch.empty(0, dtype=torch.int64)
    assert_same(rotary_embedding(positions, query, None, 64, cache, is_neox), (query, None))
    found = rotary_embedding(positions, query, query.clone(), 64, cache, is_neox)
    assert_same(found, (query, query))


def test_a_batch_whose_rows_do_not_follow_each_other_gives_what_its_copy_gives():
    """vLLM's own forward raises here: it asks for a view."""
    query = randn((2, 8, 128), torch.float32)[:, :3]
    positions, cache = some_positions(6).view(2, 3), randn((128, 64), torch.float32)
    for is_neox in STYLES:
        found = rotary_embedding(positions, query, None, 64, cache, is_neox)
        assert_same(found, rotary_embedding(positions, query.clone(), None, 64, cache, is_neox))


@pytest.mark.parametrize("head_size, rotary_dim", HEADS)
@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rotation_is_near_the_float64_formula(dtype, is_neox, head_size, rotary_dim):
    """Half precision rounds both products, then their sum."""
    positions = some_positions(9)
    cache, query = randn((128, rotary_dim), dtype), randn((9, 3 * head_size), dtype, seed=1)
    expected, size = truth.rotary_embedding(positions, query, head_size, cache, is_neox)
    found, _ = rotary_embedding(positions, query, None, head_size, cache, is_neox)
    unit = torch.finfo(dtype).eps / 2
    tolerance = truth.rotary_float32_error(size) + size * unit * 1.01 + rounding(expected, dtype)
    assert_within(found, expected, tolerance)


@pytest.mark.parametrize("is_neox", STYLES, ids=STYLE_IDS)
@pytest.mark.parametrize("tokens", (0, 5))
def test_inputs_are_neither_written_nor_returned(tokens, is_neox):
    inputs = [
        some_positions(tokens),
        randn((tokens, 192), torch.bfloat16),
        randn((tokens, 128), torch.bfloat16),
        randn((128, 64), torch.bfloat16),
    ]
    before = [bits(t).clone() for t in inputs]
    positions, query, key, cache = inputs
    outputs = rotary_embedding(positions, query, key, 64, cache, is_neox)
    for out, original in zip(outputs, (query, key), strict=True):
        assert out is not original
        out.zero_()
    assert all(torch.equal(bits(t), b) for t, b in zip(inputs, before, strict=True))


def test_a_position_beyond_the_cache_raises():
    with pytest.raises(IndexError, match="out of range"):
        rotary_embedding(
            torch.tensor([128]), torch.zeros(1, 64), None, 64, torch.zeros(128, 64), True
        )
