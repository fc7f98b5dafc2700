# SPDX-License-Identifier: Apache-2.0
"""When an op that fuses others takes their place, and what is said where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dispatch.helpers import make_impl, make_manager, reasons
from vllm_fl.dispatch import OpImpl, OpManager, OpSignature
from vllm_fl.dispatch.decision import LEFT_TO_COMPILER
from vllm_fl.dispatch.fusion import ONE_BY_ONE

PARTS = ("norm", "rope")
SIGNATURES = (
    OpSignature.parse("norm(x, factor=2)"),
    OpSignature.parse("rope(x, factor=2)"),
    OpSignature.parse("norm_rope(x, factor=2)", fuses=PARTS),
)
IMPLS = ("vendor.cpu", "reference.torch")


def impl(op: str, impl_id: str, **fields: Any) -> OpImpl:
    return make_impl(impl_id, op_name=op, **fields)


def manager(*more: OpImpl, fused: tuple[str, ...] = IMPLS, **policy: Any) -> OpManager:
    """Every op has a vendor's implementation and a reference, and the fused one those named."""
    impls = [impl(op, name) for op in PARTS for name in IMPLS]
    impls += [impl("norm_rope", name) for name in fused]
    return make_manager(*impls, *more, signatures=SIGNATURES, **policy)


def orders(**by_op: str) -> dict[str, Any]:
    return {
        "per_op_order": tuple((op.replace("_in_", "@"), (token,)) for op, token in by_op.items())
    }


def test_a_vendors_implementation_takes_the_place_of_the_layers() -> None:
    decision = manager().decide("norm_rope", layer=True)
    assert decision.winner_id == "vendor.cpu"
    assert decision.reason == "highest priority available (100)"
    assert decision.candidates == (decision.winner,)


def test_a_reference_alone_leaves_the_layers_one_by_one_and_says_so() -> None:
    decision = manager(fused=("reference.torch",)).decide("norm_rope", layer=True)
    assert (decision.native, decision.reason) == (True, ONE_BY_ONE)
    assert reasons(decision) == {
        "reference.torch": "it is no faster than norm and rope one by one; an order for norm_rope "
        "that names it uses it"
    }


def test_a_reference_that_an_order_names_is_used() -> None:
    decision = manager(fused=("reference.torch",), **orders(norm_rope="reference")).decide(
        "norm_rope", layer=True
    )
    assert decision.winner_id == "reference.torch"


def test_a_caller_of_the_op_gets_its_reference_like_that_of_any_op() -> None:
    assert manager(fused=("reference.torch",)).decide("norm_rope").winner_id == "reference.torch"


@pytest.mark.parametrize("part", PARTS)
def test_an_order_for_a_part_holds_until_one_for_the_whole_says_otherwise(part) -> None:
    decision = manager(**orders(**{part: "vendor"})).decide("norm_rope", layer=True)
    assert (decision.native, decision.reason) == (True, ONE_BY_ONE)
    assert reasons(decision)["vendor.cpu"] == (
        f"the policy has an order for {part}, which it fuses; an order for norm_rope decides "
        "otherwise"
    )
    both = manager(**orders(**{part: "reference", "norm_rope": "vendor"}))
    assert both.decide("norm_rope", layer=True).winner_id == "vendor.cpu"


def test_an_order_for_a_part_in_another_mode_is_none() -> None:
    found = manager(**orders(norm_in_compiled="reference")).decide("norm_rope", layer=True)
    assert found.winner_id == "vendor.cpu"


def test_a_preference_for_another_kind_is_for_the_parts_too() -> None:
    decision = manager(prefer="flagos").decide("norm_rope", layer=True)
    assert (decision.native, decision.reason) == (True, ONE_BY_ONE)
    assert reasons(decision)["vendor.cpu"] == (
        "prefer = flagos is for norm and rope too, which it fuses; an order for norm_rope decides "
        "otherwise"
    )
    assert manager(prefer="vendor").decide("norm_rope", layer=True).winner_id == "vendor.cpu"


def test_a_preference_for_the_reference_leaves_the_layers_one_by_one() -> None:
    assert manager(prefer="reference").decide("norm_rope", layer=True).native


def test_a_lower_priority_than_a_parts_does_not_take_its_place() -> None:
    faster = impl("rope", "vendor.cpu.fast", priority=120, vendor="cpu")
    decision = manager(faster).decide("norm_rope", layer=True)
    assert (decision.native, decision.reason) == (True, ONE_BY_ONE)
    assert reasons(decision)["vendor.cpu"] == (
        "its priority 100 is below that of vendor.cpu.fast, 120, which serves rope"
    )
    ordered = manager(faster, **orders(norm_rope="vendor"))
    assert ordered.decide("norm_rope", layer=True).winner_id == "vendor.cpu"


def test_an_order_may_put_the_layers_first_or_last() -> None:
    assert manager(**orders(norm_rope="native")).decide("norm_rope", layer=True).native
    last = manager(per_op_order=(("norm_rope", ("vendor", "native")),))
    assert last.decide("norm_rope", layer=True).winner_id == "vendor.cpu"


@pytest.mark.parametrize(
    "policy", ({}, orders(norm_rope="vendor"), orders(norm_rope_in_compiled="vendor"))
)
@pytest.mark.parametrize("dispatch", (False, True))
def test_under_a_compiler_it_is_never_used(policy, dispatch) -> None:
    decision = manager(**policy).decide(
        "norm_rope", layer=True, mode="compiled", dispatch_compiled=dispatch
    )
    assert (decision.native, decision.reason) == (True, LEFT_TO_COMPILER)


def test_only_batch_invariant_implementations_where_none_else_may() -> None:
    invariant = impl("norm_rope", "vendor.cpu.other", vendor="cpu", batch_invariant=True)
    asked = manager(invariant).decide("norm_rope", layer=True, batch_invariant=True)
    assert asked.winner_id == "vendor.cpu.other"
    assert manager().decide("norm_rope", layer=True, batch_invariant=True).native
