# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli import samples
from tests.dispatch.helpers import make_impl, make_manager, returning
from vllm_fl.cli.inventory import inventory, note_of
from vllm_fl.dispatch import discovery


@pytest.fixture(autouse=True)
def _nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "BUILTIN_MODULES", ())


def never(manager) -> dict[str, tuple[str, str] | None]:
    """impl_id to why it is never selected, for the one op of a manager."""
    return {
        entry["impl_id"]: entry["never_selected"] and tuple(entry["never_selected"].values())
        for entry in inventory(manager)["implementations"]
    }


def test_an_inventory_is_json_and_names_everything_that_is_registered() -> None:
    data = json.loads(json.dumps(samples.found()))
    assert [(i["op"], i["impl_id"]) for i in data["implementations"]] == [
        (op, impl_id)
        for op in ("rms_norm", "silu_and_mul")
        for impl_id in ("vendor.acme", "vendor.cpu", "reference.torch")
    ]
    assert data["implementations"][0] == {
        "op": "rms_norm",
        "impl_id": "vendor.acme",
        "kind": "vendor",
        "vendor": "acme",
        "priority": 100,
        "device_types": ["acme"],
        "vendors": None,
        "requires": ["acme_kernels"],
        "mutates": [],
        "guards": [],
        "batch_invariant": False,
        "api_version": 1,
        "note": "",
        "origin": "vllm-plugin-acme 1.2.0",
        "module": "tests.cli.samples",
        "declared": True,
        "available": False,
        "reason": "runs on acme, this device is cpu",
        "never_selected": {"code": "device", "reason": "runs on acme, this device is cpu"},
    }
    assert data["implementations"][1]["guards"] == ["supports_layer", "supports"]
    assert data["vendors"] == {"acme": "acme", "cpu": "cpu"}
    assert [record["name"] for record in data["plugins"]] == ["vllm_fl", "acme"]


def test_what_a_backend_says_of_itself_is_noted_whatever_comes_of_asking() -> None:
    def noted(note: Any) -> str:
        backend = type("Noting", (samples.Kernels,), {"note": note})()
        (impl, _) = samples.impls_of(backend, "vendor.noting", 100)
        return note_of(impl)

    assert noted(lambda self: "with a shim") == "with a shim"
    assert noted("no method") == ""
    told = "as nobody knows: its note raised KeyError: 'triton'"
    assert noted(lambda self: {}["triton"]) == told


def test_the_fingerprint_is_that_of_the_workers() -> None:
    manager = samples.manager()
    assert inventory(manager)["fingerprint"] == manager.fingerprint()


def test_what_no_call_can_get_to_is_never_selected() -> None:
    refusing = {"supports": lambda x, factor=2: "no"}
    assert never(make_manager(make_impl("vendor.a"), make_impl("reference.torch"))) == {
        "vendor.a": None,
        "reference.torch": ("never_reached", "vendor.a takes every call"),
    }
    guarded = make_manager(make_impl("vendor.a", **refusing), make_impl("reference.torch"))
    assert never(guarded) == {"vendor.a": None, "reference.torch": None}


def test_what_the_policy_or_the_machine_leaves_out_is_never_selected_and_told_why() -> None:
    manager = make_manager(
        make_impl("vendor.denied"),
        make_impl("vendor.missing", available=lambda: "no driver"),
        make_impl("reference.torch"),
        deny_vendors=frozenset({"denied"}),
    )
    assert never(manager) == {
        "vendor.denied": ("denied_vendor", "deny_vendors holds 'denied'"),
        "vendor.missing": ("unavailable", "no driver"),
        "reference.torch": None,
    }


def test_what_only_one_mode_gets_to_is_selected_there() -> None:
    manager = make_manager(
        make_impl("vendor.a"), make_impl("reference.torch"),
        per_op_order={"scale@compiled": ["reference"]},
    )  # fmt: skip
    assert never(manager) == {"vendor.a": None, "reference.torch": None}


def test_an_op_whose_guard_raises_is_told_and_the_others_are_shown() -> None:
    manager = make_manager(
        make_impl("vendor.a", supports_layer=lambda facts: facts["size"] > 1),
        make_impl("reference.torch", returning(1), op_name="other"),
    )
    ops = inventory(manager)["ops"]
    assert (ops["scale"]["winner"], ops["scale"]["why"]) == (
        None,
        "a guard raised KeyError: 'size'",
    )
    assert ops["other"] == {
        "signature": None,
        "summary": "",
        "selector": False,
        "winner": "reference.torch",
        "why": "highest priority available (50)",
        "closest": None,
    }


def behind(*impl_ids: str, **policy) -> list[tuple[str, int, str, int]]:
    found = inventory(make_manager(*map(make_impl, impl_ids), **policy))["behind"]
    return [(b["impl_id"], b["priority"], b["winner"], b["winners_priority"]) for b in found]


def test_vendors_that_flaggems_priority_is_before_are_told() -> None:
    flaggems = ("default.flaggems", 150)
    assert behind("default.flaggems", "vendor.a", "vendor.b", "reference.torch") == [
        ("vendor.a", 100, *flaggems),
        ("vendor.b", 100, *flaggems),
    ]
    assert behind("vendor.a", "reference.torch") == []


def test_whoever_said_so_knows_that_flaggems_is_first() -> None:
    order = {"scale": ["flagos", "vendor"]}
    assert behind("default.flaggems", "vendor.a", per_op_order=order) == []
    assert behind("default.flaggems", "vendor.a", prefer="flagos") == []
    assert behind("default.flaggems", "vendor.a", per_op_order={"scale": ["vendor:a"]}) == []


def ties(*impl_ids: str, vendor: str = "cpu", **policy) -> list[tuple[str, list[str], str]]:
    manager = make_manager(*map(make_impl, impl_ids), **policy)
    manager.set_device(type(manager.device)(vendor, "cpu"))
    return [(t["winner"], t["others"], t["settled_by"]) for t in inventory(manager)["ties"]]


def test_a_tie_between_vendors_is_told_with_what_settled_it() -> None:
    assert ties("vendor.b", "vendor.a") == [("vendor.a", ["vendor.b"], "the smaller id")]
    own = "it is the device's own vendor's"
    assert ties("vendor.b", "vendor.a", vendor="b") == [("vendor.b", ["vendor.a"], own)]
    order = {"scale": ["vendor:b"]}
    assert ties("vendor.b", "vendor.a", per_op_order=order) == [
        ("vendor.b", ["vendor.a"], "the policy")
    ]


def test_implementations_of_one_vendor_or_behind_the_winner_are_no_tie() -> None:
    assert ties("vendor.a", "vendor.a.two", "reference.torch") == []
    assert ties("default.flaggems", "vendor.a", "vendor.b") == []
