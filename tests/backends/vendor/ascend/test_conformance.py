# SPDX-License-Identifier: Apache-2.0
"""Every implementation of vendor.ascend against its op's contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.helpers import assert_same
from tests.backends.vendor.ascend.device import NpuTensor, to_cpu, to_npu
from tests.backends.vendor.ascend.harness import STATE
from vllm_fl.backends.vendor.ascend import register_ops  # noqa: F401  (importing marks them)
from vllm_fl.backends.vendor.ascend.ascend import OPERATORS, backend
from vllm_fl.dispatch.types import OpImpl, as_verdict
from vllm_fl.ops import CONTRACTS, OpContract
from vllm_fl.testing import error_in_ulps, outputs_of

BY_NAME = {contract.name: contract for contract in CONTRACTS}
SERVED = [(BY_NAME[i.op_name], i) for i in backend.implementations if i.op_name in BY_NAME]
PAIRS = [
    pytest.param(contract, impl, dtype, id=f"{contract.name}-{str(dtype).removeprefix('torch.')}")
    for contract, impl in SERVED
    for dtype in contract.tolerances
]
NOT_FOR = {("dynamic_per_token_quant_int8", torch.float32)}
"""(op, dtype) that torch_npu has no kernel for."""


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
    """(case, arguments on the CPU, the same on the NPU)."""
    for seed, case in enumerate(contract.cases_for(dtype)):
        args = case.make(dtype, torch.Generator().manual_seed(seed))
        yield case, args, to_npu(args)


@pytest.mark.parametrize("contract, impl, dtype", PAIRS)
def test_it_does_what_the_contract_says(contract, impl, dtype):
    limit = contract.tolerances[dtype]
    served, refused = [], {}
    for case, args, on_npu in inputs(contract, dtype):
        reason = refusal(contract, impl, on_npu)
        if reason is not None:
            refused[case.name] = reason
            continue
        served.append(case.name)
        before = clones(args)
        result = impl.fn(*on_npu)
        for output in outputs_of(result):
            assert output is None or isinstance(output, NpuTensor), case.name
        found = tuple(None if o is None else o.raw for o in outputs_of(result))
        expected = outputs_of(contract.reference(*clones(before)))
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), case.name
            if one is not None:
                assert (one.dtype, one.shape) == (other.dtype, other.shape), case.name
        error = error_in_ulps(contract, found if len(found) > 1 else found[0], before)
        most = max(limit.for_output(i) for i in range(len(found)))
        assert error <= most, f"{case.name}: {error} ulps, {most} allowed"
        for name, now, then in zip(contract.signature.parameter_names, args, before, strict=False):
            if name not in impl.mutates:
                assert_same(to_cpu(now), then) if isinstance(now, torch.Tensor) else None
    if (contract.name, dtype) in NOT_FOR:
        assert not served
        return
    assert served, f"every case is refused: {refused}"
    assert any("zero tokens" in name for name in served), f"zero tokens: {refused}"


@pytest.mark.parametrize("contract, impl", SERVED, ids=lambda v: getattr(v, "op_name", ""))
def test_views_are_served_or_refused_with_the_layout_as_the_reason(contract, impl):
    dtype = torch.bfloat16
    for case, _, on_npu in inputs(contract, dtype):
        views = [a for a in on_npu if isinstance(a, NpuTensor) and not a.is_contiguous()]
        if views and (reason := refusal(contract, impl, on_npu)) is not None:
            assert impl.mutates and "contiguous" in reason, f"{case.name}: {reason}"


def test_every_operator_that_is_called_is_looked_for_when_it_is_loaded():
    for contract, impl in SERVED:
        for dtype in contract.tolerances:
            for _, _, on_npu in inputs(contract, dtype):
                if refusal(contract, impl, on_npu) is None:
                    impl.fn(*on_npu)
    assert set(STATE.names()) == set(OPERATORS)


@pytest.mark.parametrize("contract, impl", SERVED, ids=lambda v: getattr(v, "op_name", ""))
def test_a_tensor_that_is_elsewhere_is_refused(contract, impl):
    [(_, on_cpu, _), *_] = inputs(contract, torch.bfloat16)
    assert refusal(contract, impl, on_cpu) == "the tensor is on cpu"
