# SPDX-License-Identifier: Apache-2.0
"""Each refusal of a guard is necessary, sufficient, and made from metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.backends.flaggems.interpreter import FP8_IS_OFF, NOT_INTERPRETED
from tests.backends.flaggems.refusals import REFUSALS, Harm, Refusal
from tests.backends.helpers import OnlyMetadata, randn
from vllm_fl.backends.flaggems import register_ops
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.ops import CONTRACTS
from vllm_fl.testing import outputs_of, worst_errors

CONTRACT_OF = {contract.name: contract for contract in CONTRACTS}
IMPLS = {impl.op_name: impl for impl in register_ops.backend.implementations}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: f"{r.op} {r.name}")


def verdict(op: str, args: tuple[Any, ...]) -> Any:
    impl, contract = IMPLS[op], CONTRACT_OF[op]
    facts = contract.signature.facts_of(*args) if contract.signature.facts else {}
    said = True if impl.supports_layer is None else impl.supports_layer(facts)
    return impl.supports(*args) if said is True and impl.supports is not None else said


def is_right(op: str, result: Any, args: tuple[Any, ...]) -> bool:
    contract = CONTRACT_OF[op]
    dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.float32
    limits = contract.tolerances.get(dtype, contract.tolerances[torch.float32])
    errors = worst_errors(contract, result, args)
    if op in FP8_IS_OFF and not FP8_IS_OFF[op]:
        errors = (0.0, *errors[1:])
    return all(error <= limits.for_output(i) for i, error in enumerate(errors))


@each_refusal
def test_each_refusal_is_said_in_these_words(refusal: Refusal) -> None:
    assert verdict(refusal.op, refusal.arguments()) == refusal.says


@each_refusal
def test_without_its_guard_each_refused_case_does_harm(
    gems: Mapping[str, OpImpl], refusal: Refusal
) -> None:
    op, fn = refusal.op, gems[refusal.op].fn
    args, before = refusal.arguments(), refusal.arguments()
    if refusal.harm is Harm.RAISES:
        with pytest.raises(Exception):  # noqa: B017  (of many kinds; that it raises is the harm)
            fn(*args)
        return
    result = fn(*args)
    if refusal.harm is Harm.SILENT:
        with pytest.raises((RuntimeError, ValueError)):
            CONTRACT_OF[op].reference(*before)
    elif refusal.harm is Harm.WRONG:
        assert not is_right(op, result, before)
    elif refusal.harm is Harm.UNWRITTEN:
        names = CONTRACT_OF[op].signature.parameter_names
        written = [i for i, name in enumerate(names) if name in gems[op].mutates]
        assert any(torch.equal(args[i], before[i]) for i in written)
    else:
        promised = outputs_of(CONTRACT_OF[op].fake(*before))
        assert [(t.dtype, t.shape, t.stride()) for t in outputs_of(result)] != [
            (t.dtype, t.shape, t.stride()) for t in promised
        ]


@each_refusal
def test_the_nearest_accepted_case_is_right(gems: Mapping[str, OpImpl], refusal: Refusal) -> None:
    assert verdict(refusal.op, refusal.neighbour()) is True
    if refusal.op in NOT_INTERPRETED:
        return
    result = gems[refusal.op].fn(*refusal.neighbour())
    assert is_right(refusal.op, result, refusal.neighbour())


@each_refusal
def test_guards_decide_alike_on_tensors_without_data(refusal: Refusal) -> None:
    for args in (refusal.arguments(), refusal.neighbour()):
        bare = tuple(OnlyMetadata(a) if isinstance(a, torch.Tensor) else a for a in args)
        assert verdict(refusal.op, bare) == verdict(refusal.op, args)


def test_without_its_guard_a_gradient_is_lost(gems: Mapping[str, OpImpl]) -> None:
    x = randn((3, 64), torch.float32).requires_grad_()
    assert verdict("silu_and_mul", (x,)) == (
        "a gradient is required, and the forward kernels have none"
    )
    assert CONTRACT_OF["silu_and_mul"].reference(x).requires_grad
    assert not gems["silu_and_mul"].fn(x).requires_grad


def test_rope_leaves_its_arguments_alone(gems: Mapping[str, OpImpl]) -> None:
    """In place it would race."""
    assert gems["rotary_embedding"].mutates == ()


def test_residual_and_x_may_be_one_tensor(gems: Mapping[str, OpImpl]) -> None:
    x, weight = randn((3, 64), torch.float32), torch.ones(64)
    args = (x.clone(), x.clone(), weight, 1e-5)
    found = gems["fused_add_rms_norm"].fn(x, x, weight, 1e-5)
    assert is_right("fused_add_rms_norm", found, args)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"activation": "gelu"}, "activation 'gelu' is not silu"),
        ({"has_expert_map": True},
         "some experts are elsewhere: their ids would be counted beside the counters"),
        ({}, True),
    ],
)  # fmt: skip
def test_experts_are_refused_what_the_kernel_does_not_do(facts: dict[str, Any], says: Any) -> None:
    guard = IMPLS["fused_experts"].supports_layer
    assert guard is not None
    assert guard({"activation": "silu", "has_expert_map": False} | facts) == says
