# SPDX-License-Identifier: Apache-2.0
"""Each refusal of a guard is necessary, sufficient, made from metadata alone, and made before
the call."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.backends.helpers import (
    DIES,
    HALF_DTYPES,
    OnlyMetadata,
    bits,
    cpu_manager,
    in_child,
    off_by,
    wrong_by,
)
from tests.backends.vendor.cpu.refusals import CASES, REFUSALS, Harm, Refusal, rotary, turns
from vllm_fl import ops
from vllm_fl.backends.reference import register_ops as reference_ops
from vllm_fl.backends.vendor.cpu import register_ops as cpu_ops
from vllm_fl.backends.vendor.cpu.impl.common import tensor_reason
from vllm_fl.dispatch.types import OpImpl

REFERENCE = {impl.op_name: impl.fn for impl in reference_ops.backend.implementations}
VENDOR: dict[str, OpImpl] = {impl.op_name: impl for impl in cpu_ops.backend.implementations}
SIGNATURES = {signature.op_name: signature for signature in ops.SIGNATURES}

pytestmark = pytest.mark.usefixtures("kernels", "vllms_kernels_first")
ELEMENTWISE = ("gelu_new", "gelu_fast", "gelu_quick")
each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
each_small_refusal = pytest.mark.parametrize(
    "refusal", [r for r in REFUSALS if not r.huge], ids=lambda r: r.name
)


def verdict(op: str, args: tuple[Any, ...]) -> bool | str:
    """What the layer guard and then the call guard say."""
    impl, facts_of = VENDOR[op], SIGNATURES[op].facts
    if impl.supports_layer is not None and facts_of is not None:
        said = impl.supports_layer(facts_of(*args))
        if said is not True:
            return said
    return impl.supports(*args) if impl.supports is not None else True


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def outputs_of(result: Any) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [r for r in results if r is not None]


def error_of(op: str, args: tuple[Any, ...]) -> float:
    """How far the unguarded function is from the reference."""
    expected = outputs_of(REFERENCE[op](*copies(args)))
    found = outputs_of(VENDOR[op].fn(*args))
    return max(off_by(one, other) for one, other in zip(found, expected, strict=True))


def elements_changed_behind(op: str, args: tuple[Any, ...]) -> int:
    """How many elements the unguarded function writes behind its arguments."""
    bases = [(a._base, a.numel()) for a in args if isinstance(a, torch.Tensor) and a._is_view()]
    before = [base[size:].clone() for base, size in bases]
    VENDOR[op].fn(*args)
    changed = [base[size:] != kept for (base, size), kept in zip(bases, before, strict=True)]
    return sum(int(c.sum()) for c in changed)


@each_refusal
def test_each_refusal_is_said_in_these_words(refusal: Refusal):
    assert verdict(refusal.op, refusal.arguments()) == refusal.says


@each_small_refusal
def test_without_its_guard_each_refused_case_does_harm(refusal: Refusal, request):
    if refusal.aligned:
        request.getfixturevalue("aligned_stores")
    op = refusal.op
    if refusal.harm is Harm.WRONG:
        assert wrong_by(in_child(lambda: error_of(op, refusal.arguments()))) > 0.5
    elif refusal.harm is Harm.OVERRUNS:
        assert wrong_by(in_child(lambda: elements_changed_behind(op, refusal.arguments()))) > 0
    elif refusal.harm is Harm.RAISES:
        assert in_child(lambda: VENDOR[op].fn(*refusal.arguments())).startswith("raised ")
    elif refusal.harm is Harm.DIES:
        assert in_child(lambda: VENDOR[op].fn(*refusal.arguments())).startswith(DIES)
    else:
        with pytest.raises(RuntimeError):
            REFERENCE[op](*refusal.arguments())
        found = in_child(lambda: len(outputs_of(VENDOR[op].fn(*refusal.arguments()))))
        assert found.startswith("returned ")


@pytest.mark.extended
@pytest.mark.parametrize("op", ("silu_and_mul", "gelu_and_mul", *ELEMENTWISE))
def test_without_its_guard_offsets_beyond_32_bits_are_wrong_or_fatal(op: str):
    """The third row starts at element 2**31; whatever lies 8 GB before it is read instead."""

    def experiment() -> float:
        x = torch.empty(3, 2**30, dtype=torch.bfloat16)  # but for these two never touched
        x[2, 0] = x[2, 2**29] = 4.0
        return float(VENDOR[op].fn(x)[2, 0]) * (4 if op in ELEMENTWISE else 1)

    found = in_child(experiment)
    if "can't allocate memory" in found:
        pytest.skip("9 GB of address space are not to be had")
    assert found.startswith(DIES) or abs(wrong_by(found) - 16) > 1


@each_refusal
def test_the_nearest_accepted_case_is_right(refusal: Refusal):
    args = refusal.neighbour()
    assert verdict(refusal.op, args) is True
    # Half precision: at most three roundings (two of them the reference's) of values up to 8.
    half = any(isinstance(a, torch.Tensor) and a.dtype in HALF_DTYPES for a in args)
    tolerance = 8 * 3 * 2.0**-8 if half else 1e-5
    assert wrong_by(in_child(lambda: error_of(refusal.op, refusal.neighbour()))) <= tolerance


@each_refusal
def test_guards_decide_alike_on_tensors_without_data(refusal: Refusal):
    for args in (refusal.arguments(), refusal.neighbour()):
        expected = verdict(refusal.op, args)
        bare = tuple(OnlyMetadata(a) if isinstance(a, torch.Tensor) else a for a in args)
        assert verdict(refusal.op, bare) == expected
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
            continue
        with FakeTensorMode() as mode:
            fake = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
            assert verdict(refusal.op, fake) == expected


def test_a_tensor_without_data_notices_whoever_reads_it():
    bare = OnlyMetadata(torch.zeros(2, 3).t())
    assert (bare.shape, bare.stride(), bare.is_contiguous()) == ((3, 2), (1, 3), False)
    with pytest.raises(AssertionError, match="more than metadata is read"):
        bool(bare.sum() > 0)


@each_small_refusal
def test_a_refused_call_is_served_by_the_reference_and_leaves_its_arguments_alone(
    refusal: Refusal,
):
    """In a child, so that a hole in a guard fails this test instead of ending the tests."""

    def experiment() -> str:
        args = refusal.arguments()
        manager = cpu_manager()
        decision = manager.explain(refusal.op, *args)
        assert decision.winner_id == "reference.torch"
        [loser] = [x for x in decision.losers if x.impl_id == "vendor.cpu"]
        assert loser.code in ("layer_guard", "call_guard") and loser.reason == refusal.says
        real = [a for a in args if isinstance(a, torch.Tensor) and not a.is_meta]
        whole = [a if a._base is None else a._base for a in real]
        before = [bits(a).clone() for a in whole]
        assert outcome(REFERENCE[refusal.op], args) == outcome(
            lambda *a: manager.call(refusal.op, *a), args
        )
        assert all(torch.equal(bits(a), b) for a, b in zip(whole, before, strict=True))
        return "right"

    assert in_child(experiment) == "returned right"


def outcome(fn: Any, args: tuple[Any, ...]) -> list[Any]:
    """Each output's dtype, shape and bits, or the type of the exception."""
    try:
        outputs = outputs_of(fn(*args))
    except (RuntimeError, IndexError) as error:
        return [type(error)]
    return [
        (o.dtype, o.shape, None if o.is_meta or o.dtype is torch.int32 else bits(o).tolist())
        for o in outputs
    ]


