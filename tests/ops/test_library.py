# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.vllm_fl`: opaque, functional or in place, and honest about it."""

from __future__ import annotations

import pytest
import torch

from tests.native import CPU_IMPL, NATIVE
from vllm_fl.dispatch import (
    BackendImplKind,
    DispatchError,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    policy_context,
)
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.library import bind_name, define, entries, op_for

DTYPES = [torch.float32, torch.bfloat16]
FORMS = [
    pytest.param(contract, inplace, dtype, id=f"{contract.name}{'_' * inplace}-{dtype}")
    for contract in CONTRACTS
    for inplace in (False, True)
    for dtype in DTYPES
    if (not inplace or contract.inplace_schema is not None) and dtype in contract.tolerances
]


@pytest.fixture(autouse=True, scope="module")
def defined() -> None:
    for contract in CONTRACTS:
        define(contract)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def outputs_of(result: object) -> list[torch.Tensor]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [t for t in tensors if isinstance(t, torch.Tensor)]


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
"""All that opcheck has. For the first PyTorch would have to compare FP8, which it cannot; for the
last, NaN equals nothing. The tests below compare both, for every op."""


TRACED = 6
"""Cases of each op that the last check, 25 times as slow as the others, is asked about."""


def is_fp8(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() and value.dtype.itemsize == 1
    )


