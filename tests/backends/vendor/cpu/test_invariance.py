# SPDX-License-Identifier: Apache-2.0
"""What `batch_invariant=True` claims: a row's bits do not depend on the rows around it, on the
number of threads, or on the run."""

from __future__ import annotations

import pytest
import torch

from tests.backends.helpers import assert_same, bits, name_of, randn, threads
from tests.backends.vendor.cpu.refusals import SERVED
from vllm_fl.backends.vendor.cpu import register_ops

pytestmark = pytest.mark.usefixtures("kernels")

ROWS = 64
VENDOR = {impl.op_name: impl for impl in register_ops.backend.implementations}


def gated(dtype):
    return (3 * randn((ROWS, 352), dtype),)


def norm(dtype):
    return (randn((ROWS, 576), dtype), randn((576,), dtype, seed=7), 1e-5)


def fused(dtype):
    x, weight, epsilon = norm(dtype)
    return (x, randn((ROWS, 576), dtype, seed=1), weight, epsilon)


def rotary(dtype, is_neox):
    angles = randn((ROWS, 32), torch.float32, seed=3)
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.arange(ROWS).flip(0)
    return positions, randn((ROWS, 192), dtype), randn((ROWS, 128), dtype), 64, cache, is_neox


CASES = {
    "silu_and_mul": ("silu_and_mul", gated),
    "gelu_and_mul": ("gelu_and_mul", gated),
    "gelu_and_mul-tanh": ("gelu_and_mul", lambda dtype: (*gated(dtype), "tanh")),
    "gelu_new": ("gelu_new", gated),
    "gelu_fast": ("gelu_fast", gated),
    "gelu_quick": ("gelu_quick", gated),
    "rms_norm": ("rms_norm", norm),
    "fused_add_rms_norm": ("fused_add_rms_norm", fused),
    "rotary_embedding-neox": ("rotary_embedding", lambda dtype: rotary(dtype, True)),
    "rotary_embedding-gptj": ("rotary_embedding", lambda dtype: rotary(dtype, False)),
}


def run(op, args, first=0, last=ROWS):
    """The op's outputs for some of the rows, on copies."""
    chosen = [
        a[first:last].clone()
        if isinstance(a, torch.Tensor) and a.shape[0] == ROWS and not is_cache(op, i)
        else a
        for i, a in enumerate(args)
    ]
    result = VENDOR[op].fn(*chosen)
    return result if isinstance(result, tuple) else (result,)


def is_cache(op, index):
    return op == "rotary_embedding" and index == 4


each_case = pytest.mark.parametrize("op, make", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", SERVED, ids=name_of)


def test_every_op_that_claims_batch_invariance_has_a_case_here():
    claimed = {name for name, impl in VENDOR.items() if impl.batch_invariant}
    assert claimed == {op for op, _ in CASES.values()}


@pytest.mark.parametrize(
    "count, sizes", ((1, range(1, ROWS + 1)), (2, (1, 2, 3, 5, 17, 63, 64))), ids=("1", "2")
)
@each_dtype
@each_case
def test_a_row_has_the_same_bits_in_batches_of_1_to_64(op, make, dtype, count, sizes):
    args = make(dtype)
    whole = run(op, args)
    with threads(count):
        for size in sizes:
            first = (7 * size) % (ROWS - size + 1)
            for part, rows in zip(run(op, args, first, first + size), whole, strict=True):
                assert torch.equal(bits(part), bits(rows[first : first + size])), size


@each_dtype
@each_case
def test_results_do_not_depend_on_the_run_or_the_number_of_threads(op, make, dtype):
    args = make(dtype)
    expected = run(op, args)
    for count in (1, 2, 3):
        with threads(count):
            for _ in range(3):
                assert_same(run(op, args), expected)
