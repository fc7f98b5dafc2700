# SPDX-License-Identifier: Apache-2.0
"""Every implementation of vendor.ascend against its op's contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.helpers import assert_same
from tests.backends.vendor.ascend.device import NpuTensor, to_cpu, to_npu
from tests.backends.vendor.ascend.served import NOT_FOR, SERVED
from vllm_fl.dispatch.types import OpImpl, as_verdict
from vllm_fl.ops import OpContract
from vllm_fl.testing import outputs_of, worst_errors
from vllm_fl.testing.cases import NotApplicable, arguments_of, cases_of

PAIRS = [
    pytest.param(contract, impl, dtype, id=f"{contract.name}-{str(dtype).removeprefix('torch.')}")
    for contract, impl in SERVED
    for dtype in contract.tolerances
]


def refusal(contract: OpContract, impl: OpImpl, args: tuple[Any, ...]) -> str | None:
    """Why the guards refuse a call, or None."""
    if impl.supports_layer is not None:
        verdict = as_verdict(impl.supports_layer(contract.signature.facts_of(*args)))
        if not verdict:
            return verdict.reason
    verdict = as_verdict(True if impl.supports is None else impl.supports(*args))
    return None if verdict else verdict.reason


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def inputs(contract: OpContract, dtype: torch.dtype):
    """(case name, arguments on the CPU, the same on the NPU)."""
    for name, case in cases_of(contract, dtype).items():
        try:
            args = arguments_of(contract, case, dtype)
        except NotApplicable:
            continue
        yield name, args, to_npu(args)


def conform(
    contract: OpContract, impl: OpImpl, dtype: torch.dtype
) -> tuple[list[str], dict[str, str]]:
    """Hold every case that is served to the contract; the cases served, and those refused with
    the reason."""
    limit = contract.tolerances[dtype]
    served: list[str] = []
    refused: dict[str, str] = {}
    for name, args, on_npu in inputs(contract, dtype):
        reason = refusal(contract, impl, on_npu)
        if reason is not None:
            refused[name] = reason
            continue
        served.append(name)
        before = clones(args)
        outputs = outputs_of(impl.fn(*on_npu))
        assert all(o is None or isinstance(o, NpuTensor) for o in outputs), name
        found = to_cpu(outputs)
        expected = outputs_of(contract.reference(*clones(before)))
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        for index, error in enumerate(worst_errors(contract, found, before)):
            most = limit.for_output(index)
            assert error <= most, f"{name}, output {index}: {error} ulps, {most} allowed"
        for argument, now, then in zip(
            contract.signature.parameter_names, args, before, strict=False
        ):
            if argument not in impl.mutates and isinstance(now, torch.Tensor):
                assert_same(now, then)
    return served, refused


@pytest.mark.parametrize("contract, impl, dtype", PAIRS)
def test_it_does_what_the_contract_says(contract, impl, dtype):
    served, refused = conform(contract, impl, dtype)
    if (contract.name, dtype) in NOT_FOR:
        assert not served
        return
    assert len(served) > len(refused) / 4, f"only {served}; refused: {refused}"
    assert any("zero tokens" in name for name in served), f"zero tokens: {refused}"


BY_OP = [pytest.param(contract, impl, id=contract.name) for contract, impl in SERVED]
OF_VALUES = ("is quantized", "weight", "variance_size", "multiple of", "groups of", "k may be")
"""What a reason that has nothing to do with a view says."""


@pytest.mark.parametrize("contract, impl", BY_OP)
def test_views_are_served_or_refused_with_the_layout_as_the_reason(contract, impl):
    served = 0
    dtype = next(d for d in contract.tolerances if (contract.name, d) not in NOT_FOR)
    for name, _, on_npu in inputs(contract, dtype):
        if all(a.is_contiguous() for a in on_npu if isinstance(a, NpuTensor)):
            continue
        reason = refusal(contract, impl, on_npu)
        served += reason is None
        if reason is not None and not any(word in reason for word in OF_VALUES):
            assert "contiguous" in reason, f"{name}: {reason}"
    assert served or impl.mutates


@pytest.mark.parametrize("contract, impl", BY_OP)
def test_a_tensor_that_is_elsewhere_is_refused(contract, impl):
    dtype = next(iter(contract.tolerances))
    reasons = {
        refusal(contract, impl, on_cpu)
        for _, on_cpu, on_npu in inputs(contract, dtype)
        if refusal(contract, impl, on_npu) is None
    }
    assert reasons == {"the tensor is on cpu"}
