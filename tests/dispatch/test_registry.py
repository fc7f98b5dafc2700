# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from vllm_fl.backends import Backend
from vllm_fl.dispatch import (
    DuplicateImplementationError,
    OpRegistry,
    OpSignature,
    RegistrationError,
    SignatureMismatchError,
)
from vllm_fl.dispatch.types import API_VERSION, Origin, VendorInfo

from .helpers import SCALE, make_impl, scale

ACME = Origin("entry_point", "acme", "vllm-plugin-acme", "1.0")
HERE = f"manual '{scale.__module__}'"


def misfit(x: Any, scale: Any) -> Any:
    return x


def ids(registry: OpRegistry, op_name: str = "scale") -> list[str]:
    return [impl.impl_id for impl in registry.get_implementations(op_name)]


# --------------------------------------------------------------------------- registering


def test_implementations_are_kept_by_op_highest_priority_first() -> None:
    registry = OpRegistry()
    registry.register_many(make_impl(i) for i in ("reference.torch", "vendor.b", "vendor.a"))
    registry.register_impl(make_impl("default.flaggems"))
    registry.register_impl(make_impl("reference.torch", op_name="shift"))
    assert ids(registry) == ["default.flaggems", "vendor.a", "vendor.b", "reference.torch"]
    assert registry.list_operators() == ["scale", "shift"]
    assert registry.get_implementations("nothing") == ()
    found = registry.get_implementation("scale", "vendor.a")
    assert found is not None
    assert found.fn is scale
    assert registry.get_implementation("scale", "vendor.c") is None
    assert registry.get_implementation("nothing", "vendor.a") is None


def test_register_many_is_all_or_nothing() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    before = registry.generation
    with pytest.raises(SignatureMismatchError):
        registry.register_many(
            [make_impl("vendor.acme"), make_impl("vendor.other"), make_impl("vendor.bad", misfit)]
        )
    with pytest.raises(DuplicateImplementationError):
        registry.register_many([make_impl("vendor.acme"), make_impl("vendor.acme")])
    with pytest.raises(RegistrationError) as caught:
        registry.register_many([make_impl("vendor.acme"), scale])
    assert str(caught.value) == "register_many() takes OpImpl objects, found function"
    assert ids(registry) == []
    assert registry.generation == before


def test_a_duplicate_names_the_origins_of_both() -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.acme"))
    with registry.batch(ACME), pytest.raises(DuplicateImplementationError) as caught:
        registry.register_impl(make_impl("vendor.acme", misfit))
    assert str(caught.value) == (
        f"op 'scale' already has an implementation 'vendor.acme', registered by {HERE} (module "
        f"{scale.__module__}); entry point 'acme', vllm-plugin-acme 1.0 (module {__name__}) "
        "registers it again. Choose another impl_id, for example 'vendor.acme.2', or unregister "
        "the first."
    )


def test_a_duplicate_within_one_list_names_both_origins_too() -> None:
    with pytest.raises(DuplicateImplementationError) as caught:
        OpRegistry().register_many([make_impl("vendor.acme"), make_impl("vendor.acme")])
    assert str(caught.value).count(f"{HERE} (module {scale.__module__})") == 2


def test_the_same_id_may_serve_different_ops() -> None:
    registry = OpRegistry()
    registry.register_many([make_impl("vendor.acme"), make_impl("vendor.acme", op_name="shift")])
    assert ids(registry) == ids(registry, "shift") == ["vendor.acme"]


def test_an_origin_is_recorded_and_the_callers_object_is_left_alone() -> None:
    impl = make_impl("vendor.acme")
    first, second = OpRegistry(), OpRegistry()
    first.register_impl(impl)
    with second.batch(ACME):
        second.register_impl(impl)
    assert impl.origin is None
    by_hand, by_plugin = (r.get_implementations("scale")[0].origin for r in (first, second))
    assert by_hand == Origin("manual", scale.__module__, module=scale.__module__)
    assert by_plugin == Origin(
        "entry_point", "acme", "vllm-plugin-acme", "1.0", module=scale.__module__
    )


