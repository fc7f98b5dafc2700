# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_fl.dispatch import (
    BackendImplKind,
    Config,
    ConfigError,
    OpManager,
    SelectionPolicy,
    UnknownOpError,
    call_op,
    explain_op,
    get_default_manager,
    load_config,
    policy_context,
    resolve_op,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.memory import SCOPES_KEPT
from vllm_fl.dispatch.policy import active_scope, check_token, in_scope, token_matches

from .helpers import SCALE, make_impl, make_manager, returning

TOKENS = "flagos, vendor, reference, vendor:<name>, impl:<impl_id>, native"


# --------------------------------------------------------------------------- the values


def test_a_policy_says_nothing_by_default() -> None:
    policy = SelectionPolicy()
    assert (policy.prefer, policy.strict, policy.per_op_order) == (None, False, ())
    assert (policy.allow_vendors, policy.deny_vendors) == (None, frozenset())
    assert (policy.flagos_whitelist, policy.flagos_blacklist) == (None, frozenset())


def test_equal_policies_are_equal_and_hash_equally_however_they_were_written() -> None:
    one = SelectionPolicy(
        prefer=BackendImplKind.VENDOR,
        per_op_order={"b": ["native"], "a": ["vendor:x", "reference"]},
        allow_vendors=["x", "y"],
        deny_vendors=("z",),
        flagos_whitelist={"a"},
        flagos_blacklist=["b", "b"],
    )
    other = SelectionPolicy(
        prefer="vendor",
        per_op_order=(("a", ("vendor:x", "reference")), ("b", ("native",))),
        allow_vendors=frozenset({"y", "x"}),
        deny_vendors=frozenset({"z"}),
        flagos_whitelist=frozenset({"a"}),
        flagos_blacklist=frozenset({"b"}),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != SelectionPolicy()
    assert type(one.prefer) is str
    assert one.order_for("a") == ("vendor:x", "reference")
    assert one.order_for("c") == ()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prefer": "cuda"}, 'unknown kind "cuda"; valid: flagos, vendor, reference.'),
        (
            {"prefer": "VENDOR"},
            'unknown kind "VENDOR"; valid: flagos, vendor, reference. Did you mean "vendor"?',
        ),
        ({"prefer": 5}, 'unknown kind "5"; valid: flagos, vendor, reference.'),
        ({"strict": 1}, "SelectionPolicy: strict must be a bool, found 1"),
        (
            {"per_op_order": {"scale": ["vendr"]}},
            f'unknown order token "vendr"; valid: {TOKENS}. Did you mean "vendor"?',
        ),
        (
            {"per_op_order": {"scale": ["vendor:"]}},
            f'unknown order token "vendor:"; valid: {TOKENS}. Did you mean "vendor"?',
        ),
        ({"per_op_order": {"scale": [7]}}, f'unknown order token "7"; valid: {TOKENS}.'),
        (
            {"per_op_order": {"scale": "native"}},
            "per_op_order: the order of 'scale' must be a list of tokens, found 'native'",
        ),
        (
            {"per_op_order": {"scale": None}},
            "per_op_order: the order of 'scale' must be a list of tokens, found None",
        ),
        (
            {"per_op_order": "scale=native"},
            "per_op_order must map op names to lists of order tokens, found 'scale=native'",
        ),
        (
            {"per_op_order": None},
            "per_op_order must map op names to lists of order tokens, found None",
        ),
        (
            {"per_op_order": (("scale", ("native",)), ("scale", ("vendor",)))},
            "per_op_order: the op 'scale' is given twice",
        ),
        ({"deny_vendors": "cuda"}, "deny_vendors must be a collection of names, found 'cuda'"),
        ({"deny_vendors": None}, "deny_vendors must be a collection of names, found None"),
        ({"allow_vendors": 3}, "allow_vendors must be a collection of names, found 3"),
        ({"flagos_whitelist": [3]}, "flagos_whitelist must hold strings, found [3]"),
    ],
)
def test_a_malformed_policy_is_an_error_that_names_field_value_and_valid_ones(
    fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SelectionPolicy(**fields)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "token",
    ["flagos", "vendor", "reference", "native", "vendor:acme", "impl:vendor.acme.fast"],
)
def test_an_order_token_is_returned_as_it_is(token: str) -> None:
    assert check_token(token) == token


