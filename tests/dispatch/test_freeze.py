# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_fl.dispatch import (
    Config,
    DispatchFrozen,
    OpManager,
    OpSignature,
    SelectionPolicy,
    UnknownOpError,
    load_config,
    with_preference,
)
from vllm_fl.dispatch.types import DeviceFacts

from .helpers import SCALE, codes, make_impl, make_manager, reasons, returning

HOW = (
    ", but a loaded model relies on the present choice. Call thaw() on the manager first and "
    "build the model anew afterwards."
)


@pytest.fixture
def frozen() -> OpManager:
    """`scale` is bound to vendor.acme, which may refuse; reference.torch would follow."""
    manager = make_manager(
        make_impl("vendor.acme", returning("acme"), supports=lambda x, factor=2: x != 0),
        make_impl("reference.torch", returning("torch")),
        make_impl("vendor.unused", returning("unused"), available=lambda: False),
        make_impl("vendor.acme", returning("shifted"), op_name="shift"),
        signatures=[SCALE, OpSignature.parse("shift(x, factor=2)")],
    )
    manager.bind("scale")
    manager.freeze()
    assert manager.frozen
    return manager


def test_a_late_registration_is_not_used_until_thaw_and_shown_as_late(frozen: OpManager) -> None:
    frozen.registry.register_impl(make_impl("default.flaggems", returning("late")))
    assert frozen.call("scale", 1) == "acme"
    assert frozen.bind("scale")(1) == "acme"
    decision = frozen.explain("scale")
    assert decision.winner_id == "vendor.acme"
    assert codes(decision)["default.flaggems"] == "late"
    assert reasons(decision)["default.flaggems"] == (
        "registered after the freeze; not used until thaw"
    )
    frozen.thaw()
    assert not frozen.frozen
    assert frozen.call("scale", 1) == "late"
    assert codes(frozen.explain("scale"))["vendor.acme"] == "after_winner"


def test_an_op_registered_after_the_freeze_is_unknown_until_thaw_and_the_error_says_why(
    frozen: OpManager,
) -> None:
    frozen.registry.register_impl(make_impl("vendor.acme", returning("new"), op_name="turn"))
    with pytest.raises(UnknownOpError) as caught:
        frozen.call("turn", 1)
    assert str(caught.value) == (
        "unknown op 'turn'; known: scale, shift. It was registered after the freeze; not used "
        "until thaw."
    )
    with pytest.raises(UnknownOpError) as caught:
        frozen.call("tunr", 1)
    assert str(caught.value) == "unknown op 'tunr'; known: scale, shift."
    frozen.thaw()
    assert frozen.call("turn", 1) == "new"


@pytest.mark.parametrize("impl_id", ["vendor.acme", "reference.torch"])
def test_removing_what_a_bound_call_can_reach_is_refused(frozen: OpManager, impl_id: str) -> None:
    with pytest.raises(DispatchFrozen) as caught:
        frozen.registry.unregister("scale", impl_id)
    assert str(caught.value) == (f"implementation '{impl_id}' of op 'scale' would be removed{HOW}")
    with pytest.raises(DispatchFrozen):
        frozen.registry.clear()
    assert len(frozen.registry.get_implementations("scale")) == 3
    frozen.thaw()
    assert frozen.registry.unregister("scale", impl_id)


def test_removing_what_nothing_is_bound_to_is_allowed(frozen: OpManager) -> None:
    assert frozen.registry.unregister("scale", "vendor.unused")
    assert frozen.registry.unregister("shift", "vendor.acme")


def test_what_is_bound_after_the_freeze_is_protected_too(frozen: OpManager) -> None:
    assert frozen.call("shift", 1) == "shifted"
    with pytest.raises(DispatchFrozen):
        frozen.registry.unregister("shift", "vendor.acme")


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        ({"VLLM_FL_PREFER": "reference"}, "reference.torch, vendor.acme"),
        ({"VLLM_FL_DENY_VENDORS": "acme"}, "reference.torch"),
        ({"VLLM_FL_PER_OP": "scale=native"}, "native, vendor.acme, reference.torch"),
        (
            {"VLLM_FL_PER_OP": "scale@compiled=reference"},
            "vendor.acme, reference.torch (compiled: reference.torch, vendor.acme)",
        ),
        (
            {"VLLM_FL_PER_OP": "scale=vendor:unused", "VLLM_FL_STRICT": "1"},
            "nothing",
        ),
    ],
)
def test_a_configuration_that_changes_a_bound_decision_is_refused(
    frozen: OpManager, environ: dict[str, str], after: str
) -> None:
    before = frozen.base_policy
    with pytest.raises(DispatchFrozen) as caught:
        frozen.configure(load_config(environ))
    assert str(caught.value) == (
        f"the order of op 'scale' would go from vendor.acme, reference.torch to {after}{HOW}"
    )
    assert frozen.base_policy is before
    frozen.thaw()
    frozen.configure(load_config(environ))


def test_a_configuration_that_changes_no_bound_decision_is_accepted(frozen: OpManager) -> None:
    frozen.configure(
        load_config(
            {
                "VLLM_FL_PER_OP": "shift=native",
                "VLLM_FL_DENY_VENDORS": "unused",
                "VLLM_FL_LOG_LEVEL": "ERROR",
            }
        )
    )
    assert frozen.config.log_level == "ERROR"
    assert frozen.call("scale", 1) == "acme"


def test_another_device_is_refused_and_the_same_is_accepted(frozen: OpManager) -> None:
    frozen.set_device(frozen.device)
    with pytest.raises(DispatchFrozen) as caught:
        frozen.set_device(DeviceFacts("acme", "acme"))
    assert str(caught.value).startswith("the device would become DeviceFacts(vendor='acme'")
    assert str(caught.value).endswith(HOW)


def test_a_policy_context_still_chooses_among_what_was_there(frozen: OpManager) -> None:
    frozen.registry.register_impl(make_impl("reference.better", returning("late"), priority=60))
    with with_preference("reference"):
        assert frozen.call("scale", 1) == "torch"
    assert frozen.call("scale", 1) == "acme"


def test_freezing_and_thawing_twice_is_fine(frozen: OpManager) -> None:
    frozen.registry.register_impl(make_impl("default.flaggems", returning("late")))
    frozen.freeze()
    assert frozen.call("scale", 1) == "acme"
    frozen.thaw()
    frozen.thaw()
    assert frozen.call("scale", 1) == "late"


def test_freezing_runs_discovery_first() -> None:
    manager = make_manager(make_impl("vendor.acme"), config=Config(policy=SelectionPolicy()))
    manager.freeze()
    assert manager.call("scale", 2) == 4