def test_every_reason_that_a_guard_can_give_is_among_the_refusals():
    """A guard that nobody shows to be necessary is found here: coverage of the guards' lines."""
    guards = {
        guard
        for impl in VENDOR.values()
        for guard in (impl.supports, impl.supports_layer)
        if guard is not None and impl.op_name != "attention_backend"
    }
    modules = {sys.modules[guard.__module__] for guard in guards}
    codes = {
        fn.__code__
        for module in (*modules, sys.modules[tensor_reason.__module__])
        for name, fn in vars(module).items()
        if inspect.isfunction(fn) and (name.startswith("_supports") or name == "tensor_reason")
    }
    wanted = {(code, line) for code in codes for _, _, line in code.co_lines() if line}
    seen = set()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code in codes:
            seen.add((frame.f_code, frame.f_lineno))
            return trace
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for refusal in CASES:
            verdict(refusal.op, refusal.arguments())
            verdict(refusal.op, refusal.neighbour())
        tensor_reason(torch.empty(1, dtype=torch.bfloat16))  # see test_bfloat16.py
        tensor_reason(torch.empty(1, requires_grad=True))  # see test_bound_sizes.py
        verdict("rotary_embedding", rotary(cache=turns(64).view(2, 8, 64)))  # there too
    finally:
        sys.settrace(previous)
    missing = sorted(
        f"{code.co_name}:{line}" for code, line in wanted - seen if line != code.co_firstlineno
    )
    assert not missing