def test_a_token_names_implementations_by_kind_vendor_or_id_and_native_names_none() -> None:
    flagos, fast, torch = map(make_impl, ("default.flaggems", "vendor.a.fast", "reference.torch"))
    named = {
        token: [i.impl_id for i in (flagos, fast, torch) if token_matches(token, i)]
        for token in ("flagos", "vendor", "vendor:a", "vendor:b", "reference", "native")
    }
    assert named == {
        "flagos": ["default.flaggems"],
        "vendor": ["vendor.a.fast"],
        "vendor:a": ["vendor.a.fast"],
        "vendor:b": [],
        "reference": ["reference.torch"],
        "native": [],
    }
    assert token_matches("impl:vendor.a.fast", fast)
    assert not token_matches("impl:vendor.a", fast)


def test_an_order_for_one_mode_goes_before_the_order_for_both() -> None:
    policy = SelectionPolicy(
        per_op_order={"a": ["vendor"], "a@compiled": ["native"], "b@eager": ["flagos"]}
    )
    assert policy.order_for("a") == policy.order_for("a", "eager") == ("vendor",)
    assert policy.order_for("a", "compiled") == ("native",)
    assert policy.order_for("b", "eager") == ("flagos",)
    assert policy.order_for("b", "compiled") == ()
    assert policy.order_key("a", "compiled") == "a@compiled"
    assert policy.order_key("a", "eager") == "a"


def test_an_order_for_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        SelectionPolicy(per_op_order={"a@compile": ["native"]})
    assert str(caught.value) == (
        '"a@compile": unknown mode "compile"; valid: eager, compiled. Did you mean "compiled"?'
    )


# -------------------------------------------------------------------------- the contexts


@pytest.fixture
def manager() -> OpManager:
    """The default manager with one implementation of each kind."""
    manager = get_default_manager()
    manager.registry.declare(SCALE)
    manager.registry.register_many(
        make_impl(impl_id, returning(impl_id))
        for impl_id in ("default.flaggems", "vendor.acme", "vendor.other", "reference.torch")
    )
    return manager


def everywhere(op_name: str = "scale") -> set[str]:
    """What is chosen, asked in each of the ways in which one can ask."""
    manager = get_default_manager()
    return {
        call_op(op_name, 1),
        resolve_op(op_name)(1),
        manager.bind(op_name)(1),
        manager.bind(op_name, donate=True)(1),
        manager.call(op_name, x=1),
        explain_op(op_name).winner_id or "",
        explain_op(op_name, 1).winner_id or "",
        manager.get_selected_impl_id(op_name) or "",
        manager.resolve_candidates(op_name)[0].impl_id,
    }


def test_a_context_acts_on_call_resolve_bind_and_explain_and_ends(manager: OpManager) -> None:
    assert everywhere() == {"default.flaggems"}
    with with_preference("vendor"):
        assert everywhere() == {"vendor.acme"}
    with policy_context(SelectionPolicy(per_op_order={"scale": ["reference"]})):
        assert everywhere() == {"reference.torch"}
    assert everywhere() == {"default.flaggems"}


def test_a_context_ends_after_an_exception(manager: OpManager) -> None:
    with pytest.raises(ZeroDivisionError), with_preference("reference"):
        raise ZeroDivisionError
    assert active_scope() is None
    assert everywhere() == {"default.flaggems"}


def test_what_was_bound_in_a_context_keeps_its_choice(manager: OpManager) -> None:
    with with_preference("reference"):
        fn = manager.bind("scale")
    assert fn(1) == "reference.torch"


def test_contexts_nest_and_each_adds_to_the_one_around_it(manager: OpManager) -> None:
    with with_preference(BackendImplKind.VENDOR):
        with with_denied_vendors("acme"):
            assert everywhere() == {"vendor.other"}
            with with_denied_vendors("other"):
                assert everywhere() == {"default.flaggems"}
                with with_strict_mode(), with_allowed_vendors("acme", "other"):
                    assert manager.policy_in_force == SelectionPolicy(
                        prefer="vendor",
                        strict=True,
                        allow_vendors=frozenset({"acme", "other"}),
                        deny_vendors=frozenset({"acme", "other"}),
                    )
            assert everywhere() == {"vendor.other"}
        assert everywhere() == {"vendor.acme"}
    assert everywhere() == {"default.flaggems"}


