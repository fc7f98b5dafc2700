# SPDX-License-Identifier: Apache-2.0
"""The contracts themselves: complete, true to themselves, with tolerances that can fail."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.releases.audit import read_installed
from tests.releases.checks import in_range
from tests.releases.surface import SURFACE
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.types import REQUIRED
from vllm_fl.ops import CONTRACTS, SIGNATURES
from vllm_fl.ops.arrays import bind_axes, holds
from vllm_fl.ops.contract import NEEDED_CASES, Case, OpContract
from vllm_fl.testing import outputs_of, worst_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [
    pytest.param(contract, dtype, id=f"{contract.name}-{str(dtype).removeprefix('torch.')}")
    for contract in CONTRACTS
    for dtype in contract.tolerances
]
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
each_pair = pytest.mark.parametrize(("contract", "dtype"), PAIRS)


def make(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    return case.make(dtype, torch.Generator().manual_seed(1))


def cases(contract: OpContract, dtype: torch.dtype):
    for case in contract.cases_for(dtype):
        yield case.name, make(case, dtype)


def beyond(contract: OpContract, function, dtype: torch.dtype) -> list[str]:
    """The cases and outputs in which a function is farther from the truth than it may be."""
    tolerance = contract.tolerances[dtype]
    return [
        f"{name}, output {index}: {error:.3g} ulp, may be {tolerance.for_output(index)}"
        for name, args in cases(contract, dtype)
        for index, error in enumerate(worst_errors(contract, function(*args), args))
        if not error <= tolerance.for_output(index)
    ]


def values_of(contract: OpContract, args: tuple[Any, ...]) -> dict[str, Any]:
    """Every argument by name, defaults included."""
    defaults = {p.name: p.default for p in contract.signature.parameters}
    given = dict(zip(contract.signature.parameter_names, args, strict=False))
    values = {**defaults, **given}
    assert not [name for name, value in values.items() if value is REQUIRED]
    return values


def tensors_in(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


# ------------------------------------------------------------------------- what is declared


@each_contract
def test_signature_schema_reference_and_arrays_speak_of_the_same_parameters(contract) -> None:
    signature = contract.signature
    signature.check(contract.reference, who="the reference")
    inspect.signature(contract.fake).bind(*signature.parameter_names)
    parsed = torch._C.parse_schema(f"vllm_fl::{contract.name}{contract.schema}")
    assert tuple(a.name for a in parsed.arguments) == signature.parameter_names
    for argument, parameter in zip(parsed.arguments, signature.parameters, strict=True):
        assert argument.has_default_value() == (parameter.default is not REQUIRED), argument.name
        if argument.has_default_value():
            assert argument.default_value == parameter.default, argument.name
        is_tensor = "Tensor" in str(argument.type)
        assert is_tensor == (argument.name in contract.arrays), argument.name
    assert len(parsed.returns) == len(contract.results)
    assert set(contract.batched) <= set(contract.arrays)


@each_contract
def test_the_inplace_schema_marks_exactly_what_the_signature_says(contract) -> None:
    if not contract.signature.inplace:
        assert contract.inplace_schema is None
        return
    parsed = torch._C.parse_schema(f"vllm_fl::{contract.name}_{contract.inplace_schema}")
    marked = {a.name for a in parsed.arguments if a.alias_info is not None}
    assert marked == set(contract.signature.inplace)
    assert not parsed.returns


def test_an_optional_argument_is_marked_too() -> None:
    schemas = {c.name: c.inplace_schema for c in CONTRACTS}
    assert schemas["silu_and_mul"] is None
    assert schemas["fused_add_rms_norm"] == (
        "(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon, "
        "SymInt? variance_size=None) -> ()"
    )
    assert schemas["rotary_embedding"] == (
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, "
        "SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()"
    )


def test_every_op_but_a_selector_has_one_contract() -> None:
    names = [contract.name for contract in CONTRACTS]
    assert len(names) == len(set(names))
    assert {s.op_name for s in SIGNATURES if not s.selector} == set(names)


@each_contract
def test_every_contract_says_what_it_is_where_it_is_from_and_why_so_far(contract) -> None:
    assert len(contract.signature.summary) > 20
    assert contract.source
    assert contract.tolerances
    for tolerance in contract.tolerances.values():
        assert len(tolerance.why) > 20


@pytest.fixture(scope="module")
def installed():
    source = read_installed()
    if source is None:
        pytest.skip("vLLM is not installed")
    return source


@each_contract
def test_the_call_sites_exist_in_the_installed_vllm(contract, installed) -> None:
    """Or the audit of the releases says which of them have it."""
    elsewhere = {
        entry.path for entry in SURFACE if not in_range(installed.version, entry.since, entry.gone)
    }
    for site in contract.call_sites:
        assert site.hook
        assert installed.find(site.where) is not None or site.where in elsewhere, site.where


def test_a_call_site_that_does_not_exist_is_noticed(installed) -> None:
    assert installed.find("vllm.model_executor.layers.layernorm:RMSNorms") is None


# ------------------------------------------------------------------------------- the cases


def lacking(contract: OpContract) -> list[str]:
    """The needed cases that a contract neither has nor explains the lack of."""
    names = [case.name for case in contract.cases]
    return [
        need
        for need, words in NEEDED_CASES.items()
        if need not in contract.without
        and not all(any(word in name for name in names) for word in words)
    ]


@each_contract
def test_every_needed_case_is_there_or_its_lack_is_explained(contract) -> None:
    names = [case.name for case in contract.cases]
    assert len(names) == len(set(names))
    assert lacking(contract) == []
    assert set(contract.without) <= set(NEEDED_CASES)
    assert all(len(reason) > 20 for reason in contract.without.values())


def test_a_contract_without_a_needed_case_is_noticed() -> None:
    from dataclasses import replace

    contract = CONTRACTS[0]
    less = replace(contract, cases=tuple(c for c in contract.cases if "zero" not in c.name))
    assert lacking(less) == ["zero tokens"]
    assert lacking(replace(less, without={"zero tokens": "somebody said so"})) == []


@each_pair
def test_cases_are_what_their_names_say(contract, dtype) -> None:
    seen: dict[str, set[torch.dtype]] = {}
    for name, args in cases(contract, dtype):
        tensors = tensors_in(args)
        floats = [t for t in tensors if t.is_floating_point() and t.dtype.itemsize > 1]
        for word in name.replace(",", " ").split():
            if word in ("slice", "slices", "permuted", "transposed"):
                assert any(not t.is_contiguous() for t in tensors), name
        if "zero tokens" in name:
            assert any(t.numel() == 0 for t in tensors), name
        if "inf and nan" in name:
            special = torch.cat([t.flatten().float() for t in floats])
            assert special.isinf().any() and special.isnan().any(), name
        if "tiny values" in name:
            assert any(t.numel() and 0 < t.abs().max() < 1e-2 for t in floats), name
        if "huge values" in name:
            assert any(t.numel() and t.abs().max() > 1e3 for t in floats), name
        for argument, value in values_of(contract, args).items():
            if isinstance(value, torch.Tensor):
                seen.setdefault(argument, set()).add(value.dtype)
    for argument, spec in contract.arrays.items():
        for wanted in (torch.int32, torch.int64):
            if "index[" in spec or ("int32" in spec and "int64" in spec):
                assert wanted in seen[argument], f"no case has {argument} in {wanted}"


@each_pair
def test_cases_fit_the_arrays_and_the_constraints_and_are_the_same_each_time(
    contract, dtype
) -> None:
    for case in contract.cases_for(dtype):
        args, again = make(case, dtype), make(case, dtype)
        axes = bind_axes(contract.arrays, values_of(contract, args), dtype=dtype)
        for constraint in contract.constraints:
            assert holds(constraint, axes), (case.name, constraint, axes)
        for one, other in zip(tensors_in(args), tensors_in(again), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@each_pair
def test_results_fit_what_the_contract_says_of_them_and_the_fake(contract, dtype) -> None:
    names = [f"result {index}" for index in range(len(contract.results))]
    for name, args in cases(contract, dtype):
        axes = bind_axes(contract.arrays, values_of(contract, args), dtype=dtype)
        found = outputs_of(contract.reference(*args))
        specs = dict(zip(names, contract.results, strict=True))
        bind_axes(specs, dict(zip(names, found, strict=True)), dtype=dtype, known=axes)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            promised = outputs_of(contract.fake(*fakes))
        assert len(promised) == len(found), name
        for output, fake in zip(found, promised, strict=True):
            if output is None:  # a torch op cannot return None
                assert fake.numel() == 0, name
                continue
            assert (output.shape, output.dtype) == (fake.shape, fake.dtype), name
            assert not output.numel() or output.stride() == fake.stride(), name


# ---------------------------------------------------------------------------- the tolerances


@each_pair
def test_the_reference_is_within_its_own_tolerance_of_float64(contract, dtype) -> None:
    assert beyond(contract, contract.reference, dtype) == []


@each_pair
def test_every_implementation_here_is_within_the_tolerance(contract, dtype) -> None:
    manager = OpManager()
    assert beyond(contract, lambda *args: manager.call(contract.name, *args), dtype) == []


@each_pair
def test_the_tolerance_refuses_a_result_that_is_off_by_two_in_a_hundred(contract, dtype) -> None:
    def off(*args):
        first, *rest = outputs_of(contract.reference(*args))
        if not first.dtype.is_floating_point:
            return (first + 1, *rest)
        moved = first.float() * (1.02 if first.dtype.itemsize > 1 else 1.3)  # fp8 steps by 1/8
        return (moved.to(first.dtype), *rest)

    assert beyond(contract, off, dtype)
