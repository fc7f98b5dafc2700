# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_fl.backends import Backend
from vllm_fl.dispatch import Decision, OpImpl, OpSignature, SelectionPolicy, decide
from vllm_fl.dispatch.decision import Call, describe_policy, order_candidates
from vllm_fl.dispatch.types import ACCEPTED, DeviceFacts, Rejected, Verdict

from .helpers import CPU, SCALE, codes, make_impl, reasons, scale

ACME = DeviceFacts("acme", "acme")
SIZED = OpSignature.parse(
    "scale(x, factor=2)",
    facts=lambda x, factor=2: {"size": len(x)},
    fact_names=("size",),
)


def available(impl: OpImpl) -> Verdict:
    return ACCEPTED


def choose(*impls: OpImpl, device: DeviceFacts = CPU, **more: Any) -> Decision:
    """decide() for `scale`; what is no argument of decide() is a field of the policy."""
    own = ("availability", "signature", "facts", "call", "mode", "layer", "dispatch_compiled",
           "batch_invariant", "sources")  # fmt: skip
    arguments = {name: more.pop(name) for name in own if name in more}
    arguments.setdefault("availability", available)
    return decide("scale", impls, SelectionPolicy(**more), device, **arguments)


def order(*impls: OpImpl, device: DeviceFacts = CPU, **policy: Any) -> list[str]:
    """The ids in order, "native" among them, and after "|" those that are left out."""
    ordered, left_out = order_candidates("scale", impls, SelectionPolicy(**policy), device)
    names = [c if isinstance(c, str) else c.impl_id for c in ordered]
    return [*names, *(["|"] if left_out else []), *(impl.impl_id for impl in left_out)]


FLAGOS, VENDOR, OTHER, TORCH = (
    make_impl(i) for i in ("default.flaggems", "vendor.acme", "vendor.other", "reference.torch")
)
ALL = (TORCH, OTHER, FLAGOS, VENDOR)


# ------------------------------------------------------------------------------ the order


def test_priority_decides_where_nothing_else_was_said() -> None:
    assert order(*ALL) == ["default.flaggems", "vendor.acme", "vendor.other", "reference.torch"]
    decision = choose(*ALL)
    assert decision.winner is FLAGOS
    assert decision.reason == "highest priority available (150)"
    assert reasons(decision) == {
        "vendor.acme": "priority 100 is below default.flaggems's 150",
        "vendor.other": "priority 100 is below default.flaggems's 150",
        "reference.torch": "priority 50 is below default.flaggems's 150",
    }


def test_a_vendors_higher_priority_beats_the_default_kind() -> None:
    fast = make_impl("vendor.acme.fast", priority=151)
    assert order(*ALL, fast)[0] == "vendor.acme.fast"


def test_in_a_tie_the_vendor_of_the_device_comes_first() -> None:
    decision = choose(VENDOR, OTHER, device=DeviceFacts("other", "cuda"))
    assert decision.winner is OTHER
    assert reasons(decision) == {
        "vendor.acme": "equal priority; vendor.other is the device's own vendor's"
    }


def test_in_a_tie_without_the_devices_vendor_the_smaller_id_comes_first() -> None:
    second = make_impl("vendor.acme.second")
    assert order(second, OTHER, VENDOR) == ["vendor.acme", "vendor.acme.second", "vendor.other"]
    assert reasons(choose(second, VENDOR)) == {
        "vendor.acme.second": "equal priority; vendor.acme is the smaller id"
    }


def test_the_order_of_registration_does_not_matter() -> None:
    assert choose(*ALL) == choose(*reversed(ALL))


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("vendor", ["vendor.acme", "vendor.other", "default.flaggems", "reference.torch"]),
        ("reference", ["reference.torch", "default.flaggems", "vendor.acme", "vendor.other"]),
        ("flagos", ["default.flaggems", "vendor.acme", "vendor.other", "reference.torch"]),
    ],
)
def test_prefer_puts_a_kind_first_and_the_others_after_it(prefer: str, expected: list[str]) -> None:
    assert order(*ALL, prefer=prefer) == expected


