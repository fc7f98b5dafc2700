# SPDX-License-Identifier: Apache-2.0
"""The cases of an op: the contract's own and the layouts that the kit adds."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.ops.contract import Case
from vllm_fl.ops.normalization import FUSED_ADD_RMS_NORM
from vllm_fl.testing import UnknownNameError, select
from vllm_fl.testing.cases import (
    NotApplicable,
    arguments_of,
    base_case,
    cases_of,
    dtype_name,
    dtype_of,
    named_arguments,
)
from vllm_fl.testing.contracts import contract_at, contract_of, home_of

F32 = torch.float32


def layout(contract, name: str, dtype=F32):
    return arguments_of(contract, cases_of(contract, dtype)[f"layout: {name}"], dtype)


def test_a_case_has_the_same_numbers_each_time_and_others_than_another_case() -> None:
    cases = cases_of(SILU_AND_MUL, F32)
    one = arguments_of(SILU_AND_MUL, cases["tiny values"], F32)
    again = arguments_of(SILU_AND_MUL, cases["tiny values"], F32)
    other = arguments_of(SILU_AND_MUL, replace(cases["tiny values"], name="other"), F32)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])


def test_two_cases_of_one_name_are_an_error() -> None:
    case = SILU_AND_MUL.cases[0]
    contract = replace(SILU_AND_MUL, cases=(case, case))
    with pytest.raises(ValueError, match=f"silu_and_mul has two cases '{case.name}'"):
        cases_of(contract, F32)


def test_no_contract_here_has_two_cases_of_one_name() -> None:
    for contract in CONTRACTS:
        for dtype in contract.tolerances:
            assert len(cases_of(contract, dtype)) >= len(contract.cases_for(dtype))


def test_a_layout_has_the_values_of_its_case_and_other_strides() -> None:
    wide = layout(FUSED_ADD_RMS_NORM, "rows of a wider tensor")
    permuted = layout(FUSED_ADD_RMS_NORM, "permuted")
    odd = layout(FUSED_ADD_RMS_NORM, "odd address")
    for x in wide[:2]:
        assert not x.is_contiguous() and x.stride(-1) == 1
    for x in permuted[:2]:
        assert x.transpose(0, 1).is_contiguous()
    for x in odd[:2]:
        assert x.is_contiguous() and x.data_ptr() % 16 == 4
    assert torch.equal(wide[0], permuted[0]) and torch.equal(wide[0], odd[0])
    assert wide[2].is_contiguous()  # the weight has one dimension


def test_a_layout_is_made_of_a_size_that_guards_take() -> None:
    [x] = layout(SILU_AND_MUL, "permuted")
    assert x.shape[-1] % 16 == 0 and x.shape[0] > 1


def test_where_no_input_fits_there_is_a_reason() -> None:
    with pytest.raises(NotApplicable, match="no case of the contract has arguments"):
        base_case(SILU_AND_MUL, F32, lambda args: False)
    scalar = Case("one token", lambda dtype, generator: (torch.ones(4, dtype=dtype),))
    with pytest.raises(NotApplicable):
        layout(replace(SILU_AND_MUL, cases=(scalar,)), "permuted")


def test_dtypes_have_names() -> None:
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert dtype_of("bfloat16") is torch.bfloat16
    for name in ("float33", "nn", "Tensor"):
        with pytest.raises(ValueError, match=f"'{name}' is not a dtype"):
            dtype_of(name)


def test_arguments_that_are_not_given_have_their_defaults() -> None:
    named = named_arguments(FUSED_ADD_RMS_NORM, (1, 2, None, 1e-6))
    assert named == {"x": 1, "residual": 2, "weight": None, "epsilon": 1e-6, "variance_size": None}


# -------------------------------------------------------------------------------- contracts

OWN = replace(
    SILU_AND_MUL, signature=replace(SILU_AND_MUL.signature, op_name="acme_silu"), source="here"
)


def acme_silu(x):
    return SILU_AND_MUL.reference(x)


def implementation(fn=acme_silu, op="acme_silu") -> OpImpl:
    return OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, fn, vendor="acme")


def test_a_contract_is_found_among_ours_and_beside_an_implementation(monkeypatch) -> None:
    assert contract_of("silu_and_mul") is SILU_AND_MUL
    assert contract_of("acme_silu", [implementation()]) is None
    package = ModuleType("vllm_fl_acme_test")
    package.CONTRACTS = (OWN,)
    monkeypatch.setitem(sys.modules, "vllm_fl_acme_test", package)
    monkeypatch.setattr(acme_silu, "__module__", "vllm_fl_acme_test.impl.activation")
    impl = implementation()
    assert contract_of("acme_silu", [impl]) is OWN
    assert home_of(OWN, impl) == "vllm_fl_acme_test"
    assert home_of(SILU_AND_MUL, impl) == "vllm_fl.ops"
    assert home_of(replace(OWN, source="elsewhere"), impl) is None


def test_a_contract_is_found_by_its_home() -> None:
    assert contract_at("vllm_fl.ops", "silu_and_mul") is SILU_AND_MUL
    with pytest.raises(LookupError, match=r"vllm_fl\.ops\.CONTRACTS holds no contract for other"):
        contract_at("vllm_fl.ops", "other")


# ---------------------------------------------------------------------------------- select


@pytest.fixture(scope="module")
def manager() -> OpManager:
    manager = OpManager()
    manager.ensure_initialized()
    return manager


def test_everything_that_is_registered_is_checked_or_left_out_with_a_reason(manager) -> None:
    selection = select(manager, device="cpu")
    snapshot = manager.registry.snapshot()
    registered = {(i.op_name, i.impl_id) for impls in snapshot.impls_by_op.values() for i in impls}
    chosen = {(t.impl.op_name, t.impl.impl_id) for t in selection.targets}
    left_out = {(skip.op, skip.impl_id) for skip in selection.left_out}
    assert chosen | left_out == registered
    assert not chosen & left_out
    assert all(len(skip.reason) > 10 for skip in selection.left_out)
    assert {selection.targets[job.target].contract.name for job in selection.jobs} == {
        contract.name for contract in CONTRACTS
    }


def test_there_are_enough_ops_and_cases(manager) -> None:
    selection = select(manager, device="cpu")
    assert len({t.contract.name for t in selection.targets}) >= 30
    assert len(selection.jobs) >= 2500


def test_names_narrow_the_choice(manager) -> None:
    chosen = select(
        manager,
        device="cpu",
        ops=["rms_norm", "silu_and_mul"],
        impls=["reference.torch"],
        dtypes=["bfloat16"],
        cases=["one token"],
    )
    assert [(j.dtype, j.case) for j in chosen.jobs] == [("bfloat16", "one token")] * 2
    assert {t.impl.impl_id for t in chosen.targets} == {"reference.torch"}
    vendors = {t.impl.vendor for t in select(manager, device="cpu", vendor="cpu").targets}
    assert vendors == {"cpu"}


def test_an_op_that_nobody_implements_is_left_out(manager) -> None:
    lonely = OpManager()
    lonely.registry.plugins = ()
    lonely.registry.declare(SILU_AND_MUL.signature)
    [skip] = select(lonely, device="cpu").left_out
    assert (skip.op, skip.reason) == ("silu_and_mul", "nobody implements it")


def test_an_op_without_a_contract_is_left_out() -> None:
    lonely = OpManager()
    lonely.registry.plugins = ()
    lonely.registry.declare(OWN.signature)
    lonely.registry.register_impl(implementation())
    [skip] = select(lonely, device="cpu").left_out
    assert "the op has no contract; put one into CONTRACTS" in skip.reason


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ops": ["rms"]}, "unknown op 'rms'; valid: .*rms_norm"),
        ({"impls": ["vendor.cp"]}, "unknown implementation 'vendor.cp'; .*\"vendor.cpu\""),
        ({"dtypes": ["half"]}, "unknown dtype 'half'; valid: bfloat16, float16, float32"),
        ({"cases": ["one"]}, "unknown case 'one'; valid: "),
        ({"vendor": "acme"}, "unknown vendor 'acme'; valid: .*cpu"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_valid_ones(manager, settings, text) -> None:
    with pytest.raises(UnknownNameError, match=text):
        select(manager, device="cpu", **settings)
