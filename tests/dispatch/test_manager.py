# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fl import __version__
from vllm_fl.backends import Backend
from vllm_fl.dispatch import (
    Config,
    ConfigError,
    Decision,
    NoImplementationError,
    OpImpl,
    OpManager,
    OpRegistry,
    OpSignature,
    PluginError,
    SelectionPolicy,
    UnknownOpError,
    call_op,
    explain_op,
    get_default_manager,
    load_config,
    reset_default_manager,
    resolve_op,
    with_strict_mode,
)
from vllm_fl.dispatch.types import DeviceFacts

from .helpers import CPU, SCALE, codes, make_impl, make_manager, reasons, returning, scale

ACME = DeviceFacts("acme", "acme")


def winner(manager: OpManager, op_name: str = "scale") -> str | None:
    return manager.get_selected_impl_id(op_name)


# --------------------------------------------------------------------------- what it does


def test_the_chosen_implementation_is_called_with_what_was_given() -> None:
    manager = make_manager(make_impl("reference.torch"))
    assert manager.call("scale", 4) == 8
    assert manager.call("scale", 4, factor=3) == 12
    assert manager.call("scale", factor=5, x=4) == 20
    assert manager.resolve("scale")(4, 3) == 12


def test_candidates_are_listed_in_order_and_without_those_that_cannot_run() -> None:
    manager = make_manager(
        make_impl("reference.torch"),
        make_impl("vendor.gone", available=lambda: False),
        make_impl("vendor.acme"),
        make_impl("default.flaggems"),
    )
    candidates = manager.resolve_candidates("scale")
    assert [impl.impl_id for impl in candidates] == [
        "default.flaggems", "vendor.acme", "reference.torch",
    ]  # fmt: skip
    assert winner(manager) == "default.flaggems"


def test_a_late_registration_is_seen_by_the_next_call() -> None:
    manager = make_manager(make_impl("reference.torch", returning("reference")))
    assert manager.call("scale", 1) == "reference"
    manager.registry.register_impl(make_impl("vendor.acme", returning("acme")))
    assert manager.call("scale", 1) == manager.resolve("scale")(1) == "acme"
    manager.registry.unregister("scale", "vendor.acme")
    assert manager.call("scale", 1) == "reference"
    manager.registry.clear()
    with pytest.raises(NoImplementationError):
        manager.call("scale", 1)


def test_a_late_registration_is_seen_inside_a_context_too() -> None:
    manager = make_manager(make_impl("reference.torch", returning("reference")))
    with with_strict_mode():
        assert manager.call("scale", 1) == "reference"
        manager.registry.register_impl(make_impl("vendor.acme", returning("acme")))
        assert manager.call("scale", 1) == "acme"


def test_a_manager_alone_starts_with_a_fresh_registry() -> None:
    manager = OpManager(config=Config(), device=CPU)
    assert manager.registry.list_operators() == []
    manager.registry.register_impl(make_impl("vendor.acme"))
    assert manager.call("scale", 2) == 4


# -------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    "use",
    [
        lambda manager: manager.call("scael", 1),
        lambda manager: manager.bind("scael"),
        lambda manager: manager.bind("scael", size=3),
        lambda manager: manager.resolve("scael"),
        lambda manager: manager.explain("scael"),
        lambda manager: manager.resolve_candidates("scael"),
        lambda manager: manager.get_selected_impl_id("scael"),
    ],
)
def test_an_unknown_op_names_the_known_ones_and_the_closest(use: Callable[[Any], Any]) -> None:
    manager = make_manager(make_impl("vendor.acme"), make_impl("vendor.acme", op_name="shift"))
    with pytest.raises(UnknownOpError) as caught:
        use(manager)
    assert str(caught.value) == ("unknown op 'scael'; known: scale, shift. Did you mean \"scale\"?")
    assert isinstance(caught.value, LookupError)


