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
from vllm_fl.backends.reference.impl.activation import gelu_and_mul, silu_and_mul

SHAPES = ((2,), (16,), (1, 64), (7, 34), (3, 5, 24), (2, 1, 3, 8), (0, 64), (2, 0, 6))
APPROXIMATIONS = ("none", "tanh")
EDGES = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 88.0, -88.0, -104.0, 3e4, -3e4, 1e-8)


def with_edges(dtype: torch.dtype) -> torch.Tensor:
    """Every edge value as gate with 1 and as up with 2."""
    edges = torch.tensor(EDGES, dtype=dtype)
    one, two = torch.ones_like(edges), torch.full_like(edges, 2)
    return torch.cat((torch.cat((edges, two)), torch.cat((one, edges)))).view(2, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_silu_and_mul_is_vllms_native_bit_for_bit(vllm_layers, dtype, shape):
    x = randn(shape, dtype)
    assert_same(silu_and_mul(x), vllm_layers.SiluAndMul.forward_native(x))


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gelu_and_mul_is_vllms_native_bit_for_bit(vllm_layers, dtype, approximate, shape):
    x = randn(shape, dtype)
    assert_same(gelu_and_mul(x, approximate), vllm_layers.GeluAndMul(approximate).forward_native(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinities_and_nan_come_out_where_vllms_native_has_them(vllm_layers, dtype):
    x = with_edges(dtype)
    expected = vllm_layers.SiluAndMul.forward_native(x)
    assert expected.isnan().any() and expected.isinf().any()
    assert_same(silu_and_mul(x), expected)
    for approximate in APPROXIMATIONS:
        expected = vllm_layers.GeluAndMul(approximate).forward_native(x)
        assert_same(gelu_and_mul(x, approximate), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_slice_of_a_wider_tensor_gives_what_its_copy_gives(vllm_layers, dtype):
    view = randn((5, 3, 96), dtype)[:, 1, 7:71]
    assert not view.is_contiguous()
    assert_same(silu_and_mul(view), vllm_layers.SiluAndMul.forward_native(view))
    assert_same(silu_and_mul(view), silu_and_mul(view.clone()))
    assert_same(gelu_and_mul(view), gelu_and_mul(view.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_both_are_near_the_float64_formula(dtype):
    """In half precision the activation is rounded before the product: twice in all."""
    x = 4 * randn((64, 96), dtype)
    unit = torch.finfo(dtype).eps / 2
    expected = truth.silu_and_mul(x)
    tolerance = truth.silu_float32_error(x, expected) + expected.abs() * unit
    assert_within(silu_and_mul(x), expected, tolerance + rounding(expected, dtype))
    for approximate in APPROXIMATIONS:
        expected = truth.gelu_and_mul(x, approximate)
        tolerance = truth.gelu_float32_error(x) + expected.abs() * unit * 1.01
        assert_within(gelu_and_mul(x, approximate), expected, tolerance + rounding(expected, dtype))


def test_gelu_defaults_to_the_exact_form():
    x = randn((3, 32), torch.float32)
    assert_same(gelu_and_mul(x), gelu_and_mul(x, "none"))
    assert not torch.equal(gelu_and_mul(x), gelu_and_mul(x, "tanh"))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_input_is_neither_written_nor_returned(dtype):
    x = with_edges(dtype)
    before = bits(x).clone()
    outputs = (silu_and_mul(x), gelu_and_mul(x), gelu_and_mul(x, "tanh"))
    assert torch.equal(bits(x), before)
    for out in outputs:
        out.zero_()
    assert torch.equal(bits(x), before)
