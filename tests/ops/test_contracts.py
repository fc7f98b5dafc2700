# SPDX-License-Identifier: Apache-2.0
"""The contracts themselves: references against float64, tolerances that can fail."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.dispatch import OpManager
from vllm_fl.ops import CONTRACTS, SIGNATURES
from vllm_fl.testing import error_in_ulps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cases(contract, dtype):
    for case in contract.cases_for(dtype):
        yield case.name, case.make(dtype, torch.Generator().manual_seed(1))


def worst(contract, function, dtype) -> dict[str, float]:
    return {
        name: error_in_ulps(contract, function(*args), args)
        for name, args in cases(contract, dtype)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_the_reference_is_within_its_own_tolerance_of_float64(contract, dtype) -> None:
    limit = contract.tolerances[dtype].ulps
    errors = worst(contract, contract.reference, dtype)
    assert max(errors.values()) <= limit, errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_every_implementation_here_is_within_the_tolerance(contract, dtype) -> None:
    limit = contract.tolerances[dtype].ulps
    manager = OpManager()
    errors = worst(contract, lambda *args: manager.call(contract.name, *args), dtype)
    assert max(errors.values()) <= limit, errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_the_tolerance_refuses_a_result_that_is_off_by_one_in_a_hundred(contract, dtype) -> None:
    def off(*args):
        result = contract.reference(*args)
        if isinstance(result, tuple):
            return (result[0] * 1.02, *result[1:])
        return result * 1.02

    limit = contract.tolerances[dtype].ulps
    assert max(worst(contract, off, dtype).values()) > limit


def test_the_inplace_schemas_mark_exactly_what_the_signature_says() -> None:
    schemas = {c.name: c.inplace_schema for c in CONTRACTS}
    assert schemas == {
        "silu_and_mul": None,
        "gelu_and_mul": None,
        "rms_norm": None,
        "fused_add_rms_norm": "(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, "
        "float epsilon, SymInt? variance_size=None) -> ()",
        "rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, "
        "SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()",
    }


def test_every_contract_has_the_nasty_cases_and_a_reasoned_tolerance() -> None:
    assert len(SIGNATURES) == len(CONTRACTS) + 1  # the selector has no contract
    for contract in CONTRACTS:
        names = " ".join(case.name for case in contract.cases)
        for needed in ("zero tokens", "one token", "odd", "huge"):
            assert needed in names, (contract.name, needed)
        for tolerance in contract.tolerances.values():
            assert len(tolerance.why) > 40