def test_the_origin_of_a_method_is_the_module_of_its_function() -> None:
    class Kernels:
        def scale(self, x: Any, factor: Any = 2) -> Any:
            return x

    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.acme", Kernels().scale))
    origin = registry.get_implementations("scale")[0].origin
    assert origin is not None
    assert origin.module == __name__


# --------------------------------------------------------------------------- declarations


def test_the_same_declaration_twice_is_fine_and_changes_nothing() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    generation = registry.generation
    registry.declare(OpSignature.parse("scale(x, factor=2)", summary="other words"))
    assert registry.get_signature("scale") is SCALE
    assert registry.generation == generation


def test_another_declaration_of_a_declared_op_is_refused() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    with pytest.raises(RegistrationError) as caught:
        registry.declare(OpSignature.parse("scale(x, factor=3)"))
    assert str(caught.value) == (
        "op 'scale' is declared as scale(x, factor=2); it cannot be declared again as "
        "scale(x, factor=3). Declare it once, or give the other op a name of its own."
    )
    assert registry.get_signature("scale") is SCALE


def test_a_declaration_that_differs_beyond_its_parameters_says_in_what() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    with pytest.raises(RegistrationError) as caught:
        registry.declare(
            OpSignature.parse("scale(x, factor=2)", inplace=("x",), fact_names=("size",))
        )
    assert str(caught.value) == (
        "op 'scale' is declared as scale(x, factor=2); it cannot be declared again as "
        "scale(x, factor=2) with inplace ('x',) instead of (), fact_names ('size',) instead of "
        "(). Declare it once, or give the other op a name of its own."
    )


def test_declaring_something_else_is_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().declare("scale(x)")
    assert str(caught.value) == (
        "declare() takes an OpSignature, found str; "
        'build one with OpSignature.parse("my_op(x, weight)")'
    )


def test_declaring_after_a_misfitting_implementation_is_refused_and_names_it() -> None:
    registry = OpRegistry()
    with registry.batch(ACME):
        registry.register_impl(make_impl("vendor.acme", misfit))
    with pytest.raises(SignatureMismatchError) as caught:
        registry.declare(SCALE)
    assert str(caught.value).startswith(
        "implementation 'vendor.acme' of op 'scale' (entry point 'acme', vllm-plugin-acme 1.0): "
        f"{__name__}.misfit(x: 'Any', scale: 'Any') -> 'Any' does not fit the declared signature "
        "scale(x, factor=2): missing 'factor'; unexpected 'scale'."
    )
    assert registry.get_signature("scale") is None


def test_declaring_after_a_fitting_implementation_checks_it_and_is_fine() -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.acme"))
    registry.declare(SCALE)
    assert registry.snapshot().undeclared() == {}


def test_a_misfit_is_refused_with_plugin_function_and_difference() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    with registry.batch(ACME), pytest.raises(SignatureMismatchError) as caught:
        registry.register_impl(make_impl("vendor.acme", misfit))
    assert str(caught.value) == (
        "implementation 'vendor.acme' of op 'scale' (entry point 'acme', vllm-plugin-acme 1.0): "
        f"{__name__}.misfit(x: 'Any', scale: 'Any') -> 'Any' does not fit the declared signature "
        "scale(x, factor=2): missing 'factor'; unexpected 'scale'. Rename, reorder or add the "
        "parameters as declared."
    )
    assert ids(registry) == []


def test_mutates_must_name_parameters_of_a_declared_op() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(make_impl("vendor.acme", mutates=("x", "out")))
    assert str(caught.value) == (
        f"implementation 'vendor.acme' of op 'scale' ({HERE}): mutates names ['out'], which are "
        "not parameters of scale(x, factor=2)"
    )


