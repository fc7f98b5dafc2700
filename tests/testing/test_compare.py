# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vllm_fl.ops.activation import RELU2
from vllm_fl.testing import differences, error_in_ulps, worst_errors

CONTRACT = replace(RELU2, reference=lambda x: x, exact=None, magnitude=None)
"""The identity: the exact result is the argument."""

NAN, INF = math.nan, math.inf


def ulps(found: list[float], exact: list[float], dtype=torch.float32) -> float:
    return error_in_ulps(
        CONTRACT, torch.tensor(found).to(dtype), (torch.tensor(exact, dtype=torch.float64),)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_unit_in_the_last_place_is_that_of_the_outputs_dtype(dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert ulps([1 + eps], [1.0], dtype) == 1
    assert ulps([2 + 2 * eps], [2.0], dtype) == 1
    assert ulps([1.0], [1 + eps / 4], dtype) == 0.25


@pytest.mark.parametrize(
    ("found", "exact"),
    [
        ([NAN], [1.0]),
        ([1.0], [NAN]),
        ([INF], [1.0]),
        ([1.0], [INF]),
        ([INF], [-INF]),
        ([INF], [NAN]),
        ([3.4e38], [INF]),
        ([0.0, NAN], [0.0, 0.0]),
    ],
    ids=str,
)
def test_what_is_not_finite_must_be_where_it_is_in_the_exact_result(found, exact) -> None:
    assert ulps(found, exact) == INF


@pytest.mark.parametrize("values", [[NAN, 1.0], [INF, -INF], [], [0.0]], ids=str)
def test_equal_values_are_at_no_distance(values) -> None:
    assert ulps(values, values) == 0


def test_what_is_beyond_the_dtype_is_infinite_in_it() -> None:
    assert ulps([INF], [1e6], torch.float16) == 0
    assert ulps([65504.0], [1e6], torch.float16) == INF


def test_a_magnitude_makes_a_difference_of_large_terms_small() -> None:
    x = torch.tensor([2.0**-20])
    found = torch.tensor([0.0])
    assert error_in_ulps(CONTRACT, found, (x,)) == 2.0**23
    large = replace(CONTRACT, magnitude=lambda x: (torch.ones_like(x),))
    assert error_in_ulps(large, found, (x,)) == 8


def test_another_shape_or_number_of_outputs_is_infinitely_far() -> None:
    x = torch.ones(2, 3)
    assert worst_errors(CONTRACT, torch.ones(3, 2), (x,)) == (INF,)
    assert worst_errors(CONTRACT, (x, x), (x,)) == (INF, INF)
    assert worst_errors(CONTRACT, None, (x,)) == (INF,)


def test_integers_are_compared_as_such() -> None:
    x = torch.tensor([1, 5])
    assert error_in_ulps(CONTRACT, torch.tensor([1, 2]), (x,)) == 3
    assert error_in_ulps(CONTRACT, torch.tensor([True, False]), (torch.tensor([1, 0]),)) == 0


def test_the_worst_element_is_named() -> None:
    exact = torch.zeros(2, 3)
    found = exact.clone()
    found[1, 2] = 0.5
    [difference] = differences(CONTRACT, found, (exact,))
    assert difference.text == "at [1, 2] found 0.5, exact 0.0"
