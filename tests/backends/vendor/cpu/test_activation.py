# SPDX-License-Identifier: Apache-2.0
"""The kernels compute in float32 and round once."""

from __future__ import annotations

import pytest
import torch

from tests.backends import truth
from tests.backends.helpers import (
    assert_same,
    assert_within,
    at_offset,
    bits,
    name_of,
    randn,
    rounding,
)
from tests.backends.vendor.cpu.refusals import SERVED, SERVED_HALF
from vllm_fl.backends.reference.impl import activation as reference
from vllm_fl.backends.vendor.cpu.impl.activation import (
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    silu_and_mul,
)

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = ((16,), (1, 16), (1, 128), (7, 48), (3, 5, 64), (2, 3, 4, 80), (64, 1152))
NO_TOKENS = ((0, 128), (2, 0, 16))
OPS = ("silu", "gelu-none", "gelu-tanh")
EDGES = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-8, -1e-8, 3e4, -3e4)


def run(op, x):
    if op == "silu":
        return silu_and_mul(x)
    return gelu_and_mul(x, op.removeprefix("gelu-"))


def run_reference(op, x):
    if op == "silu":
        return reference.silu_and_mul(x)
    return reference.gelu_and_mul(x, op.removeprefix("gelu-"))


def exact(op, x):
    """(the float64 truth, how far float32 arithmetic may be off)."""
    if op == "silu":
        expected = truth.silu_and_mul(x)
        return expected, truth.silu_float32_error(x, expected)
    return truth.gelu_and_mul(x, op.removeprefix("gelu-")), truth.gelu_float32_error(x)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_results_are_rounded_once_from_the_float64_formula(op, dtype, shape):
    x = 3 * randn(shape, dtype)
    expected, float32_error = exact(op, x)
    found = run(op, x)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert_within(found, expected, float32_error + rounding(expected, dtype))


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_results_are_within_one_more_rounding_of_the_reference(op, dtype):
    """The reference rounds the activation (one more unit) before the product."""
    x = 3 * randn((64, 1152), dtype)
    expected, float32_error = exact(op, x)
    unit = torch.finfo(dtype).eps / 2
    tolerance = 2 * (float32_error + rounding(expected, dtype)) + expected.abs() * unit * 1.01
    assert_within(run(op, x), run_reference(op, x).double(), tolerance)


@pytest.mark.parametrize("dtype", SERVED_HALF, ids=name_of)
def test_half_precision_is_nearer_to_the_truth_than_the_reference(dtype):
    x = 3 * randn((64, 1152), dtype)
    expected, _ = exact("silu", x)
    ours = (silu_and_mul(x).double() - expected).abs().mean()
    theirs = (reference.silu_and_mul(x).double() - expected).abs().mean()
    assert ours < 0.9 * theirs