def test_an_undeclared_op_is_accepted_and_reported_with_the_closest_name() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.register_many(
        [
            make_impl("vendor.acme", misfit, op_name="scales"),
            make_impl("vendor.acme", misfit, op_name="rotary"),
            make_impl("vendor.acme"),
        ]
    )
    assert registry.snapshot().undeclared() == {"scales": "scale", "rotary": None}


def test_vendors_are_known_when_declared_or_registered() -> None:
    registry = OpRegistry()
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    registry.register_impl(make_impl("vendor.acme"))
    registry.register_impl(make_impl("reference.torch"))
    assert registry.known_vendors() == ("acme", "zeta")
    with pytest.raises(RegistrationError, match=r"^vendor 'zeta' is already known as .*, found "):
        registry.declare_vendor(VendorInfo("zeta", "cuda"))


def test_a_vendors_device_type_is_that_of_its_declaration_else_of_its_backend() -> None:
    class Chip(Backend):
        device_types = ("acmepu", "cpu")

        def scale(self, x, factor=2):
            return x

    registry = OpRegistry()
    registry.declare_vendor(VendorInfo("zeta", "zetapu", "Zeta"))
    registry.register_many(
        [
            make_impl("vendor.acme.plain"),
            make_impl("vendor.acme", Chip().scale),
            make_impl("vendor.zeta", Chip().scale),
            make_impl("vendor.unsaid"),
        ]
    )
    known = registry.snapshot().known_vendors()
    assert {name: info.device_type for name, info in known.items()} == {
        "zeta": "zetapu",
        "acme": "acmepu",
        "unsaid": "",
    }


@pytest.mark.parametrize("what", ["clear", "drop_discovered"])
def test_a_plugin_that_registers_cannot_take_away_what_others_registered(what: str) -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.other"))
    with (
        pytest.raises(RegistrationError) as caught,
        registry.batch(Origin("entry_point", "acme", "vllm-plugin-acme", "1.0")),
    ):
        getattr(registry, what)()
    assert str(caught.value) == (
        f"entry point 'acme', vllm-plugin-acme 1.0 called registry.{what}() while it registers; "
        "that would remove what others registered. Take back what is its own with "
        "registry.unregister(op_name, impl_id)."
    )
    assert [i.impl_id for i in registry.get_implementations("scale")] == ["vendor.other"]
    registry.clear()  # outside of a plugin it is the caller's business
    assert registry.get_implementations("scale") == ()


# ------------------------------------------------------------------------------ removing


def test_unregister_removes_one_implementation_and_says_whether_there_was_one() -> None:
    registry = OpRegistry()
    registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    assert registry.unregister("scale", "vendor.acme") is True
    assert registry.unregister("scale", "vendor.acme") is False
    assert registry.unregister("nothing", "vendor.acme") is False
    assert ids(registry) == ["reference.torch"]
    registry.register_impl(make_impl("vendor.acme"))
    assert ids(registry) == ["vendor.acme", "reference.torch"]


def test_an_op_without_implementations_and_declaration_is_gone() -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.acme"))
    registry.unregister("scale", "vendor.acme")
    assert registry.list_operators() == []


def test_clear_removes_implementations_and_keeps_declarations() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    registry.clear()
    assert ids(registry) == []
    assert registry.list_operators() == ["scale"]
    assert registry.known_vendors() == ("zeta",)
    with pytest.raises(SignatureMismatchError):
        registry.register_impl(make_impl("vendor.acme", misfit))


def test_drop_discovered_keeps_what_was_registered_by_hand() -> None:
    registry = OpRegistry()
    with registry.batch(ACME):
        registry.declare(SCALE)
        registry.register_impl(make_impl("vendor.acme"))
        registry.register_impl(make_impl("vendor.acme", op_name="shift"))
    registry.register_impl(make_impl("reference.torch"))
    registry.drop_discovered()
    assert ids(registry) == ["reference.torch"]
    assert registry.list_operators() == ["scale"]
    assert registry.get_signature("scale") is SCALE


# ------------------------------------------------------------------------------ snapshots