def test_a_context_starts_from_the_configured_policy(
    manager: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "acme")
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    with with_denied_vendors("other"):
        assert manager.policy_in_force.deny_vendors == {"acme", "other"}
        assert manager.policy_in_force.prefer == "vendor"
        assert everywhere() == {"default.flaggems"}


def test_a_helpers_change_is_applied_to_the_policy_of_whichever_manager_decides() -> None:
    impls = [make_impl(f"vendor.{name}") for name in ("a", "b", "c")]
    first = make_manager(*impls, deny_vendors=frozenset({"a"}))
    second = make_manager(*impls, deny_vendors=frozenset({"b"}))
    with with_denied_vendors("c"):
        assert first.get_selected_impl_id("scale") == "vendor.b"
        assert second.get_selected_impl_id("scale") == "vendor.a"
        first.configure(Config(policy=SelectionPolicy(deny_vendors=frozenset({"b"}))))
        assert first.get_selected_impl_id("scale") == "vendor.a"  # as it is where it acts


def test_entering_a_helper_asks_nothing_of_the_default_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "cuda")  # it could not say anything but an error
    manager = make_manager(make_impl("vendor.a"), make_impl("reference.torch"))
    with with_preference("reference"):
        assert manager.get_selected_impl_id("scale") == "reference.torch"


def test_a_helper_inside_a_policy_context_changes_that_policy() -> None:
    manager = make_manager(make_impl("vendor.a"), make_impl("vendor.b"), prefer="reference")
    with policy_context(SelectionPolicy(deny_vendors=frozenset({"a"}))), with_strict_mode():
        assert manager.policy_in_force == SelectionPolicy(
            strict=True, deny_vendors=frozenset({"a"})
        )


def test_the_scope_of_one_place_can_be_entered_in_another() -> None:
    manager = make_manager(make_impl("vendor.a"), make_impl("reference.torch"))
    with with_preference("reference"):
        scope = active_scope()
    with with_strict_mode(), in_scope(scope):
        assert manager.policy_in_force == SelectionPolicy(prefer="reference")
    with with_preference("reference"), in_scope(None):
        assert manager.get_selected_impl_id("scale") == "vendor.a"


def test_many_contexts_do_not_grow_what_is_remembered() -> None:
    names = [f"v{i}" for i in range(3 * SCOPES_KEPT)]
    manager = make_manager(*(make_impl(f"vendor.{name}", returning(name)) for name in names))
    for name in names:
        with with_allowed_vendors(name):
            assert manager.call("scale", 1) == name
    assert len(manager._scoped) == len(manager._checked_policies) == SCOPES_KEPT
    with with_allowed_vendors("v0"):  # forgotten, and worked out again
        assert manager.call("scale", 1) == "v0"


def test_a_plain_policy_context_replaces_the_configured_policy() -> None:
    manager = make_manager(make_impl("vendor.acme"), make_impl("reference.torch"), prefer="vendor")
    with policy_context(SelectionPolicy(prefer="reference")):
        assert manager.get_selected_impl_id("scale") == "reference.torch"


def test_allowing_nobody_leaves_out_every_vendor(manager: OpManager) -> None:
    with with_allowed_vendors():
        candidates = manager.resolve_candidates("scale")
    assert [i.impl_id for i in candidates] == ["default.flaggems", "reference.torch"]


def test_a_context_belongs_to_the_thread_that_entered_it(manager: OpManager) -> None:
    seen: dict[str, set[str]] = {}
    entered, checked = threading.Event(), threading.Event()

    def inside() -> None:
        with with_preference("reference"):
            entered.set()
            checked.wait(10)
            seen["inside"] = everywhere()

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(10)
    seen["outside"] = everywhere()
    checked.set()
    thread.join()
    assert seen == {"inside": {"reference.torch"}, "outside": {"default.flaggems"}}