def test_what_the_policy_put_first_is_explained_by_the_policy() -> None:
    decision = choose(*ALL, prefer="reference", sources={"prefer": "policy.yaml:3"})
    assert decision.reason == "prefer = reference (from policy.yaml:3)"
    assert set(reasons(decision).values()) == {"the policy puts reference.torch first"}
    tie = choose(VENDOR, OTHER, per_op_order={"scale": ["vendor:other"]})
    assert reasons(tie) == {"vendor.acme": "the policy puts vendor.other first"}


def test_a_preference_that_nobody_can_serve_is_not_given_as_the_reason() -> None:
    assert choose(TORCH, prefer="vendor").reason == "highest priority available (50)"


def test_a_per_op_order_is_followed_by_the_default_order() -> None:
    tokens = {"scale": ["impl:reference.torch", "vendor:other"]}
    assert order(*ALL, per_op_order=tokens) == [
        "reference.torch", "vendor.other", "default.flaggems", "vendor.acme",
    ]  # fmt: skip
    decision = choose(*ALL, per_op_order=tokens, sources={"per_op_order.scale": "p.yaml:7"})
    assert decision.reason == "the order for scale names it (from p.yaml:7)"


def test_a_per_op_order_is_closed_under_strict() -> None:
    tokens = {"scale": ["vendor:other", "reference"]}
    assert order(*ALL, per_op_order=tokens, strict=True) == [
        "vendor.other", "reference.torch", "|", "default.flaggems", "vendor.acme",
    ]  # fmt: skip
    decision = choose(*ALL, per_op_order=tokens, strict=True)
    assert codes(decision) == {
        "reference.torch": "after_winner",
        "default.flaggems": "not_in_order",
        "vendor.acme": "not_in_order",
    }
    assert reasons(decision)["vendor.acme"] == (
        "strict closes the order given for scale, which does not name it"
    )
    assert [i.impl_id for i in decision.candidates] == ["vendor.other", "reference.torch"]


def test_an_order_for_another_op_and_strict_alone_close_nothing() -> None:
    assert order(*ALL, per_op_order={"shift": ["reference"]}, strict=True)[-1] == "reference.torch"


def test_an_implementation_that_two_tokens_name_is_taken_once() -> None:
    tokens = {"scale": ["vendor:acme", "vendor", "vendor:acme", "native", "native"]}
    assert order(*ALL, per_op_order=tokens) == [
        "vendor.acme", "vendor.other", "native", "default.flaggems", "reference.torch",
    ]  # fmt: skip


# ----------------------------------------------------------------------- what is left out


def test_a_denied_vendor_loses_wherever_it_stands() -> None:
    decision = choose(VENDOR, OTHER, TORCH, deny_vendors={"acme"})
    assert decision.winner is OTHER
    assert codes(decision) == {"vendor.acme": "denied_vendor", "reference.torch": "after_winner"}
    assert reasons(decision)["vendor.acme"] == "deny_vendors holds 'acme'"
    behind = choose(FLAGOS, VENDOR, deny_vendors={"acme"})
    assert codes(behind) == {"vendor.acme": "denied_vendor"}
    assert behind.candidates == (FLAGOS,)


def test_a_vendor_that_is_not_allowed_loses_and_other_kinds_are_not_concerned() -> None:
    decision = choose(*ALL, allow_vendors={"other"})
    assert codes(decision)["vendor.acme"] == "not_allowed_vendor"
    assert reasons(decision)["vendor.acme"] == "allow_vendors admits other"
    assert decision.candidates == (FLAGOS, OTHER, TORCH)
    nobody = choose(VENDOR, allow_vendors=())
    assert reasons(nobody) == {"vendor.acme": "allow_vendors admits nobody"}
    assert nobody.winner is None


