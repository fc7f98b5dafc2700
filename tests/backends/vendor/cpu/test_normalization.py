# SPDX-License-Identifier: Apache-2.0
"""The kernels compute in float32 and round once; fused_add_rms_norm rounds the sum before."""

from __future__ import annotations

import pytest
import torch

from tests.backends import truth
from tests.backends.helpers import (
    DIES,
    FLOAT32_UNIT,
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
from vllm_fl.backends.reference.impl import normalization as reference
from vllm_fl.backends.vendor.cpu.impl.normalization import fused_add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = ((8,), (1, 8), (1, 64), (7, 576), (3, 5, 64), (2, 3, 4, 128), (5, 1000), (64, 96))
WEIGHTS = (True, False)
WEIGHT_IDS = ("weight", "no-weight")
EPSILONS = (0.0, 1e-12, 1e-6, 1.0)


def weight_for(x, wanted):
    return randn((x.shape[-1],), x.dtype, seed=7) if wanted else None


@pytest.mark.parametrize("weighted", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_rms_norm_is_rounded_once_from_the_float64_formula(dtype, shape, weighted):
    x = 3 * randn(shape, dtype)
    weight = weight_for(x, weighted)
    expected = truth.rms_norm(x, weight, 1e-5)
    tolerance = truth.rms_norm_float32_error(expected, shape[-1]) + rounding(expected, dtype)
    found = rms_norm(x, weight, 1e-5)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert_within(found, expected, tolerance)


@pytest.mark.parametrize("weighted", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_fused_add_rms_norm_is_the_rounded_sum_and_its_norm(dtype, shape, weighted):
    """The norm is of the rounded sum, whose elements are off by one unit of the dtype each; the
    variance is of the float32 sum."""
    x, residual = 3 * randn(shape, dtype), randn(shape, dtype, seed=1)
    weight = weight_for(x, weighted)
    out, total = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    exact = x.double() + residual.double()
    assert_within(total, exact, exact.abs() * FLOAT32_UNIT + rounding(exact, dtype))
    expected = truth.rms_norm(exact, weight, 1e-5)
    unit = torch.finfo(dtype).eps / 2
    tolerance = (
        truth.rms_norm_float32_error(expected, shape[-1] + 16)
        + expected.abs() * unit * 1.01
        + rounding(expected * (1 + unit), dtype)
    )
    assert_within(out, expected, tolerance)


@pytest.mark.parametrize("weighted", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_norms_are_within_the_roundings_of_the_reference(dtype, weighted):
    """Of rms_norm one here and two there; of fused_add_rms_norm two here and two there."""
    x, residual = 3 * randn((64, 576), dtype), randn((64, 576), dtype, seed=1)
    weight = weight_for(x, weighted)
    unit = torch.finfo(dtype).eps / 2
    expected = reference.rms_norm(x, weight, 1e-5).double()
    error = 2 * truth.rms_norm_float32_error(expected, 576)
    floor = 2 * torch.finfo(dtype).smallest_normal
    assert_within(rms_norm(x, weight, 1e-5), expected, error + expected.abs() * unit * 3.05 + floor)
    norm, total = reference.fused_add_rms_norm(x, residual, weight, 1e-5)
    found, found_total = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert_same(found_total, total)
    expected = norm.double()
    error = 2 * truth.rms_norm_float32_error(expected, 576 + 16)
    assert_within(found, expected, error + expected.abs() * unit * 4.05 + floor)


@pytest.mark.parametrize("dtype", SERVED_HALF, ids=name_of)
def test_half_precision_is_nearer_to_the_truth_than_the_reference(dtype):
    x = randn((64, 576), dtype)
    weight = weight_for(x, True)
    expected = truth.rms_norm(x, weight, 1e-5)
    ours = (rms_norm(x, weight, 1e-5).double() - expected).abs().mean()
    theirs = (reference.rms_norm(x, weight, 1e-5).double() - expected).abs().mean()
    assert ours < 0.9 * theirs


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_epsilon_counts_also_when_it_is_zero(dtype, epsilon):
    x = 0.01 * randn((5, 64), dtype)
    weight = weight_for(x, True)
    expected = truth.rms_norm(x, weight, epsilon)
    tolerance = truth.rms_norm_float32_error(expected, 64) + rounding(expected, dtype)
    assert_within(rms_norm(x, weight, epsilon), expected, tolerance)


def test_an_epsilon_of_zero_makes_a_row_of_zeros_nan_as_in_the_reference():
    x, weight = torch.zeros(2, 64), torch.ones(64)
    assert rms_norm(x, weight, 0.0).isnan().all()
    assert reference.rms_norm(x, weight, 0.0).isnan().all()


@pytest.mark.parametrize("shape", ((0, 64), (2, 0, 8)), ids=name_of)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_no_tokens_give_no_rows(dtype, shape):
    x, weight = torch.empty(shape, dtype=dtype), torch.ones(shape[-1], dtype=dtype)
    assert_same(rms_norm(x, weight, 1e-5), x)
    assert_same(fused_add_rms_norm(x, x.clone(), weight, 1e-5), (x, x))


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize(
    "view",
    (
        lambda x: x[:, 1, 5:69],
        lambda x: x[0].t()[:64].t(),
        lambda x: x[:1, 0, :64].expand(5, 64),
        lambda x: x[:, 0, :1].expand(-1, 64),
        lambda x: x[::2, :, :64],
    ),
    ids=("slice", "transposed", "one-row-repeated", "one-column-repeated", "every-second-row"),
)
def test_rms_norm_of_a_view_is_that_of_its_copy(dtype, view):
    x = view(randn((6, 3, 96), dtype))
    weight = weight_for(x, True)
    assert not x.is_contiguous()
    assert_same(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("elements", (1, 3, 4, 8))
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_where_inputs_start_in_memory_does_not_matter(dtype, elements):
    """In a child: bfloat16 at an odd address ended the process."""
    x, residual = randn((5, 64), dtype), randn((5, 64), dtype, seed=1)
    weight = weight_for(x, True)

    def moved(tensor):
        return at_offset(tensor, elements)

    def experiment():
        assert_same(rms_norm(moved(x), moved(weight), 1e-5), rms_norm(x, weight, 1e-5))
        expected = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        for args in ((moved(x), residual.clone()), (x.clone(), moved(residual))):
            found = fused_add_rms_norm(*args, moved(weight), 1e-5)
            assert found[0] is args[0] and found[1] is args[1]
            assert_same(found, expected)
        return "right"

    assert in_child(experiment) == "returned right"


@pytest.mark.usefixtures("aligned_stores")
@pytest.mark.parametrize("which", (0, 1), ids=("x", "residual"))
def test_the_kernel_itself_ends_the_process_where_it_writes_at_an_odd_address(kernels, which):
    args = [randn((5, 64), torch.bfloat16), randn((5, 64), torch.bfloat16)]
    args[which] = at_offset(args[which], 4)
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert in_child(lambda: kernels.fused_add_rms_norm(*args, weight, 1e-5)).startswith(DIES)


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_x_and_residual_may_be_one_tensor_or_overlap(dtype):
    """Both results cannot be written into one memory: new tensors hold them."""
    weight = randn((64,), dtype, seed=7)
    memory = randn((4, 64), dtype)
    for x, residual in ((memory, memory), (memory[:3], memory[1:]), (memory[1:], memory[:3])):
        kept = memory.clone()
        expected = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        found = fused_add_rms_norm(x, residual, weight, 1e-5)
        assert_same(found, expected)
        assert_same(memory, kept)


def test_neighbours_in_one_memory_are_written_in_place():
    memory, weight = randn((6, 64), torch.float16), torch.ones(64, dtype=torch.float16)
    x, residual = memory[:3], memory[3:]
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert out is x and total is residual


def test_the_kernel_itself_loses_the_sum_where_x_is_the_residual(kernels):
    x, weight = randn((3, 64), torch.float32), torch.ones(64)
    expected = 2 * x
    kernels.fused_add_rms_norm(x, x, weight, 1e-5)
    assert off_by(x, expected) > 0.5


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_infinities_and_nan_are_where_the_reference_has_them(dtype):
    x = randn((4, 64), dtype)
    x[:, 3] = torch.tensor([float("inf"), -float("inf"), float("nan"), 6e4])
    weight = weight_for(x, True)
    pairs = [
        (rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        *zip(
            fused_add_rms_norm(x.clone(), torch.zeros_like(x), weight, 1e-5),
            reference.fused_add_rms_norm(x, torch.zeros_like(x), weight, 1e-5),
            strict=True,
        ),
    ]
    for found, expected in pairs:
        assert expected.isnan().any()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())


def test_a_sum_beyond_float16_is_infinite_and_its_norm_too_unlike_the_references():
    """The kernel reads the rounded sum back. The residual is lost either way."""
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)
    out, total = fused_add_rms_norm(x.clone(), x.clone(), weight, 1e-5)
    expected, expected_total = reference.fused_add_rms_norm(x, x, weight, 1e-5)
    assert total.isinf().all() and expected_total.isinf().all()
    assert not out.isfinite().any() and expected.isfinite().all()


def test_squares_beyond_float32_make_a_row_zero_as_in_the_reference():
    x, weight = randn((3, 64), torch.float32), torch.ones(64)
    x[1, 5] = 3e38
    found, expected = rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    assert not expected[1].any() and not found[1].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("weighted", WEIGHTS, ids=WEIGHT_IDS)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_rms_norm_neither_writes_nor_returns_an_input(dtype, weighted):
    x = randn((5, 64), dtype)
    weight = weight_for(x, weighted)
    inputs = [x] if weight is None else [x, weight]
    before = [bits(t).clone() for t in inputs]
    rms_norm(x, weight, 1e-5).zero_()
    assert all(torch.equal(bits(t), b) for t, b in zip(inputs, before, strict=True))


def test_an_input_that_requires_grad_gives_a_result_without_gradient():
    """Inference only: no backward exists, and none is pretended."""
    x = randn((3, 64), torch.float32).requires_grad_()
    assert not rms_norm(x, torch.ones(64), 1e-5).requires_grad