def test_a_context_belongs_to_the_asyncio_task_that_entered_it(manager: OpManager) -> None:
    async def task(change: Callable[[], Any], turn: asyncio.Barrier) -> set[str]:
        with change():
            await turn.wait()  # every task is inside its context now
            return everywhere()

    async def main() -> list[set[str]]:
        turn = asyncio.Barrier(3)
        return await asyncio.gather(
            task(lambda: with_preference("vendor"), turn),
            task(lambda: with_preference("reference"), turn),
            task(lambda: policy_context(SelectionPolicy()), turn),
        )

    assert asyncio.run(main()) == [{"vendor.acme"}, {"reference.torch"}, {"default.flaggems"}]
    assert everywhere() == {"default.flaggems"}


def test_an_unknown_vendor_in_a_context_is_an_error_at_first_use(manager: OpManager) -> None:
    with with_denied_vendors("acmee"):
        for use in (call_op, explain_op, manager.bind):
            with pytest.raises(ConfigError) as caught:
                use("scale")
            assert str(caught.value) == (
                'policy_context: unknown vendor "acmee"; valid: acme, other. Did you mean "acme"?'
            )


def test_a_vendor_that_registers_after_the_error_is_known(manager: OpManager) -> None:
    with with_denied_vendors("late"):
        with pytest.raises(ConfigError):
            call_op("scale", 1)
        manager.registry.register_impl(make_impl("vendor.late"))
        assert call_op("scale", 1) == "default.flaggems"


def test_unknown_ops_and_implementations_in_a_context_are_errors(manager: OpManager) -> None:
    with (
        policy_context(SelectionPolicy(flagos_blacklist=frozenset({"scal"}))),
        pytest.raises(ConfigError) as caught,
    ):
        call_op("scale", 1)
    assert str(caught.value) == (
        'policy_context: unknown op "scal"; valid: scale. Did you mean "scale"?'
    )
    order = (("scale", ("impl:vendor.acne",)),)
    with policy_context(SelectionPolicy(per_op_order=order)), pytest.raises(ConfigError) as caught:
        call_op("scale", 1)
    assert str(caught.value) == (
        'policy_context: unknown implementation of scale "vendor.acne"; valid: default.flaggems, '
        'reference.torch, vendor.acme, vendor.other. Did you mean "vendor.acme"?'
    )


def test_a_context_takes_a_policy_and_nothing_else() -> None:
    with (
        pytest.raises(ConfigError) as caught,
        policy_context({"prefer": "vendor"}),
    ):
        pass
    assert str(caught.value) == "policy_context() takes a SelectionPolicy, found dict"


def test_values_that_a_context_keeps_are_explained_by_their_own_source() -> None:
    config = load_config({"VLLM_FL_DENY_VENDORS": "acme", "VLLM_FL_PER_OP": "scale=vendor"})
    manager = make_manager(
        make_impl("vendor.acme"), make_impl("vendor.other"), make_impl("reference.torch"),
        config=config,
    )  # fmt: skip
    policy = SelectionPolicy(
        prefer="reference",
        deny_vendors=frozenset({"acme"}),
        per_op_order=(("scale", ("vendor",)),),
    )
    with policy_context(policy):
        decision = manager.explain("scale")
    assert decision.policy == {
        "prefer": {"value": "reference", "source": "policy_context"},
        "deny_vendors": {
            "value": ["acme"],
            "source": "environment variable VLLM_FL_DENY_VENDORS",
        },
        "op_backends.scale": {
            "value": ["vendor"],
            "source": "environment variable VLLM_FL_PER_OP",
        },
    }
    assert decision.reason == (
        "the order for scale names it (from environment variable VLLM_FL_PER_OP)"
    )


def test_strict_refuses_an_op_that_nobody_declared() -> None:
    manager = make_manager(make_impl("vendor.acme", op_name="scales"), make_impl("vendor.acme"))
    assert manager.get_selected_impl_id("scales") == "vendor.acme"
    with with_strict_mode(), pytest.raises(UnknownOpError) as caught:
        manager.call("scales", 1)
    assert str(caught.value) == (
        "op 'scales' has implementations but no declaration, and strict mode is on. "
        'Did you mean "scale"?'
    )


def test_a_manager_uses_the_policy_of_its_configuration() -> None:
    manager = make_manager(
        make_impl("vendor.acme"), make_impl("default.flaggems"),
        config=Config(policy=SelectionPolicy(prefer="vendor")),
    )  # fmt: skip
    assert manager.base_policy.prefer == "vendor"
    assert manager.get_selected_impl_id("scale") == "vendor.acme"