def test_an_unknown_op_mentions_a_plugin_that_failed() -> None:
    config = load_config({"VLLM_FL_PLUGIN_MODULES": "acme_absent"})
    with pytest.raises(UnknownOpError) as caught:
        make_manager(signatures=(), config=config).call("scale", 1)
    assert str(caught.value) == (
        "unknown op 'scale'; known: none. Note: acme_absent failed (ModuleNotFoundError: No "
        "module named 'acme_absent')."
    )


class _Acme(Backend):
    impl_id = "vendor.acme"
    vendor = "acme"
    device_types = ("acme",)

    def scale(self, x: Any, factor: Any = 2) -> Any:
        return x


class _Npu(_Acme):
    device_types = None
    requires = ("torch_npu_that_is_not_installed",)


def test_where_nothing_is_available_every_candidate_is_listed_with_its_reason() -> None:
    manager = make_manager(
        make_impl("vendor.acme", _Acme().scale),
        make_impl("vendor.ascend", _Npu().scale),
        make_impl("vendor.denied"),
        make_impl("vendor.down", available=lambda: "driver 5.1 is below 6.0"),
        make_impl("reference.torch", available=lambda: 1 / 0),
        deny_vendors={"denied"},
    )
    text = (
        "op 'scale': no implementation can be used on cpu\n"
        "  vendor.acme: runs on acme, this device is cpu\n"
        "  vendor.ascend: requires torch_npu_that_is_not_installed, not installed\n"
        "  vendor.denied: deny_vendors holds 'denied'\n"
        "  vendor.down: driver 5.1 is below 6.0\n"
        "  reference.torch: its availability probe raised ZeroDivisionError: division by zero"
    )
    for use in (manager.bind, manager.resolve, manager.call):
        with pytest.raises(NoImplementationError) as caught:
            use("scale")
        assert str(caught.value) == text
    assert winner(manager) is None
    assert manager.resolve_candidates("scale") == ()


def test_a_declared_op_that_nobody_implements_says_what_to_do() -> None:
    with pytest.raises(NoImplementationError) as caught:
        make_manager().call("scale", 1)
    assert str(caught.value) == (
        "op 'scale': no implementation can be used on cpu\n"
        "  none is registered; register one, or install the vendor's package"
    )


def test_an_implementation_registered_after_an_error_is_used() -> None:
    manager = make_manager()
    with pytest.raises(NoImplementationError):
        manager.call("scale", 1)
    manager.registry.register_impl(make_impl("vendor.acme"))
    assert manager.call("scale", 1) == 2


# ----------------------------------------------------------------------------- availability


def test_a_probe_is_asked_once_in_a_process() -> None:
    asked: list[int] = []

    def probe() -> bool:
        asked.append(1)
        return True

    manager = make_manager(make_impl("vendor.acme", available=probe))
    for _ in range(3):
        manager.explain("scale")
        manager.bind("scale")
        manager.registry.register_impl(make_impl(f"vendor.x{manager.registry.generation}"))
    assert asked == [1]


def test_a_device_that_is_stated_anew_is_decided_for_anew() -> None:
    manager = make_manager(
        make_impl("vendor.acme", _Acme().scale), make_impl("reference.torch", returning("torch"))
    )
    assert manager.call("scale", 1) == "torch"
    manager.set_device(ACME)
    assert manager.device == ACME
    assert manager.call("scale", 1) == 1
    manager.set_device(CPU)
    assert manager.call("scale", 1) == "torch"


def test_availability_of_one_device_is_never_taken_for_another() -> None:
    # A probe that is under way while the device is stated anew belongs to the old device.
    asking, go_on = threading.Event(), threading.Event()

    class Slow(Backend):
        impl_id, vendor = "vendor.acme", "acme"
        types: tuple[str, ...] = ("cpu",)

        @property
        def device_types(self) -> tuple[str, ...]:
            return ("cpu",)

        def is_available(self) -> bool:
            asking.set()
            return go_on.wait(10)

        def scale(self, x: Any, factor: Any = 2) -> Any:
            return "acme"

    manager = make_manager(
        make_impl("vendor.acme", Slow().scale), make_impl("reference.torch", returning("torch")),
        config=load_config({"VLLM_FL_LOG_LEVEL": "ERROR"}),
    )  # fmt: skip
    thread = threading.Thread(target=lambda: manager.explain("scale"))
    thread.start()
    assert asking.wait(10)
    manager.set_device(ACME)
    go_on.set()
    thread.join()
    assert reasons(manager.explain("scale"))["vendor.acme"] == "runs on cpu, this device is acme"