def test_the_flagos_lists_concern_kind_flagos_and_the_named_ops_alone() -> None:
    black = choose(*ALL, flagos_blacklist={"scale"})
    assert black.winner is VENDOR
    assert codes(black)["default.flaggems"] == "flagos_list"
    assert reasons(black)["default.flaggems"] == "the flagos blacklist holds this op"
    white = choose(*ALL, flagos_whitelist={"shift"})
    assert white.winner is VENDOR
    assert reasons(white)["default.flaggems"] == "the flagos whitelist does not hold this op"
    assert choose(*ALL, flagos_whitelist={"scale"}).winner is FLAGOS
    assert choose(*ALL, flagos_blacklist={"shift"}).winner is FLAGOS


def test_batch_invariance_leaves_out_what_is_not_marked_so() -> None:
    invariant = make_impl("reference.invariant", batch_invariant=True)
    decision = choose(FLAGOS, invariant, batch_invariant=True)
    assert decision.winner is invariant
    assert codes(decision) == {"default.flaggems": "batch_invariant"}
    assert reasons(decision) == {
        "default.flaggems": "VLLM_BATCH_INVARIANT is on and it is not marked batch-invariant"
    }


def test_every_loser_has_a_reason_and_a_code() -> None:
    verdicts = {
        "vendor.a": Rejected("runs on npu, this device is cpu", "device"),
        "vendor.b": Rejected("requires torch_npu, not installed", "requires"),
        "vendor.c": Rejected("no driver", "unavailable"),
        "vendor.d": Rejected("its availability probe raised OSError: x", "probe_error"),
        "vendor.z": Rejected("loading it raised OSError: y", "load_error"),
    }
    decision = choose(
        *(make_impl(impl_id) for impl_id in verdicts),
        make_impl("vendor.e", supports_layer=lambda facts: "size 3 is odd"),
        make_impl("vendor.f", supports=lambda x, factor=2: "factor 2 is even"),
        make_impl("vendor.g"),
        make_impl("vendor.h", supports=lambda x, factor=2: "not asked behind the winner"),
        make_impl("vendor.i", supports_layer=lambda facts: False),
        availability=lambda impl: verdicts.get(impl.impl_id, ACCEPTED),
        signature=SIZED,
        call=Call(("abc",)),
    )
    assert decision.winner_id == "vendor.g"
    assert [(loser.impl_id, loser.code, loser.reason) for loser in decision.losers] == [
        ("vendor.a", "device", "runs on npu, this device is cpu"),
        ("vendor.b", "requires", "requires torch_npu, not installed"),
        ("vendor.c", "unavailable", "no driver"),
        ("vendor.d", "probe_error", "its availability probe raised OSError: x"),
        ("vendor.e", "layer_guard", "size 3 is odd"),
        ("vendor.f", "call_guard", "factor 2 is even"),
        ("vendor.h", "after_winner", "equal priority; vendor.g is the smaller id"),
        ("vendor.i", "layer_guard", "its layer guard says no"),
        ("vendor.z", "load_error", "loading it raised OSError: y"),
    ]
    assert [i.impl_id for i in decision.candidates] == ["vendor.g", "vendor.h"]
    assert {loser.impl_id for loser in decision.rejected()} == {
        loser.impl_id for loser in decision.losers
    } - {"vendor.h"}
    assert decision.first_choice_rejected == decision.losers[4]


def test_nothing_registered_and_everything_rejected_are_told_apart() -> None:
    nothing = choose()
    assert (nothing.winner, nothing.winner_id, nothing.candidates) == (None, None, ())
    assert nothing.reason == "no implementation is registered"
    refused = choose(TORCH, availability=lambda impl: Rejected("no torch", "requires"))
    assert refused.reason == "every implementation was rejected"
    assert str(refused) == (
        "scale on cpu, eager: nothing available\n"
        "  every implementation was rejected\n"
        "  not reference.torch: no torch"
    )


# --------------------------------------------------------------------------------- guards


