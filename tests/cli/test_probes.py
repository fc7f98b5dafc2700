# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest

from vllm_fl.cli.inventory import inventory
from vllm_fl.cli.probes import prepare
from vllm_fl.dispatch import discovery

PLUGIN = """
from vllm_fl.dispatch import BackendImplKind, OpImpl
def probe():
    return "no chip"
def register(registry):
    for name, available in (("acme", probe), ("acme.two", None)):
        registry.register_impl(OpImpl(
            "scale", f"vendor.{name}", BackendImplKind.VENDOR, lambda x: x, "acme", 100,
            available=available,
        ))
"""


@pytest.fixture
def plugins(modules, monkeypatch):
    """plugins(name="text") makes these modules the only plugins, and records what is told."""
    told: list[tuple[str, ...]] = []

    def plugins(**texts: str):
        monkeypatch.setattr(discovery, "BUILTIN_MODULES", ())
        monkeypatch.syspath_prepend(str(modules(**texts)))
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", ",".join(texts))
        return told, lambda *doing: told.append(doing)

    yield plugins
    for name in [name for name in sys.modules if name.startswith("vllm_fl_")]:
        del sys.modules[name]


def test_each_plugin_and_probe_is_told_before_it_is_tried(plugins) -> None:
    told, tell = plugins(vllm_fl_one="def register(registry): pass", vllm_fl_two=PLUGIN)
    prepare(tell)
    assert told == [
        ("plugin", "module", "vllm_fl_one"),
        ("plugin", "module", "vllm_fl_two"),
        ("device",),
        ("probe", "scale", "vendor.acme"),
        ("probe", "scale", "vendor.acme.two"),
        ("manager",),
    ]


def test_a_plugin_that_ended_the_process_is_left_out_and_told_as_failed(plugins) -> None:
    told, tell = plugins(vllm_fl_bad="import os; os._exit(9)", vllm_fl_good=PLUGIN)
    skip = [[["plugin", "module", "vllm_fl_bad"], "the process that tried it died"]]
    manager = prepare(tell, skip).manager
    bad, good = manager.get_discovered_plugins()
    assert bad.error == "PluginError: the process that tried it died"
    assert (good.error, good.implementations) == (None, 2)
    assert ("plugin", "module", "vllm_fl_bad") not in told


def test_a_probe_that_ended_the_process_is_a_refusal(plugins) -> None:
    _, tell = plugins(vllm_fl_good=PLUGIN)
    skip = [[["probe", "scale", "vendor.acme"], "the process that tried it died"]]
    manager = prepare(tell, skip).manager
    found = {i["impl_id"]: i for i in inventory(manager)["implementations"]}
    assert found["vendor.acme"]["reason"] == (
        "its availability probe: the process that tried it died"
    )
    assert found["vendor.acme"]["origin"] == "plugin module 'vllm_fl_good'"
    assert found["vendor.acme.two"]["available"] is True


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("VLLM_FL_PREFER", "cuda", 'unknown kind "cuda"'),
        ("VLLM_FL_DENY_VENDORS", "acne", 'unknown vendor "acne"; valid: acme.'),
        ("VLLM_FL_PLATFORM", "ascent", 'unknown vendor "ascent"'),
        ("VLLM_FL_NONSENSE", "1", "is not a setting of vllm_fl"),
    ],
)
def test_a_wrong_configuration_is_told_and_the_defaults_are_shown(
    plugins, monkeypatch, name: str, value: str, problem: str
) -> None:
    _, tell = plugins(vllm_fl_good=PLUGIN)
    monkeypatch.setenv(name, value)
    prepared = prepare(tell)
    assert prepared.config_error is not None
    assert problem in prepared.config_error
    assert prepared.manager.config.to_dict()["prefer"]["source"] == "default"


def test_a_vendor_that_a_plugin_registers_can_be_the_platform(plugins, monkeypatch) -> None:
    text = PLUGIN + "    from vllm_fl.dispatch.types import VendorInfo\n"
    text += "    registry.declare_vendor(VendorInfo('acme', 'acmepu'))\n"
    _, tell = plugins(vllm_fl_good=text)
    monkeypatch.setenv("VLLM_FL_PLATFORM", "acme")
    prepared = prepare(tell)
    assert prepared.config_error is None
    assert prepared.manager.device.device_class == "acme:acmepu"