def test_a_device_that_nobody_stated_is_detected() -> None:
    manager = OpManager(config=load_config({"VLLM_FL_PLATFORM": "ascend"}))
    assert manager.device == DeviceFacts("ascend", "npu")


def test_an_unknown_platform_is_found_when_the_manager_starts() -> None:
    manager = OpManager(config=load_config({"VLLM_FL_PLATFORM": "ascent"}))
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            manager.ensure_initialized()
        assert str(caught.value).startswith(
            'environment variable VLLM_FL_PLATFORM: unknown vendor "ascent"; valid: '
        )
        assert str(caught.value).endswith('Did you mean "ascend"?')


# ---------------------------------------------------------------------------------- explain

SIZED = OpSignature.parse(
    "scale(x, factor=2)", facts=lambda x, factor=2: {"size": x}, fact_names=("size",)
)


def explained() -> OpManager:
    return make_manager(
        make_impl("vendor.layer", supports_layer=lambda f: f["size"] < 10 or "size is 10 or more"),
        make_impl("vendor.other", supports=lambda x, factor=2: factor == 2 or f"factor {factor}"),
        make_impl("reference.torch"),
        signatures=[SIZED],
    )


def test_explain_without_arguments_answers_in_general() -> None:
    decision = explained().explain("scale")
    assert decision.winner_id == "vendor.layer"
    assert codes(decision) == {"vendor.other": "after_winner", "reference.torch": "after_winner"}


def test_explain_with_arguments_asks_both_guards_and_runs_nothing() -> None:
    ran: list[int] = []
    manager = explained()
    manager.registry.register_impl(
        make_impl(
            "default.flaggems", lambda x, factor=2: ran.append(1), supports_layer=lambda f: False
        )
    )
    decision = manager.explain("scale", 12, factor=3)
    assert decision.winner_id == "reference.torch"
    assert reasons(decision) == {
        "default.flaggems": "its layer guard says no",
        "vendor.layer": "size is 10 or more",
        "vendor.other": "factor 3",
    }
    assert manager.explain("scale", 9, factor=3).winner_id == "vendor.layer"
    assert manager.explain("scale", 12).winner_id == "vendor.other"
    assert ran == []


def test_explain_and_call_agree() -> None:
    manager = explained()
    for args in ((9,), (12,), (12, 3), (9, 3)):
        told: list[str] = []
        binding = manager.bind_op("scale")
        assert binding.traced is not None
        binding.traced(lambda impl, told=told: told.append(impl.impl_id))(*args)
        assert [manager.explain("scale", *args).winner_id] == told


def test_a_what_if_for_another_device_changes_nothing_here() -> None:
    manager = make_manager(make_impl("vendor.acme", _Acme().scale), make_impl("reference.torch"))
    there = manager.decide("scale", device=DeviceFacts("acme", "acme", assumed=True))
    assert there.winner_id == "vendor.acme"
    assert there.device.assumed
    elsewhere = manager.decide("scale", device=DeviceFacts("zeta", "zeta", assumed=True))
    assert reasons(elsewhere) == {"vendor.acme": "runs on acme, this device is zeta"}
    assert winner(manager) == "reference.torch"


def test_a_decision_of_the_default_manager_is_the_same_through_every_door() -> None:
    get_default_manager().registry.register_impl(make_impl("vendor.acme"))
    decision = explain_op("scale", 1)
    assert isinstance(decision, Decision)
    assert decision.winner_id == "vendor.acme"
    assert resolve_op("scale") is scale
    assert call_op("scale", 3) == 6