def has_nan(value: object) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.isnan().any())


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but for NaN. PyTorch compares no FP8."""
    if is_fp8(a):
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


def cloned(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize(("contract", "inplace", "dtype"), FORMS)
def test_opcheck_is_green_for_every_case(contract, inplace, dtype) -> None:
    for index, case in enumerate(contract.cases_for(dtype)):
        args = case.make(dtype, generator())
        not_traced = index >= TRACED or any(map(has_nan, args))
        checks = [
            check
            for check in CHECKS
            if not (check == "test_schema" and any(map(is_fp8, args)))
            and not (check == "test_aot_dispatch_dynamic" and not_traced)
        ]
        torch.library.opcheck(op_for(contract.name, inplace=inplace), args, test_utils=checks)


@pytest.mark.parametrize(("contract", "inplace", "dtype"), FORMS)
def test_a_graph_of_the_op_has_no_break_and_gives_the_same_bits(contract, inplace, dtype) -> None:
    op = op_for(contract.name, inplace=inplace)
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
    cases = contract.cases_for(dtype)
    with_nan = [c for c in cases[3:] if any(map(has_nan, c.make(dtype, generator())))]
    for case in (*cases[:3], *with_nan[:1]):
        torch.compiler.reset()  # other shapes are other graphs
        args = case.make(dtype, generator())
        ours, theirs = cloned(args), cloned(args)
        found, expected = compiled(*ours), op(*theirs)
        pairs = [*zip(outputs_of(found), outputs_of(expected), strict=True)]
        pairs += [(a, b) for a, b in zip(ours, theirs, strict=True) if torch.is_tensor(a)]
        assert pairs
        for a, b in pairs:
            assert equal(a, b), case.name


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_the_functional_form_returns_what_the_fake_promises_and_writes_nothing(contract) -> None:
    for case in contract.cases:
        args = case.make(torch.float32, generator())
        before = cloned(args)
        outputs = outputs_of(op_for(contract.name, inplace=False)(*args))
        fakes = outputs_of(contract.fake(*args))
        assert [(o.shape, o.dtype, o.stride()) for o in outputs] == [
            (f.shape, f.dtype, f.stride()) for f in fakes
        ], case.name
        for given, kept in zip(args, before, strict=True):
            assert not torch.is_tensor(given) or equal(given, kept), case.name
        pointers = {a.data_ptr() for a in args if torch.is_tensor(a) and a.numel()}
        assert not pointers & {o.data_ptr() for o in outputs if o.numel()}, case.name


@pytest.mark.parametrize(
    "contract", [c for c in CONTRACTS if c.inplace_schema], ids=lambda c: c.name
)
def test_the_inplace_form_writes_what_the_functional_form_returns(contract) -> None:
    names = contract.signature.parameter_names
    for case in contract.cases:
        args = case.make(torch.float32, generator())
        written = cloned(args)
        expected = outputs_of(op_for(contract.name, inplace=False)(*cloned(args)))
        assert op_for(contract.name, inplace=True)(*written) is None
        for name, value in zip(contract.signature.inplace, expected, strict=True):
            target = written[names.index(name)]
            if target is not None:
                assert equal(target, value), case.name


def test_an_op_runs_the_binding_that_its_graph_names() -> None:
    manager = OpManager()
    binding = manager.bind_op("silu_and_mul")
    entry = bind_name(binding, "test")
    entry.fn = lambda x: x[..., :2] * 0 + 7
    x = torch.randn(3, 32)
    try:
        out = torch.ops.vllm_fl.silu_and_mul(x, binding=entry.name)
        assert torch.equal(out, torch.full((3, 2), 7.0))
    finally:
        del entries[entry.name]


def test_a_graph_of_another_process_with_another_choice_says_so() -> None:
    with pytest.raises(DispatchError, match=r"'silu_and_mul\(\):gone'.*which no layer of this"):
        torch.ops.vllm_fl.silu_and_mul(torch.randn(3, 32), binding="silu_and_mul():gone")


def test_equal_choices_for_equal_facts_share_one_name() -> None:
    facts = {"hidden_size": 64, "weight_dtype": torch.float32, "weight_size": 64,
             "variance_size": None}  # fmt: skip
    first = OpManager().bind_op("rms_norm", facts=facts)
    second = OpManager().bind_op("rms_norm", facts=facts)
    try:
        entry = bind_name(first, "hidden_size=64")
        assert bind_name(second, "hidden_size=64") is entry
        ours = "vendor.cpu.fl>" if NATIVE else ""
        assert entry.name == f"rms_norm(hidden_size=64):{ours}vendor.cpu>reference.torch"
    finally:
        del entries[entry.name]


def test_other_functions_under_the_same_ids_get_a_name_of_their_own() -> None:
    def binding_of(fn):
        registry = OpRegistry()
        manager = OpManager(registry)
        manager.ensure_initialized()
        registry.register_impl(
            OpImpl("silu_and_mul", "vendor.cpu.mine", BackendImplKind.VENDOR, fn, "cpu", 200)
        )
        return manager.bind_op("silu_and_mul")

    first, second = binding_of(lambda x: x), binding_of(lambda x: x + 1)
    made = [bind_name(b, "test") for b in (first, second, first, second)]
    try:
        assert [entry.binding for entry in made] == [first, second, first, second]
        assert made[1].name == f"{made[0].name}#2"
    finally:
        for entry in made[:2]:
            del entries[entry.name]


def test_an_exception_in_a_graph_says_which_implementation_and_which_shapes() -> None:
    binding = OpManager().bind_op("silu_and_mul")
    entry = bind_name(binding, "raises")

    def fail(x):
        raise RuntimeError("broken")

    entry.fn = fail
    try:
        with pytest.raises(RuntimeError, match="broken") as caught:
            torch.ops.vllm_fl.silu_and_mul(torch.randn(3, 32), binding=entry.name)
        assert f"implementation '{CPU_IMPL}' of op 'silu_and_mul'" in caught.value.__notes__[0]
        assert "float32[3, 32]" in caught.value.__notes__[0]
    finally:
        del entries[entry.name]


def test_a_functional_op_returns_memory_of_its_own_even_if_the_implementation_does_not() -> None:
    entry = bind_name(OpManager().bind_op("silu_and_mul"), "alias")
    entry.fn = lambda x: x
    try:
        x = torch.randn(3, 32)
        out = torch.ops.vllm_fl.silu_and_mul(x, binding=entry.name)
        assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    finally:
        del entries[entry.name]


def test_the_inplace_form_refuses_to_hold_two_results_in_one_place() -> None:
    rows, weight = torch.randn(5, 64), torch.ones(64)
    before = rows.clone()
    for x, residual in ((rows, rows), (rows[:4], rows[1:]), (rows[1:], rows[:4])):
        with pytest.raises(DispatchError, match="x and residual share memory"):
            torch.ops.vllm_fl.fused_add_rms_norm_(x, residual, weight, 1e-6)
    assert torch.equal(rows, before)
    torch.ops.vllm_fl.fused_add_rms_norm_(rows[:2], rows[2:4], weight, 1e-6)


def test_bindings_made_for_other_reasons_are_not_shared() -> None:
    plain = OpManager().bind_op("silu_and_mul")
    with policy_context(SelectionPolicy(prefer="vendor", strict=True)):
        strict = OpManager().bind_op("silu_and_mul")
    made = [bind_name(b, "reasons") for b in (plain, strict)]
    try:
        assert made[0] is not made[1]
        assert made[1].binding is strict
    finally:
        for entry in made:
            del entries[entry.name]