@pytest.mark.parametrize("shape", NO_TOKENS, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_no_tokens_give_no_rows(op, shape):
    found = run(op, torch.empty(shape, dtype=torch.float16))
    assert (found.shape, found.dtype) == ((*shape[:-1], shape[-1] // 2), torch.float16)


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize("op", OPS)
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
def test_a_view_gives_what_its_copy_gives(op, dtype, view):
    x = view(randn((6, 3, 96), dtype))
    assert not x.is_contiguous()
    assert_same(run(op, x), run(op, x.contiguous()))


@pytest.mark.parametrize("elements", (1, 3, 4, 8))
@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_where_the_input_starts_in_memory_does_not_matter(op, dtype, elements):
    x = randn((5, 64), dtype)
    moved = at_offset(x, elements)
    assert moved.data_ptr() % 64
    assert_same(run(op, moved), run(op, x))


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
def test_infinities_and_nan_are_where_the_reference_has_them(dtype):
    """But for gelu of inf, which is inf; PyTorch's vectorized erf form says NaN."""
    edges = torch.tensor(EDGES * 8, dtype=dtype)
    x = torch.cat((torch.cat((edges, torch.ones_like(edges))),
                   torch.cat((torch.ones_like(edges), edges)))).view(2, -1)  # fmt: skip
    for op in OPS:
        found, expected = run(op, x), run_reference(op, x)
        differs = (found.isnan() != expected.isnan()) | (found.isinf() != expected.isinf())
        if op == "gelu-none":
            differs[0, edges == float("inf")] = False
            assert (found[0, edges == float("inf")] == float("inf")).all()
        assert not differs.any()
        assert expected.isnan().any() and expected.isinf().any()


@pytest.mark.parametrize("dtype", SERVED, ids=name_of)
@pytest.mark.parametrize("op", OPS)
def test_the_input_is_neither_written_nor_returned(op, dtype):
    x = randn((5, 64), dtype)
    before = bits(x).clone()
    run(op, x).zero_()
    assert torch.equal(bits(x), before)


def test_gelu_defaults_to_the_exact_form():
    x = randn((3, 32), torch.float32)
    assert_same(gelu_and_mul(x), gelu_and_mul(x, "none"))
    assert not torch.equal(gelu_and_mul(x), gelu_and_mul(x, "tanh"))


def test_an_input_that_requires_grad_gives_a_result_without_gradient():
    """Inference only: no backward exists, and none is pretended."""
    x = randn((3, 32), torch.float32).requires_grad_()
    assert not silu_and_mul(x).requires_grad


# ----------------------------------------------------------------------------- elementwise

ELEMENTWISE = {"gelu_new": gelu_new, "gelu_fast": gelu_fast, "gelu_quick": gelu_quick}
each_elementwise = pytest.mark.parametrize("op", ELEMENTWISE)
each_dtype = pytest.mark.parametrize("dtype", SERVED, ids=name_of)


def exact_elementwise(op, x):
    """(the float64 truth, how far float32 arithmetic may be off), the formulas written with the
    logistic function instead of tanh."""
    x = x.double()
    unit = 2.0**-24
    if op == "gelu_quick":
        truth_ = x / (1 + torch.exp(-1.702 * x))
        # exp's argument is off by 2 units of itself; exp, sum, quotient add 4.
        return truth_, truth_.abs() * unit * (4 + 2 * (1.702 * x).abs()) + x.abs() * 2.0**-121
    c = (2 / torch.pi) ** 0.5 if op == "gelu_new" else 0.7978845608
    # 1 + tanh cancels for negative x: the error is relative to |x|.
    return x / (1 + torch.exp(-2 * c * (x + 0.044715 * x**3))), x.abs() * unit * 8


@each_dtype
@each_elementwise
@pytest.mark.parametrize("shape", ((8,), (1, 64), (7, 24), (3, 5, 64), (64, 1160)), ids=name_of)
def test_elementwise_results_are_rounded_once_from_the_float64_formula(op, dtype, shape):
    x = 3 * randn(shape, dtype)
    expected, float32_error = exact_elementwise(op, x)
    found = ELEMENTWISE[op](x)
    assert found.dtype is dtype
    assert_within(found, expected, float32_error + rounding(expected, dtype))


@each_dtype
@each_elementwise
@pytest.mark.parametrize(
    "view",
    (
        lambda x: x[:, 1, 5:69],
        lambda x: x[0].t()[:64].t(),
        lambda x: x[:1, 0, :64].expand(5, 64),
        lambda x: x[::2, :, :64],
    ),
    ids=("slice", "transposed", "one-row-repeated", "every-second-row"),
)
def test_an_elementwise_view_gives_what_its_copy_gives_and_a_contiguous_result(op, dtype, view):
    x = view(randn((6, 3, 96), dtype))
    assert not x.is_contiguous()
    found = ELEMENTWISE[op](x)
    assert found.is_contiguous()
    assert_same(found, ELEMENTWISE[op](x.contiguous()))


@each_elementwise
def test_the_kernel_itself_reads_a_slice_as_if_it_were_contiguous(kernels, op):
    x = randn((5, 128), torch.float32)[:, :64]
    out = torch.empty(5, 64)
    getattr(kernels, op)(out, x)
    assert (out - ELEMENTWISE[op](x)).abs().max() > 0.5


@each_dtype
@each_elementwise
def test_an_elementwise_input_may_start_anywhere_and_is_neither_written_nor_returned(op, dtype):
    x = randn((5, 64), dtype)
    expected = ELEMENTWISE[op](x)
    for elements in (1, 3, 4, 8):
        moved = at_offset(x, elements)
        before = bits(moved).clone()
        assert_same(ELEMENTWISE[op](moved), expected)
        ELEMENTWISE[op](moved).zero_()
        assert torch.equal(bits(moved), before)


@each_dtype
@each_elementwise
def test_elementwise_infinities_and_nan_are_where_the_reference_has_them(op, dtype):
    x = torch.tensor([*EDGES, *[1.0] * 7], dtype=dtype)
    found, expected = ELEMENTWISE[op](x), getattr(reference, op)(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert expected.isnan().any() and expected.isinf().any()


@each_elementwise
def test_no_tokens_stay_none_elementwise(op):
    assert ELEMENTWISE[op](torch.empty(0, 64)).shape == (0, 64)