def _record(seen: list[Any], answer: Any = True) -> Any:
    def guard(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return answer

    return guard


def test_guards_are_not_asked_in_general() -> None:
    seen: list[Any] = []
    impl = make_impl("vendor.a", supports_layer=_record(seen), supports=_record(seen))
    assert choose(impl, signature=SIZED).winner is impl
    assert seen == []


def test_layer_guards_are_asked_with_the_facts_that_are_given() -> None:
    seen: list[Any] = []
    impl = make_impl("vendor.a", supports_layer=_record(seen, "no"), supports=_record(seen))
    decision = choose(impl, TORCH, signature=SIZED, facts={"size": 8})
    assert decision.winner is TORCH
    assert seen == [(({"size": 8},), {})]


def test_a_call_gives_the_facts_and_both_guards_are_asked() -> None:
    seen: list[Any] = []
    impl = make_impl("vendor.a", supports_layer=_record(seen), supports=_record(seen))
    choose(impl, signature=SIZED, call=Call(("abc",), {"factor": 3}))
    assert seen == [(({"size": 3},), {}), (("abc",), {"factor": 3})]


def test_layer_guards_of_an_op_that_is_declared_without_facts_get_an_empty_mapping() -> None:
    seen: list[Any] = []
    impl = make_impl("vendor.a", supports_layer=_record(seen, "never"))
    assert choose(impl, TORCH, signature=SCALE).winner is TORCH
    assert seen == [(({},), {})]


def test_layer_guards_of_an_undeclared_op_are_asked_as_of_one_without_facts() -> None:
    seen: list[Any] = []
    impl = make_impl("vendor.a", supports_layer=_record(seen, "never"))
    assert choose(impl, TORCH, call=Call((1,))).winner is TORCH
    assert choose(impl, TORCH, facts={"size": 1}).winner is TORCH
    assert seen == [(({},), {}), (({"size": 1},), {})]


def test_a_guard_that_raises_is_named_in_a_note() -> None:
    def guard(facts: Mapping[str, Any]) -> bool:
        return bool(facts["width"])

    with pytest.raises(KeyError) as caught:
        choose(make_impl("vendor.a", supports_layer=guard), signature=SIZED, facts={"size": 1})
    assert caught.value.__notes__ == [
        "vllm_fl: raised by a guard of implementation 'vendor.a' of op 'scale' (guard in "
        f"test_decision.py, line {guard.__code__.co_firstlineno + 1}), asked about size=1. A "
        "guard reads metadata only, and returns True or a reason."
    ]
    with pytest.raises(TypeError, match="this one returned None") as wrong:
        choose(make_impl("vendor.a", supports=_record([], None)), call=Call((1,)))
    assert "a guard of implementation 'vendor.a'" in wrong.value.__notes__[0]


def test_facts_that_cannot_be_read_are_told_as_such() -> None:
    def width(x: Any, factor: Any = 2) -> Mapping[str, Any]:
        return {"width": x.shape[-1]}

    signature = OpSignature.parse("scale(x, factor=2)", facts=width, fact_names=("width",))
    with pytest.raises(AttributeError) as caught:
        choose(make_impl("vendor.a"), signature=signature, call=Call((1,)))
    assert caught.value.__notes__ == [
        "vllm_fl: raised while the facts of op 'scale' were read from 1 (width in "
        f"test_decision.py, line {width.__code__.co_firstlineno + 1}); no guard was asked yet"
    ]


def test_only_a_guards_refusal_counts_as_a_rejection_of_the_first_choice() -> None:
    refusing = make_impl("vendor.b", supports_layer=lambda facts: "odd")
    missing = make_impl("default.flaggems")
    decision = choose(
        missing, refusing, TORCH,
        availability=lambda i: Rejected("no", "requires") if i is missing else ACCEPTED,
        signature=SIZED,
        facts={"size": 3},
    )  # fmt: skip
    assert decision.first_choice_rejected is not None
    assert decision.first_choice_rejected.impl_id == "vendor.b"
    behind = choose(FLAGOS, refusing, signature=SIZED, facts={"size": 3})
    assert behind.first_choice_rejected is None


# ---------------------------------------------------------------------------------- native


def test_native_wins_for_a_layer_and_everything_else_comes_after_it() -> None:
    decision = choose(
        FLAGOS, TORCH,
        per_op_order={"scale": ["native"]},
        layer=True,
        sources={"per_op_order.scale": "p.yaml:2"},
    )  # fmt: skip
    assert (decision.native, decision.winner, decision.winner_id) == (True, None, "native")
    assert decision.reason == "the order for scale names native (from p.yaml:2)"
    assert decision.candidates == ()
    assert reasons(decision) == {
        "default.flaggems": "comes after native",
        "reference.torch": "comes after native",
    }
    assert decision.to_dict()["winner"] == {
        "impl_id": "native", "kind": "native", "vendor": None, "priority": None,
    }  # fmt: skip


def test_native_is_skipped_for_a_call_from_a_library() -> None:
    decision = choose(FLAGOS, TORCH, per_op_order={"scale": ["native"]})
    assert decision.winner is FLAGOS
    assert codes(decision) == {"native": "not_a_layer", "reference.torch": "after_winner"}
    assert reasons(decision)["native"] == "vLLM's own forward exists only inside a layer"


def test_native_after_an_implementation_loses_to_it_and_wins_where_that_is_refused() -> None:
    tokens = {"scale": ["vendor", "native"]}
    decision = choose(VENDOR, TORCH, per_op_order=tokens, layer=True)
    assert decision.winner is VENDOR
    assert codes(decision)["native"] == "after_winner"
    refused = choose(
        VENDOR, TORCH,
        per_op_order=tokens,
        layer=True,
        availability=lambda i: Rejected("no", "requires") if i is VENDOR else ACCEPTED,
    )  # fmt: skip
    assert refused.native
    assert codes(refused) == {"vendor.acme": "requires", "reference.torch": "after_winner"}


def test_in_compiled_mode_a_layer_is_native_unless_somebody_asks_for_it() -> None:
    compiled: dict[str, Any] = {"mode": "compiled", "layer": True}
    decision = choose(FLAGOS, TORCH, **compiled, prefer="reference")
    assert decision.native
    assert decision.reason == "left to the compiler"
    assert set(reasons(decision).values()) == {"comes after native"}
    assert choose(FLAGOS, TORCH, **compiled, dispatch_compiled=True).winner is FLAGOS
    ordered = choose(FLAGOS, TORCH, **compiled, per_op_order={"scale@compiled": ["reference"]})
    assert ordered.winner is TORCH
    assert ordered.reason == "the order for scale names it (from the policy)"
    elsewhere = choose(FLAGOS, TORCH, **compiled, per_op_order={"scale@eager": ["reference"]})
    assert elsewhere.native
    library = choose(FLAGOS, TORCH, mode="compiled")  # a call from a library is no layer
    assert library.winner is FLAGOS


def test_the_order_of_the_mode_is_followed_and_its_source_named() -> None:
    orders = {"scale": ["vendor"], "scale@compiled": ["native"]}
    sources = {"per_op_order.scale": "p.yaml:1", "per_op_order.scale@compiled": "p.yaml:2"}
    eager = choose(*ALL, per_op_order=orders, sources=sources, layer=True)
    assert eager.reason == "the order for scale names it (from p.yaml:1)"
    compiled = choose(*ALL, per_op_order=orders, sources=sources, layer=True, mode="compiled")
    assert compiled.reason == "the order for scale names native (from p.yaml:2)"
    assert compiled.policy["op_backends.scale@compiled"] == {
        "value": ["native"],
        "source": "p.yaml:2",
    }


# --------------------------------------------------------------------------------- what-if


class _Npu(Backend):
    impl_id = "vendor.ascend"
    vendor = "ascend"
    device_types = ("npu",)
    requires = ("torch_npu_that_is_not_installed",)

    def scale(self, x: Any, factor: Any = 2) -> Any:
        return scale(x, factor)


def test_a_what_if_answers_for_another_device_and_says_what_it_assumed() -> None:
    impl = make_impl("vendor.ascend", _Npu().scale)

    def on(device: DeviceFacts) -> Decision:
        return choose(impl, TORCH, device=device, availability=lambda i: i.availability(device))

    here = on(CPU)
    assert reasons(here) == {"vendor.ascend": "runs on npu, this device is cpu"}
    bare = on(DeviceFacts("ascend", "npu", assumed=True))
    assert reasons(bare) == {
        "vendor.ascend": "requires torch_npu_that_is_not_installed, not installed"
    }
    full = on(
        DeviceFacts(
            "ascend", "npu", assumed=True, assumed_modules=("torch_npu_that_is_not_installed",)
        )
    )
    assert full.winner is impl
    assert str(full) == (
        "scale on ascend:npu (assumed), eager: vendor.ascend\n"
        "  chosen: highest priority available (100)\n"
        "  not reference.torch: priority 50 is below vendor.ascend's 100\n"
        "  assumed installed: torch_npu_that_is_not_installed"
    )
    assert full.to_dict()["device"] == {
        "vendor": "ascend",
        "device_type": "npu",
        "name": "",
        "arch": "",
        "assumed": True,
        "assumed_modules": ["torch_npu_that_is_not_installed"],
        "absent_modules": [],
    }


# -------------------------------------------------------------------------- text and data


def test_a_decision_is_text_with_the_policy_and_its_sources() -> None:
    decision = choose(
        FLAGOS, VENDOR, TORCH,
        prefer="vendor",
        deny_vendors={"other"},
        mode="compiled",
        sources={"prefer": "environment variable VLLM_FL_PREFER"},
    )  # fmt: skip
    assert str(decision) == (
        "scale on cpu, compiled: vendor.acme\n"
        "  chosen: prefer = vendor (from environment variable VLLM_FL_PREFER)\n"
        "  not default.flaggems: the policy puts vendor.acme first\n"
        "  not reference.torch: priority 50 is below vendor.acme's 100\n"
        "  policy prefer = vendor (from environment variable VLLM_FL_PREFER)\n"
        "  policy deny_vendors = ['other'] (from the policy)"
    )


def test_a_decision_is_json_of_a_fixed_shape() -> None:
    decision = choose(
        VENDOR, TORCH,
        per_op_order={"scale": ["vendor"], "shift": ["native"]},
        allow_vendors={"b", "acme"},
        sources={"per_op_order.scale": "p.yaml:2", "allow_vendors": "p.yaml:1"},
    )  # fmt: skip
    assert json.loads(json.dumps(decision.to_dict())) == {
        "op": "scale",
        "device": {
            "vendor": "cpu",
            "device_type": "cpu",
            "name": "",
            "arch": "",
            "assumed": False,
            "assumed_modules": [],
            "absent_modules": [],
        },
        "mode": "eager",
        "winner": {
            "impl_id": "vendor.acme",
            "kind": "vendor",
            "vendor": "acme",
            "priority": 100,
        },
        "reason": "the order for scale names it (from p.yaml:2)",
        "losers": [
            {
                "impl_id": "reference.torch",
                "code": "after_winner",
                "reason": "priority 50 is below vendor.acme's 100",
            }
        ],
        "policy": {
            "allow_vendors": {"value": ["acme", "b"], "source": "p.yaml:1"},
            "op_backends.scale": {"value": ["vendor"], "source": "p.yaml:2"},
        },
    }
    assert choose().to_dict()["winner"] is None


def test_a_policy_is_described_for_one_op_or_for_all() -> None:
    policy = SelectionPolicy(strict=True, per_op_order={"a": ["native"], "b": ["vendor"]})
    assert list(describe_policy("a", policy, {})) == ["strict", "op_backends.a"]
    assert list(describe_policy(None, policy, {})) == ["strict", "op_backends.a", "op_backends.b"]
    assert describe_policy(None, SelectionPolicy(), {}) == {}


def test_in_compiled_mode_what_an_order_does_not_name_is_left_to_the_compiler() -> None:
    order = {"per_op_order": {"scale": ["flagos"]}}
    impl = make_impl("vendor.a")
    found = choose(impl, TORCH, **order, mode="compiled", layer=True)
    assert found.winner_id == "native"
    assert found.reason == (
        "left to the compiler; nothing that the order for scale names can be used"
    )
    asked = choose(impl, **order, mode="compiled", layer=True, dispatch_compiled=True)
    assert (asked.winner_id, asked.by_priority) == ("vendor.a", True)
