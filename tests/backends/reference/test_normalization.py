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
from vllm_fl.backends.reference.impl.normalization import fused_add_rms_norm, rms_norm

SHAPES = ((1,), (64,), (1, 64), (7, 33), (3, 5, 24), (2, 1, 3, 8), (0, 64), (2, 0, 6))


def layer(layers, hidden_size, dtype, **kwargs):
    """A layer of vLLM's whose weight is not all ones."""
    made = layers.RMSNorm(hidden_size, eps=1e-5, dtype=dtype, **kwargs)
    if made.has_weight:
        made.weight.data.copy_(randn((hidden_size,), dtype, seed=7))
    return made


def weight_of(made):
    return made.weight.data if made.has_weight else None


def both(made, x, residual):
    """(ours, vLLM's) for the layer, with or without a residual."""
    args = (weight_of(made), made.variance_epsilon, made.variance_size_override)
    if residual is None:
        return rms_norm(x, *args), made.forward_native(x)
    return (
        fused_add_rms_norm(x, residual, *args),
        made.forward_native(x.clone(), residual.clone()),
    )


@pytest.mark.parametrize("with_residual", (False, True), ids=("alone", "residual"))
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_norms_are_vllms_native_bit_for_bit(vllm_layers, dtype, shape, with_residual):
    x = randn(shape, dtype)
    residual = randn(shape, dtype, seed=1) if with_residual else None
    assert_same(*both(layer(vllm_layers, shape[-1], dtype), x, residual))


@pytest.mark.parametrize("with_residual", (False, True), ids=("alone", "residual"))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda d: f"weight-{name_of(d)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_weight_of_another_dtype_is_served_as_vllm_does(
    vllm_layers, dtype, weight_dtype, with_residual
):
    x = randn((5, 64), dtype)
    residual = randn((5, 64), dtype, seed=1) if with_residual else None
    found, expected = both(layer(vllm_layers, 64, weight_dtype), x, residual)
    assert_same(found, expected)
    assert (found[0] if with_residual else found).dtype is dtype


@pytest.mark.parametrize("with_residual", (False, True), ids=("alone", "residual"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_layer_without_weight_is_served_as_vllm_does(vllm_layers, dtype, with_residual):
    x = randn((5, 64), dtype)
    residual = randn((5, 64), dtype, seed=1) if with_residual else None
    assert_same(*both(layer(vllm_layers, 64, dtype, has_weight=False), x, residual))


@pytest.mark.parametrize("with_residual", (False, True), ids=("alone", "residual"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_variance_of_a_part_is_taken_as_vllm_does(vllm_layers, dtype, with_residual):
    x = randn((5, 64), dtype)
    residual = randn((5, 64), dtype, seed=1) if with_residual else None
    made = layer(vllm_layers, 64, dtype, var_hidden_size=24)
    assert made.variance_size_override == 24
    found, expected = both(made, x, residual)
    assert_same(found, expected)
    whole, _ = both(layer(vllm_layers, 64, dtype), x, residual)
    assert not torch.equal(whole[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinities_and_nan_come_out_where_vllms_native_has_them(vllm_layers, dtype):
    x = randn((5, 64), dtype)
    x[:4, 3] = torch.tensor([float("inf"), -float("inf"), float("nan"), 6e4])
    made = layer(vllm_layers, 64, dtype)
    found, expected = both(made, x, None)
    assert expected.isnan().any()
    assert_same(found, expected)
    found, expected = both(made, x, x.clone())
    assert expected[1].isinf().any()
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_an_epsilon_of_zero_makes_a_row_of_zeros_nan_as_in_vllm(vllm_layers, dtype):
    made = vllm_layers.RMSNorm(64, eps=0.0, dtype=dtype)
    x = torch.zeros(2, 64, dtype=dtype)
    found, expected = both(made, x, None)
    assert expected.isnan().all()
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_slices_of_a_wider_tensor_give_what_vllms_native_gives(vllm_layers, dtype):
    x = randn((5, 3, 96), dtype)[:, 1, 7:71]
    residual = randn((64, 5), dtype).t()
    made = layer(vllm_layers, 64, dtype)
    assert_same(*both(made, x, None))
    assert_same(*both(made, x, residual))


@pytest.mark.parametrize("variance_size", (None, 24), ids=lambda v: f"variance-{v}")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rms_norm_is_near_the_float64_formula(dtype, variance_size):
    """In half precision the normalized value is rounded before the product: twice in all."""
    x, weight = 3 * randn((32, 576), dtype), randn((576,), dtype, seed=7)
    expected = truth.rms_norm(x, weight, 1e-5, variance_size)
    tolerance = (
        truth.rms_norm_float32_error(expected, 576)
        + expected.abs() * torch.finfo(dtype).eps / 2
        + rounding(expected, dtype)
    )
    assert_within(rms_norm(x, weight, 1e-5, variance_size), expected, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_fused_add_rms_norm_is_near_the_float64_formula(dtype):
    """The sum is rounded once; the norm is of the float32 sum, whose elements are off by one
    unit of float32 each, and is rounded twice as above."""
    x, residual = 3 * randn((32, 576), dtype), randn((32, 576), dtype, seed=1)
    weight = randn((576,), dtype, seed=7)
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    exact = x.double() + residual.double()
    assert_within(total, exact, exact.abs() * 2.0**-24 + rounding(exact, dtype))
    expected = truth.rms_norm(exact, weight, 1e-5)
    tolerance = (
        truth.rms_norm_float32_error(expected, 576 + 16)
        + expected.abs() * torch.finfo(dtype).eps / 2
        + rounding(expected, dtype)
    )
    assert_within(out, expected, tolerance)


@pytest.mark.parametrize("weight", (True, False), ids=("weight", "no-weight"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_inputs_are_neither_written_nor_returned(dtype, weight):
    x, residual = randn((5, 64), dtype), randn((5, 64), dtype, seed=1)
    scale = randn((64,), dtype) if weight else None
    inputs = [t for t in (x, residual, scale) if t is not None]
    before = [bits(t).clone() for t in inputs]
    outputs = (rms_norm(x, scale, 1e-5), *fused_add_rms_norm(x, residual, scale, 1e-5))
    for out in outputs:
        out.zero_()
    assert all(torch.equal(bits(t), b) for t, b in zip(inputs, before, strict=True))
