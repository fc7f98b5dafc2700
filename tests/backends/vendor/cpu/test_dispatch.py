# SPDX-License-Identifier: Apache-2.0
"""Through the manager: functional by default, in place where arguments are given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.helpers import (
    assert_same,
    at_offset,
    bits,
    cpu_manager,
    name_of,
    randn,
)
from tests.backends.vendor.cpu.refusals import SERVED, fused, gated, norm, rotary
from vllm_fl import ops
from vllm_fl.backends.vendor.cpu import register_ops
from vllm_fl.dispatch import with_preference

pytestmark = pytest.mark.usefixtures("kernels", "vllms_kernels_first")

VENDOR = {impl.op_name: impl for impl in register_ops.backend.implementations}
SIGNATURES = {signature.op_name: signature for signature in ops.SIGNATURES}
CASES = {
    "silu_and_mul": lambda dtype: gated(dtype=dtype),
    "gelu_and_mul": lambda dtype: (*gated(dtype=dtype), "tanh"),
    "gelu_new": lambda dtype: gated(dtype=dtype),
    "gelu_fast": lambda dtype: gated(dtype=dtype),
    "gelu_quick": lambda dtype: gated(dtype=dtype),
    "rms_norm": lambda dtype: norm(randn((3, 64), dtype)),
    "fused_add_rms_norm": lambda dtype: fused(randn((3, 64), dtype)),
    "rotary_embedding": lambda dtype: rotary(key=randn((5, 64), dtype), dtype=dtype),
}
each_op = pytest.mark.parametrize("op", CASES)
each_dtype = pytest.mark.parametrize("dtype", SERVED, ids=name_of)


def outputs_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def tensors_of(op: str, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    names = SIGNATURES[op].parameter_names
    return {
        name: arg for name, arg in zip(names, args, strict=False) if isinstance(arg, torch.Tensor)
    }


def facts_of(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    facts = SIGNATURES[op].facts
    return {} if facts is None else dict(facts(*args))


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_every_op_of_the_vendor_but_the_selector_has_a_case_here():
    assert set(CASES) == {name for name in VENDOR if not SIGNATURES[name].selector}


@each_dtype
@each_op
def test_a_call_is_served_by_the_vendor_and_leaves_its_arguments_alone(op, dtype):
    args, manager = CASES[op](dtype), cpu_manager()
    assert manager.explain(op, *args).winner_id == "vendor.cpu"
    before = {name: bits(x).clone() for name, x in tensors_of(op, args).items()}
    expected = VENDOR[op].fn(*CASES[op](dtype))
    found = manager.call(op, *args)
    assert_same(found, expected)
    for name, x in tensors_of(op, args).items():
        assert torch.equal(bits(x), before[name]), name


@each_op
def test_outputs_of_a_call_share_no_memory_with_arguments_or_each_other(op):
    args = CASES[op](torch.float16)
    outputs = outputs_of(cpu_manager().call(op, *args))
    places = [memory_of(x) for x in (*tensors_of(op, args).values(), *outputs)]
    assert len(set(places)) == len(places)


@each_dtype
@each_op
def test_given_up_arguments_are_written_where_declared_and_nowhere_else(op, dtype):
    args = CASES[op](dtype)
    bound = cpu_manager().bind(op, donate=True, **facts_of(op, args))
    before = {name: bits(x).clone() for name, x in tensors_of(op, args).items()}
    outputs = outputs_of(bound(*args))
    written = {
        name for name, x in tensors_of(op, args).items() if not torch.equal(bits(x), before[name])
    }
    assert written == set(VENDOR[op].mutates)
    assert written <= set(SIGNATURES[op].inplace)
    for name, out in zip(VENDOR[op].mutates, outputs, strict=False):
        assert out is tensors_of(op, args)[name]
    assert_same(outputs, outputs_of(VENDOR[op].fn(*CASES[op](dtype))))


@each_op
def test_outputs_of_a_donating_call_share_memory_only_with_what_is_declared(op):
    args = CASES[op](torch.float16)
    bound = cpu_manager().bind(op, donate=True, **facts_of(op, args))
    places = {memory_of(out) for out in outputs_of(bound(*args))}
    shared = {name for name, x in tensors_of(op, args).items() if memory_of(x) in places}
    assert shared == set(VENDOR[op].mutates)


@each_op
def test_with_all_facts_given_only_the_call_guard_is_left(op):
    args = CASES[op](torch.float32)
    manager = cpu_manager()
    binding = manager.bind_op(op, facts=facts_of(op, args))
    assert binding.decision.winner_id == "vendor.cpu"
    assert_same(binding.fn(*args), VENDOR[op].fn(*CASES[op](torch.float32)))


@pytest.mark.parametrize(
    "op, facts, reason",
    (
        ("gelu_and_mul", {"approximate": "sigmoid"}, "approximate 'sigmoid' is not none or tanh"),
        (
            "rms_norm",
            {"hidden_size": 60, "weight_dtype": None, "weight_size": None, "variance_size": None},
            "hidden_size 60 is not a positive multiple of 8",
        ),
        (
            "rotary_embedding",
            {"head_size": 36, "rotary_dim": 32, "is_neox": True},
            "head_size 36 is not a multiple of 8 (neox style)",
        ),
    ),
)
def test_a_layer_that_is_refused_is_bound_to_the_reference_with_the_reason(op, facts, reason):
    decision = cpu_manager().bind_op(op, facts=facts).decision
    assert decision.winner_id == "reference.torch"
    assert {loser.impl_id: loser.reason for loser in decision.losers}["vendor.cpu"] == reason


@pytest.mark.parametrize("op", [name for name in CASES if VENDOR[name].mutates])
def test_given_up_arguments_at_an_odd_address_are_written_in_place_too(op):
    args = CASES[op](torch.float16)
    moved = tuple(
        at_offset(a, 3) if name in SIGNATURES[op].inplace else a
        for name, a in zip(SIGNATURES[op].parameter_names, args, strict=False)
    )
    expected = VENDOR[op].fn(*CASES[op](torch.float16))
    manager = cpu_manager()
    assert_same(manager.call(op, *moved), expected)
    found = manager.bind(op, donate=True, **facts_of(op, args))(*moved)
    for name, out in zip(VENDOR[op].mutates, found, strict=True):
        assert out is tensors_of(op, moved)[name]
    assert_same(found, expected)


@each_op
def test_the_reference_serves_the_same_call_where_the_policy_prefers_it(op):
    manager = cpu_manager()
    args = CASES[op](torch.float32)
    with with_preference("reference"):
        assert manager.explain(op, *args).winner_id == "reference.torch"
        found = outputs_of(manager.call(op, *args))
    expected = outputs_of(manager.call(op, *args))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ("silu_and_mul", "gelu_and_mul", "rms_norm"))
def test_a_tensor_without_dimensions_is_an_error_and_not_a_crash(op):
    args = (torch.tensor(1.0), *CASES[op](torch.float32)[1:])
    with pytest.raises(IndexError):
        cpu_manager().call(op, *args)