# ------------------------------------------------------------------------- initialisation

SELF_USE = """
from vllm_fl.dispatch import OpImpl, BackendImplKind, get_default_manager

def scale(x, factor=2):
    return x * factor

def register_builtins(registry):
    manager = get_default_manager()
    manager.ensure_initialized()
    registry.register_impl(OpImpl("scale", "vendor.acme", BackendImplKind.VENDOR, scale, "acme"))
    assert manager.get_selected_impl_id("scale") == "vendor.acme"
    assert manager.call("scale", 4) == 8
    registry.register_impl(
        OpImpl("scale", "default.flaggems", BackendImplKind.DEFAULT, scale, priority=150)
    )
"""


def test_a_plugin_may_use_the_manager_that_is_running_it(
    write_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module("acme_kernels", SELF_USE)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_kernels")
    (record,) = get_default_manager().get_discovered_plugins()
    assert record.error is None
    assert winner(get_default_manager()) == "default.flaggems"


def test_plugins_run_once_per_process(write_module: Any) -> None:
    write_module("acme_kernels", "runs = []\ndef register(registry):\n    runs.append(1)\n")
    manager = make_manager(config=load_config({"VLLM_FL_PLUGIN_MODULES": "acme_kernels"}))
    for _ in range(3):
        manager.ensure_initialized()
        manager.explain("scale")
    import acme_kernels

    assert acme_kernels.runs == [1]


def test_the_line_at_the_start_says_who_serves_and_what_failed(log: list[str]) -> None:
    config = load_config({"VLLM_FL_PLUGIN_MODULES": "acme_absent", "VLLM_FL_PREFER": "reference"})
    manager = make_manager(
        make_impl("vendor.acme"), make_impl("reference.torch"),
        make_impl("vendor.acme", op_name="shift"),
        signatures=[SCALE, OpSignature.parse("nobody(x)")],
        config=config,
    )  # fmt: skip
    with with_strict_mode():  # neither a context nor strict mode has a say in it
        manager.ensure_initialized()
    assert log[-1] == (
        f"INFO {__version__} on cpu: 3 ops, served by nothing 1, reference.torch 1, vendor.acme 1; "
        "FAILED plugins: acme_absent (ModuleNotFoundError: No module named 'acme_absent')"
    )


def test_the_line_at_the_start_never_stands_in_the_way(log: list[str]) -> None:
    manager = make_manager(make_impl("vendor.acme", supports_layer=lambda facts: facts["size"]))
    manager.ensure_initialized()
    assert log == [
        f"INFO {__version__} on cpu: 1 ops, served by a guard that raises 1; no plugin failed"
    ]


def test_the_log_level_is_respected_and_spares_the_probes(log: list[str]) -> None:
    asked: list[int] = []
    manager = make_manager(
        make_impl("vendor.acme", available=lambda: bool(asked.append(1))),
        config=load_config({"VLLM_FL_LOG_LEVEL": "WARNING"}),
    )
    manager.ensure_initialized()
    assert log == []
    assert asked == []


def test_logging_goes_to_stderr_and_stdout_stays_empty(capfd: pytest.CaptureFixture[str]) -> None:
    make_manager(make_impl("vendor.acme")).ensure_initialized()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        f"vllm_fl INFO: {__version__} on cpu: 1 ops, served by vendor.acme 1; no plugin failed\n"
    )


# ------------------------------------------------------------------------------- configure


def test_a_new_configuration_is_followed_at_once() -> None:
    manager = make_manager(
        make_impl("vendor.acme", returning("acme")),
        make_impl("reference.torch", returning("torch")),
    )
    assert manager.call("scale", 1) == "acme"
    manager.configure(load_config({"VLLM_FL_PREFER": "reference"}))
    assert manager.call("scale", 1) == "torch"


