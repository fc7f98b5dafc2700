# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch import (
    OpManager,
    OpRegistry,
    PluginError,
    PluginRecord,
    RegistrationError,
    discovery,
    get_default_manager,
    get_discovered_plugins,
    load_config,
)
from vllm_fl.dispatch.discovery import discover
from vllm_fl.dispatch.types import Origin

from .helpers import CPU, SCALE, make_impl

WriteModule = Callable[[str, str], None]

PLUGIN = """
from vllm_fl.dispatch import OpImpl, BackendImplKind

def scale(x, factor=2):
    return x * factor

def {registrar}(registry):
    registry.register_impl(
        OpImpl("scale", "vendor.{vendor}", BackendImplKind.VENDOR, scale, "{vendor}", 100)
    )
"""


def plugin(vendor: str = "acme", registrar: str = "register_builtins") -> str:
    """The text of a module that registers one implementation."""
    return PLUGIN.format(vendor=vendor, registrar=registrar)


@pytest.fixture
def registry() -> OpRegistry:
    """Knows `scale`, and one implementation that was registered by hand."""
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.register_impl(make_impl("reference.torch"))
    return registry


def ids(registry: OpRegistry, op_name: str = "scale") -> list[str]:
    return [impl.impl_id for impl in registry.get_implementations(op_name)]


def only(records: tuple[PluginRecord, ...]) -> PluginRecord:
    (record,) = records
    return record


# ------------------------------------------------------------------- what can be a plugin


@pytest.mark.parametrize("name", ["register_builtins", "vllm_fl_register", "register"])
def test_a_named_module_is_loaded_by_any_of_three_function_names(
    registry: OpRegistry, write_module: WriteModule, name: str
) -> None:
    write_module("acme_kernels", plugin(registrar=name))
    record = only(discover(registry, ["acme_kernels"]))
    assert ids(registry) == ["vendor.acme", "reference.torch"]
    assert (record.name, record.source, record.value) == (
        "acme_kernels", "module", "acme_kernels",
    )  # fmt: skip
    assert (record.ok, record.implementations, record.undeclared) == (True, 1, ())
    assert 0 < record.seconds < 10


