# SPDX-License-Identifier: Apache-2.0
"""vendor.cuda on a machine without a GPU: what is registered, and what its guards say."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vllm_fl.backends.vendor.cuda import cuda, register_ops
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.ops import CONTRACTS, SIGNATURES

IMPLS = {impl.op_name: impl for impl in cuda.backend.implementations}
DECLARED = {signature.op_name: signature for signature in SIGNATURES}


def on_cuda(value: object, mode: FakeTensorMode) -> object:
    """The metadata of a tensor on a GPU that is not here."""
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cuda:0"))


def guard_of(op: str, *args: object) -> object:
    """The guard's answer, on metadata alone."""
    supports = IMPLS[op].supports
    assert supports is not None
    mode = FakeTensorMode()
    with mode:
        return supports(*(on_cuda(a, mode) for a in args))


def test_it_registers_under_the_declared_signatures() -> None:
    registry = OpRegistry()
    for signature in SIGNATURES:
        registry.declare(signature)
    register_ops.register_builtins(registry)
    assert {i.impl_id for op in IMPLS for i in registry.get_implementations(op)} == {"vendor.cuda"}
    assert set(IMPLS) <= set(DECLARED)


def test_what_it_writes_is_what_the_contract_lets_it_write() -> None:
    for op, impl in IMPLS.items():
        assert set(impl.mutates) <= set(DECLARED[op].inplace), op


def test_on_a_cpu_it_is_unavailable_for_the_device() -> None:
    decision = OpManager().explain("rms_norm")
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert "cuda" in reasons["vendor.cuda"]


@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_guard_refuses_tensors_on_the_cpu_and_says_where_they_are(op) -> None:
    contract = next(c for c in CONTRACTS if c.name == op)
    dtype = next(iter(contract.tolerances))
    args = contract.cases_for(dtype)[0].make(dtype, torch.Generator().manual_seed(0))
    assert "cpu" in str(IMPLS[op].supports(*args))


@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_guard_takes_the_plain_case_and_reads_no_data(op) -> None:
    contract = next(c for c in CONTRACTS if c.name == op)
    dtype = torch.bfloat16 if torch.bfloat16 in contract.tolerances else torch.float32
    cases = [c for c in contract.cases_for(dtype) if c.name.startswith("one token")]
    args = cases[0].make(dtype, torch.Generator().manual_seed(0))
    assert guard_of(op, *args) is True