def test_a_snapshot_cannot_be_changed() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.register_impl(make_impl("vendor.acme"))
    snapshot = registry.snapshot()
    with pytest.raises(TypeError):
        snapshot.impls_by_op["shift"] = ()
    with pytest.raises(TypeError):
        snapshot.declarations["shift"] = SCALE
    with pytest.raises(AttributeError):
        snapshot.generation = 7
    assert isinstance(snapshot.impls_by_op["scale"], tuple)


def test_a_snapshot_does_not_see_later_changes() -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.acme"))
    snapshot = registry.snapshot()
    registry.declare(SCALE)
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    registry.register_impl(make_impl("reference.torch"))
    registry.unregister("scale", "vendor.acme")
    assert [i.impl_id for i in snapshot.impls_by_op["scale"]] == ["vendor.acme"]
    assert dict(snapshot.declarations) == {}
    assert dict(snapshot.vendors) == {}
    assert snapshot.generation == 1
    assert registry.snapshot().generation == 5


def test_every_change_grows_the_generation_by_one() -> None:
    registry = OpRegistry()
    seen = [registry.generation]
    for change in (
        lambda: registry.declare(SCALE),
        lambda: registry.register_many([make_impl("vendor.acme"), make_impl("vendor.other")]),
        lambda: registry.unregister("scale", "vendor.acme"),
        lambda: registry.clear(),
        lambda: registry.unregister("scale", "vendor.acme"),  # changes nothing
        lambda: registry.register_many([]),  # changes nothing
    ):
        change()
        seen.append(registry.generation)
    assert seen == [0, 1, 2, 3, 4, 4, 4]


def test_a_snapshot_as_data_is_json_ready_and_tells_origins() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    with registry.batch(ACME):
        registry.register_impl(make_impl("vendor.acme", mutates=("x",), batch_invariant=True))
    registry.register_impl(make_impl("reference.torch", op_name="shift"))
    assert json.loads(json.dumps(registry.snapshot().to_dict())) == {
        "generation": 4,
        "ops": {
            "scale": {
                "signature": "scale(x, factor=2)",
                "implementations": [
                    {
                        "impl_id": "vendor.acme",
                        "kind": "vendor",
                        "vendor": "acme",
                        "priority": 100,
                        "mutates": ["x"],
                        "batch_invariant": True,
                        "api_version": 1,
                        "origin": "entry point 'acme', vllm-plugin-acme 1.0",
                        "module": scale.__module__,
                    }
                ],
            },
            "shift": {
                "signature": None,
                "implementations": [
                    {
                        "impl_id": "reference.torch",
                        "kind": "reference",
                        "vendor": None,
                        "priority": 50,
                        "mutates": [],
                        "batch_invariant": False,
                        "api_version": 1,
                        "origin": HERE,
                        "module": scale.__module__,
                    }
                ],
            },
        },
        "vendors": ["zeta"],
    }


# -------------------------------------------------------------------------------- batches


def test_a_batch_that_fails_takes_back_everything_it_did() -> None:
    registry = OpRegistry()
    registry.register_many([make_impl("vendor.old"), make_impl("vendor.older")])
    with pytest.raises(ZeroDivisionError), registry.batch(ACME):
        registry.declare(SCALE)
        registry.declare_vendor(VendorInfo("zeta", "zeta"))
        registry.register_impl(make_impl("vendor.acme"))
        registry.unregister("scale", "vendor.old")
        registry.register_impl(make_impl("vendor.old", lambda x, factor=2: "new"))
        raise ZeroDivisionError
    assert ids(registry) == ["vendor.old", "vendor.older"]
    old = registry.get_implementation("scale", "vendor.old")
    assert old is not None
    assert old.fn is scale
    assert old.origin is not None
    assert old.origin.source == "manual"
    assert registry.get_signature("scale") is None
    assert registry.known_vendors() == ("old", "older")