def test_a_new_configuration_may_name_what_only_discovery_makes_known(write_module: Any) -> None:
    write_module(
        "acme_vendor",
        "from vllm_fl.dispatch.types import VendorInfo\n"
        "def register(registry):\n    registry.declare_vendor(VendorInfo('zeta', 'zeta'))\n",
    )
    modules = {"VLLM_FL_PLUGIN_MODULES": "acme_vendor"}
    manager = make_manager(config=load_config(modules))
    manager.configure(load_config({**modules, "VLLM_FL_DENY_VENDORS": "zeta"}))
    assert manager.base_policy.deny_vendors == {"zeta"}


def test_strict_that_arrives_after_discovery_raises_what_discovery_recorded() -> None:
    modules = {"VLLM_FL_PLUGIN_MODULES": "acme_absent"}
    manager = make_manager(make_impl("vendor.acme"), config=load_config(modules))
    assert manager.call("scale", 1) == 2
    with pytest.raises(PluginError) as caught:
        manager.configure(load_config(modules, additional={"strict": True}))
    assert str(caught.value) == (
        "plugin module 'acme_absent' failed and strict mode is on: ModuleNotFoundError: No module "
        "named 'acme_absent'"
    )
    assert not manager.base_policy.strict


def test_a_new_configuration_with_an_unknown_name_is_refused_and_changes_nothing() -> None:
    manager = make_manager(make_impl("vendor.acme"))
    with pytest.raises(ConfigError, match='unknown vendor "acmee"'):
        manager.configure(load_config({"VLLM_FL_DENY_VENDORS": "acmee"}))
    assert manager.base_policy == SelectionPolicy()
    assert winner(manager) == "vendor.acme"


def test_the_configuration_is_read_from_the_environment_at_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = OpManager(device=CPU)
    manager.registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert winner(manager) == "reference.torch"
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    assert winner(manager) == "reference.torch"
    assert manager.explain("scale").policy == {
        "prefer": {"value": "reference", "source": "environment variable VLLM_FL_PREFER"}
    }


def test_a_wrong_environment_is_an_error_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "cuda")
    with pytest.raises(ConfigError) as caught:
        call_op("scale", 1)
    assert str(caught.value).startswith('environment variable VLLM_FL_PREFER="cuda": unknown kind')


def test_the_policy_shipped_for_the_device_is_used_and_gives_way_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shipped(device: DeviceFacts) -> Path | None:
        path = tmp_path / f"{device.vendor}.yaml"
        return path if path.is_file() else None

    (tmp_path / "acme.yaml").write_text("op_backends:\n  scale: [reference]\n")
    monkeypatch.setattr("vllm_fl.dispatch.packaged.shipped_policy", shipped)
    manager = OpManager(device=CPU)
    manager.registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    assert winner(manager) == "vendor.acme"
    manager.set_device(ACME)
    assert winner(manager) == "reference.torch"
    assert manager.explain("scale").reason == (
        "the order for scale names it (from shipped policy acme.yaml:2)"
    )
    monkeypatch.setenv("VLLM_FL_PER_OP", "scale=vendor")
    again = OpManager(manager.registry, device=ACME)
    assert winner(again) == "vendor.acme"
    assert winner(OpManager(manager.registry, config=Config(), device=ACME)) == "vendor.acme"
    assert again.read_config({"prefer": "flagos"}).policy.prefer == "flagos"


def test_a_frozen_manager_does_not_read_the_environment_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = OpManager(device=CPU)
    manager.registry.register_many([make_impl("vendor.acme"), make_impl("reference.torch")])
    manager.freeze()
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    manager.set_device(manager.device)
    assert winner(manager) == "vendor.acme"


# -------------------------------------------------------------------------- several of them


def test_two_managers_are_independent() -> None:
    one = make_manager(make_impl("vendor.acme", returning("one")))
    two = make_manager(make_impl("vendor.acme", returning("two")), device=ACME)
    one.freeze()
    assert (one.call("scale", 1), two.call("scale", 1)) == ("one", "two")
    two.registry.clear()
    two.configure(load_config({"VLLM_FL_PREFER": "reference"}))
    assert one.call("scale", 1) == "one"
    assert (one.frozen, two.frozen) == (True, False)
    assert (one.base_policy.prefer, one.device) == (None, CPU)