def test_the_first_of_the_three_names_is_taken(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    both = plugin("acme") + plugin("other", registrar="register")
    write_module("acme_kernels", both)
    discover(registry, ["acme_kernels"])
    assert ids(registry) == ["vendor.acme", "reference.torch"]


@pytest.mark.parametrize(
    "value",
    ["acme_kernels:register_builtins", "acme_kernels", "acme_kernels:Plugin", "acme_kernels:plugin",
     "acme_kernels:call"],
)  # fmt: skip
def test_an_entry_point_may_be_a_function_a_module_or_an_object(
    registry: OpRegistry, write_module: WriteModule, write_entry_point: Any, value: str
) -> None:
    objects = """
class Plugin:
    @staticmethod
    def vllm_fl_register(registry):
        register_builtins(registry)

class Callable:
    def __call__(self, registry):
        register_builtins(registry)

plugin, call = Plugin(), Callable()
"""
    write_module("acme_kernels", plugin() + objects)
    write_entry_point("acme", value)
    record = only(discover(registry))
    assert ids(registry) == ["vendor.acme", "reference.torch"]
    assert record == PluginRecord(
        name="acme",
        source="entry_point",
        value=value,
        package="vllm-plugin-acme",
        version="1.2.3",
        seconds=record.seconds,
        implementations=1,
    )
    origin = registry.get_implementations("scale")[0].origin
    assert origin == Origin("entry_point", "acme", "vllm-plugin-acme", "1.2.3", "acme_kernels")


def test_objects_of_one_class_are_different_plugins(
    registry: OpRegistry, write_module: WriteModule, write_entry_point: Any
) -> None:
    # Each `object.register` is a new bound method, and may have the address of the last one.
    objects = """
from vllm_fl.dispatch import OpImpl, BackendImplKind

class Vendor:
    def __init__(self, name):
        self.name = name

    def scale(self, x, factor=2):
        return x

    def register(self, registry):
        registry.register_impl(
            OpImpl("scale", f"vendor.{self.name}", BackendImplKind.VENDOR, self.scale, self.name)
        )

a, b, c = Vendor("a"), Vendor("b"), Vendor("c")
"""
    write_module("acme_vendors", objects)
    for name in "abc":
        write_entry_point(name, f"acme_vendors:{name}")
    records = discover(registry)
    assert [record.implementations for record in records] == [1, 1, 1]
    assert ids(registry) == ["reference.torch", "vendor.a", "vendor.b", "vendor.c"]


def test_the_same_function_through_entry_point_and_module_runs_once(
    registry: OpRegistry, write_module: WriteModule, write_entry_point: Any
) -> None:
    write_module("acme_kernels", plugin())
    write_entry_point("acme", "acme_kernels:register_builtins")
    records = discover(registry, ["acme_kernels", "acme_kernels"])
    assert [(r.source, r.ok, r.implementations) for r in records] == [
        ("entry_point", True, 1),
        ("module", True, 0),
        ("module", True, 0),
    ]
    assert ids(registry) == ["vendor.acme", "reference.torch"]


def test_built_ins_come_first_then_entry_points_then_modules(
    registry: OpRegistry,
    write_module: WriteModule,
    write_entry_point: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("one", "two", "three"):
        write_module(f"acme_{name}", plugin(name))
    monkeypatch.setattr(discovery, "BUILTIN_MODULES", ("acme_one",))
    write_entry_point("second", "acme_two")
    records = discover(registry, ["acme_three"])
    assert [(r.source, r.name) for r in records] == [
        ("builtin", "acme_one"),
        ("entry_point", "second"),
        ("module", "acme_three"),
    ]
    assert records[0].package == "vllm-fl"


def test_the_built_in_modules_declare_the_ops_and_register_reference_and_cpu() -> None:
    pytest.importorskip("torch")
    from vllm_fl.dispatch.builtin_ops import BUILTIN_MODULES
    from vllm_fl.ops import SIGNATURES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "BUILTIN_MODULES", BUILTIN_MODULES)
        registry = OpRegistry()
        records = discover(registry)
    assert [record.name for record in records] == list(BUILTIN_MODULES)
    assert [record.error for record in records] == [None] * len(records)
    snapshot = registry.snapshot()
    assert list(snapshot.declarations.values()) == list(SIGNATURES)
    assert snapshot.undeclared() == {}
    assert {"reference.torch", "vendor.cpu"} <= set(ids(registry, "silu_and_mul"))
    assert "ascend" in registry.known_vendors()


def test_a_damaged_installation_is_loaded_without_a_name(
    registry: OpRegistry, write_module: WriteModule, plugin_path: Path
) -> None:
    folder = plugin_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[vllm_fl.plugin]\nbroken = acme_kernels\n")
    write_module("acme_kernels", plugin())
    record = only(discover(registry))
    assert (record.ok, record.implementations) == (True, 1)
    assert (record.package, record.version) == ("", "")


# ----------------------------------------------------------------------- what goes wrong

HALF_WAY = """
from vllm_fl.dispatch import OpSignature
from vllm_fl.dispatch.types import VendorInfo

def register_by_name(registry):
    register_builtins(registry)
    registry.declare(OpSignature.parse("shift(x)"))
    registry.declare_vendor(VendorInfo("acme2", "acme"))
    registry.unregister("scale", "reference.torch")
    raise OSError("no driver")
"""


def test_a_module_that_does_not_exist_is_recorded(registry: OpRegistry) -> None:
    record = only(discover(registry, ["acme_absent"]))
    assert record.error == "ModuleNotFoundError: No module named 'acme_absent'"
    assert (record.ok, record.implementations) == (False, 0)
    assert record.traceback is not None
    assert record.traceback.endswith(f"{record.error}\n")


def test_a_module_that_fails_to_import_is_recorded_with_its_traceback(
    registry: OpRegistry, write_module: WriteModule, log: list[str]
) -> None:
    write_module("acme_kernels", "import json\n1 / 0\n")
    record = only(discover(registry, ["acme_kernels"]))
    assert record.error == "ZeroDivisionError: division by zero"
    assert record.traceback is not None
    assert 'acme_kernels.py", line 2, in <module>' in record.traceback
    assert log == [
        "ERROR plugin module 'acme_kernels' failed and registered nothing: ZeroDivisionError: "
        "division by zero"
    ]


def test_a_plugin_that_fails_half_way_leaves_nothing_behind(
    registry: OpRegistry, write_module: WriteModule, write_entry_point: Any
) -> None:
    write_module("acme_kernels", plugin() + HALF_WAY)
    write_entry_point("acme", "acme_kernels:register_by_name")
    record = only(discover(registry))
    assert (record.package, record.version) == ("vllm-plugin-acme", "1.2.3")
    assert record.error == "OSError: no driver"
    assert record.implementations == 0
    assert ids(registry) == ["reference.torch"]
    assert registry.list_operators() == ["scale"]
    assert registry.known_vendors() == ()


def test_a_failing_plugin_does_not_stop_the_next(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    write_module("acme_broken", "raise OSError('x')")
    write_module("acme_kernels", plugin())
    records = discover(registry, ["acme_broken", "acme_kernels"])
    assert [record.ok for record in records] == [False, True]
    assert ids(registry) == ["vendor.acme", "reference.torch"]


def test_a_duplicate_is_recorded_and_names_both_plugins(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    write_module("acme_one", plugin())
    write_module("acme_two", plugin())
    first, second = discover(registry, ["acme_one", "acme_two"])
    assert first.ok
    assert second.error == (
        "DuplicateImplementationError: op 'scale' already has an implementation 'vendor.acme', "
        "registered by plugin module 'acme_one' (module acme_one); plugin module 'acme_two' "
        "(module acme_two) registers it again. Choose another impl_id, for example "
        "'vendor.acme.2', or unregister the first."
    )


def test_a_misfit_is_recorded_and_names_plugin_function_and_difference(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    write_module("acme_kernels", plugin().replace("factor=2", "scale=2"))
    record = only(discover(registry, ["acme_kernels"]))
    assert record.error == (
        "SignatureMismatchError: implementation 'vendor.acme' of op 'scale' (plugin module "
        "'acme_kernels'): acme_kernels.scale(x, scale=2) does not fit the declared signature "
        "scale(x, factor=2): missing 'factor'; unexpected 'scale'. Rename, reorder or add the "
        "parameters as declared."
    )


def test_a_module_without_a_registrar_is_told_what_was_expected(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    write_module("acme_kernels", "x = 1")
    assert only(discover(registry, ["acme_kernels"])).error == (
        "RegistrationError: acme_kernels is neither callable nor has one of register_builtins, "
        "vllm_fl_register, register; expected a function f(registry), or a module or object "
        "with one of these"
    )


def test_an_undeclared_op_is_accepted_recorded_and_logged(
    registry: OpRegistry, write_module: WriteModule, log: list[str]
) -> None:
    write_module("acme_kernels", plugin().replace('"scale"', '"scales"'))
    record = only(discover(registry, ["acme_kernels"]))
    assert (record.ok, record.implementations, record.undeclared) == (True, 1, ("scales",))
    assert log == [
        "WARNING plugin module 'acme_kernels': op 'scales' is not declared, so its "
        "implementations are unchecked; declare it with "
        'registry.declare(OpSignature.parse(...)). Did you mean "scale"?'
    ]


def test_a_record_is_json_ready(registry: OpRegistry, write_module: WriteModule) -> None:
    write_module("acme_kernels", plugin())
    record = only(discover(registry, ["acme_kernels"]))
    assert json.loads(json.dumps(record.to_dict())) == {
        "name": "acme_kernels",
        "source": "module",
        "value": "acme_kernels",
        "package": "",
        "version": "",
        "seconds": record.seconds,
        "implementations": 1,
        "undeclared": [],
        "error": None,
        "traceback": None,
    }


# ---------------------------------------------------------------------------------- strict


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise OSError('x')", "OSError: x"),
        (plugin() + "\n1 / 0", "ZeroDivisionError: division by zero"),
        (
            plugin().replace('"scale"', '"scales"'),
            "RegistrationError: op 'scales' is not declared, so its implementations are "
            "unchecked; declare it with registry.declare(OpSignature.parse(...)). "
            'Did you mean "scale"?',
        ),
    ],
)
def test_strict_raises_what_would_have_been_recorded(
    registry: OpRegistry, write_module: WriteModule, text: str, problem: str
) -> None:
    write_module("acme_kernels", text)
    with pytest.raises(PluginError) as caught:
        discover(registry, ["acme_kernels"], strict=True)
    assert str(caught.value) == (
        f"plugin module 'acme_kernels' failed and strict mode is on: {problem}"
    )
    assert type(caught.value.__cause__).__name__ == problem.partition(":")[0]
    assert ids(registry) == ["reference.torch"]
    assert ids(registry, "scales") == []


def test_strict_accepts_an_op_that_its_plugin_declares(
    registry: OpRegistry, write_module: WriteModule
) -> None:
    text = plugin().replace('"scale"', '"scales"')
    text += "\n    from vllm_fl.dispatch import OpSignature"
    text += "\n    registry.declare(OpSignature.parse('scales(x, factor=2)'))\n"
    write_module("acme_kernels", text)
    assert only(discover(registry, ["acme_kernels"], strict=True)).undeclared == ()


# --------------------------------------------------------------------- through the manager


def test_a_manager_loads_the_modules_of_its_configuration(write_module: WriteModule) -> None:
    write_module("acme_kernels", plugin())
    config = load_config({"VLLM_FL_PLUGIN_MODULES": "acme_kernels"})
    manager = OpManager(config=config, device=CPU)
    record = only(manager.get_discovered_plugins())
    assert (record.name, record.implementations) == ("acme_kernels", 1)
    assert manager.call("scale", 4, factor=3) == 12


def test_the_default_manager_loads_entry_points_and_tells_of_them(
    write_module: WriteModule, write_entry_point: Any
) -> None:
    write_module("acme_kernels", plugin())
    write_entry_point("acme", "acme_kernels")
    assert only(get_discovered_plugins()).package == "vllm-plugin-acme"
    assert get_default_manager().get_selected_impl_id("scale") == "vendor.acme"


def test_a_plugin_may_register_through_the_default_manager_and_is_rolled_back(
    write_module: WriteModule, write_entry_point: Any
) -> None:
    text = """
from vllm_fl.dispatch import get_default_manager

def register_sideways(registry):
    own = get_default_manager().registry
    assert own is registry
    register_builtins(own)
    get_default_manager().resolve("scale")
    raise OSError("too late")
"""
    write_module("acme_kernels", plugin() + text)
    write_entry_point("acme", "acme_kernels:register_sideways")
    manager = get_default_manager()
    manager.registry.declare(SCALE)
    manager.registry.register_impl(make_impl("reference.torch"))
    assert only(get_discovered_plugins()).error == "OSError: too late"
    assert ids(manager.registry) == ["reference.torch"]
    assert manager.get_selected_impl_id("scale") == "reference.torch"
    assert manager.call("scale", 4) == 8


def test_a_strict_manager_raises_and_keeps_nothing_of_any_plugin(
    write_module: WriteModule,
) -> None:
    write_module("acme_kernels", plugin())
    write_module("acme_broken", "raise OSError('x')")
    config = load_config(
        {"VLLM_FL_STRICT": "1", "VLLM_FL_PLUGIN_MODULES": "acme_kernels,acme_broken"}
    )
    manager = OpManager(config=config, device=CPU)
    for _ in range(2):  # it stays wrong until somebody repairs it
        manager.registry.declare(SCALE)
        with pytest.raises(PluginError, match="'acme_broken' failed and strict mode is on"):
            manager.ensure_initialized()
        assert ids(manager.registry) == []
    write_module("acme_broken", plugin("other"))
    assert manager.call("scale", 4) == 8


def test_a_wrong_name_in_the_policy_mentions_the_plugin_that_failed(
    write_module: WriteModule,
) -> None:
    write_module("acme_broken", "raise OSError('x')")
    config = load_config({"VLLM_FL_ALLOW_VENDORS": "acme", "VLLM_FL_PLUGIN_MODULES": "acme_broken"})
    manager = OpManager(config=config, device=CPU)
    with pytest.raises(ValueError) as caught:
        manager.ensure_initialized()
    assert str(caught.value) == (
        'environment variable VLLM_FL_ALLOW_VENDORS: unknown vendor "acme"; valid: none. Note: '
        "acme_broken failed (OSError: x)."
    )


def test_registration_errors_are_value_errors() -> None:
    assert issubclass(RegistrationError, ValueError)
    assert issubclass(PluginError, RuntimeError)