def test_a_batch_that_fails_takes_back_every_removal() -> None:
    registry = OpRegistry()
    registry.register_many([make_impl("vendor.old"), make_impl("vendor.old", op_name="shift")])
    with pytest.raises(ZeroDivisionError), registry.batch(ACME):
        registry.unregister("scale", "vendor.old")
        registry.unregister("shift", "vendor.old")
        registry.register_impl(make_impl("vendor.acme"))
        raise ZeroDivisionError
    assert ids(registry) == ids(registry, "shift") == ["vendor.old"]


def test_a_batch_that_fails_leaves_what_was_there_before_it() -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.declare_vendor(VendorInfo("zeta", "zeta"))
    with pytest.raises(ZeroDivisionError), registry.batch(ACME):
        registry.declare(SCALE)
        registry.declare_vendor(VendorInfo("zeta", "zeta"))
        raise ZeroDivisionError
    assert registry.get_signature("scale") is SCALE
    assert registry.known_vendors() == ("zeta",)


def test_a_batch_within_a_batch_is_taken_back_with_the_outer_one() -> None:
    registry = OpRegistry()
    inner = Origin("module", "inner")
    with pytest.raises(ZeroDivisionError), registry.batch(ACME):
        with registry.batch(inner):
            registry.register_impl(make_impl("vendor.inner"))
        registry.register_impl(make_impl("vendor.outer"))
        origins = {i.impl_id: str(i.origin) for i in registry.get_implementations("scale")}
        raise ZeroDivisionError
    assert origins == {"vendor.inner": "plugin module 'inner'", "vendor.outer": str(ACME)}
    assert ids(registry) == []


def test_a_batch_within_a_batch_is_taken_back_alone() -> None:
    registry = OpRegistry()
    with registry.batch(ACME):
        registry.register_impl(make_impl("vendor.outer"))
        with pytest.raises(ZeroDivisionError), registry.batch(Origin("module", "inner")):
            registry.register_impl(make_impl("vendor.inner"))
            raise ZeroDivisionError
    assert ids(registry) == ["vendor.outer"]


# ------------------------------------------------------------------------------ listeners


class _Listener:
    def __init__(self) -> None:
        self.calls = 0

    def note(self) -> None:
        self.calls += 1

    def forbid(self, op_name: str, impl_id: str) -> None:
        raise PermissionError(f"{op_name}/{impl_id}")


def test_a_listener_hears_of_every_change_and_is_held_weakly() -> None:
    registry, listener = OpRegistry(), _Listener()
    registry.on_change(listener.note)
    registry.declare(SCALE)
    registry.register_impl(make_impl("vendor.acme"))
    registry.clear()
    assert listener.calls == 3
    del listener
    gc.collect()
    registry.register_impl(make_impl("vendor.acme"))


def test_a_guard_of_removals_can_forbid_them_and_nothing_is_removed() -> None:
    registry, guard = OpRegistry(), _Listener()
    registry.before_removal(guard.forbid)
    registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    with pytest.raises(PermissionError, match=r"^scale/vendor.acme$"):
        registry.unregister("scale", "vendor.acme")
    with pytest.raises(PermissionError):
        registry.clear()
    assert ids(registry) == ["vendor.acme", "reference.torch"]


@pytest.mark.parametrize(
    ("written_for", "to_update"),
    [(API_VERSION + 1, "vllm_fl"), (API_VERSION - 1, "vllm-plugin-acme")],
)
def test_an_implementation_for_another_api_version_is_refused_with_what_to_update(
    written_for: int, to_update: str
) -> None:
    registry = OpRegistry()
    impl = make_impl("vendor.acme", api_version=written_for)
    origin = Origin("entry_point", "acme", "vllm-plugin-acme", "1.2.0")
    with pytest.raises(RegistrationError) as caught, registry.batch(origin):
        registry.register_impl(impl)
    assert str(caught.value) == (
        "implementation 'vendor.acme' of op 'scale' (entry point 'acme', vllm-plugin-acme 1.2.0) "
        f"was written for version {written_for} of vllm_fl's API; this is version {API_VERSION}. "
        f"Install a newer {to_update}."
    )
    assert registry.list_operators() == []