def test_the_default_manager_is_one_until_it_is_reset() -> None:
    manager = get_default_manager()
    assert get_default_manager() is manager
    manager.registry.register_impl(make_impl("vendor.acme"))
    assert call_op("scale", 1) == 2
    reset_default_manager()
    assert get_default_manager() is not manager
    with pytest.raises(UnknownOpError):
        call_op("scale", 1)
    assert manager.call("scale", 1) == 2


def test_resetting_reads_the_environment_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_default_manager().base_policy.prefer is None
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    reset_default_manager()
    assert get_default_manager().base_policy.prefer == "vendor"


def test_a_manager_that_nobody_holds_is_freed_though_its_registry_lives() -> None:
    registry = OpRegistry()
    manager = OpManager(registry, config=Config(), device=CPU)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    registry.register_impl(make_impl("vendor.acme"))


def test_an_implementation_registered_in_two_managers_is_available_in_each_by_itself() -> None:
    impl: OpImpl = make_impl("vendor.acme", available=lambda: True)
    for _ in range(2):
        assert make_manager(impl).call("scale", 2) == 4
    assert impl.origin is None


def test_two_managers_share_the_discovery_of_one_registry() -> None:
    first = OpManager()
    second = OpManager(first.registry)
    before = first.get_discovered_plugins()
    assert second.get_discovered_plugins() == before
    assert [record.error for record in before] == [None] * len(before)


def test_a_policy_helper_starts_from_the_whole_base_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "cpu.yaml"
    shipped.write_text("prefer: reference\n")
    monkeypatch.setattr("vllm_fl.dispatch.packaged.shipped_policy", lambda device: shipped)
    reset_default_manager()
    with with_strict_mode():  # the first thing that happens in this process
        assert get_default_manager().policy_in_force.prefer == "reference"


def test_what_a_plugin_resolved_before_the_policy_was_complete_is_resolved_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "cpu.yaml"
    shipped.write_text("op_backends: {early: [reference]}\n")
    module = tmp_path / "early_plugin.py"
    module.write_text(
        "from vllm_fl.dispatch import BackendImplKind as K, OpImpl, call_op\n"
        "def register(registry):\n"
        "    registry.register_impl(OpImpl('early', 'reference.x', K.REFERENCE, lambda: 'r'))\n"
        "    registry.register_impl(OpImpl('early', 'vendor.v', K.VENDOR, lambda: 'v', 'v', 100))\n"
        "    call_op('early')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "early_plugin")
    monkeypatch.setattr("vllm_fl.dispatch.packaged.shipped_policy", lambda device: shipped)
    reset_default_manager()
    get_default_manager().ensure_initialized()
    assert call_op("early") == "r"


def test_arguments_that_are_not_the_ops_are_told_in_the_ops_words() -> None:
    signature = OpSignature.parse(
        "sized(x, weight)", facts=lambda x, weight: {"size": len(x)}, fact_names=("size",)
    )
    with pytest.raises(TypeError, match=r"^op sized\(x, weight\): missing a req.*with \(int\)$"):
        signature.facts_of(1)
    with pytest.raises(TypeError, match="has no len"):
        signature.facts_of(1, 2)  # the arguments fit; what went wrong is told as it is


def test_after_a_thaw_nothing_is_relied_on() -> None:
    manager = make_manager(make_impl("vendor.a"))
    manager.resolve("scale")
    manager.freeze()
    manager.thaw()
    manager.freeze()
    assert manager.registry.unregister("scale", "vendor.a")


def test_the_configuration_is_read_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = OpManager()
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "nobody")
    with pytest.raises(ConfigError, match='unknown vendor "nobody"'):
        manager.ensure_initialized()
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "")
    manager.ensure_initialized()
    assert manager.base_policy.deny_vendors == frozenset()
