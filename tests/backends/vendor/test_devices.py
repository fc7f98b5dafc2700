# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from vllm_fl.backends.vendor.devices import (
    VENDORS,
    detect,
    facts_of,
    observed,
    register_builtins,
)
from vllm_fl.dispatch import ConfigError, OpManager, OpRegistry
from vllm_fl.dispatch.config import load_config
from vllm_fl.dispatch.types import DeviceFacts, VendorInfo

DETECTED = (
    ("davinci0", "ascend", "npu"),
    ("davinci_manager", "ascend", "npu"),
    ("mxcd", "metax", "cuda"),
    ("mkfd", "hygon", "cuda"),
    ("tang0", "sunrise", "ptpu"),
    ("nvidia0", "cuda", "cuda"),
    ("nvidia15", "cuda", "cuda"),
    ("kfd", "rocm", "cuda"),
)


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A folder of device nodes that every machine has."""
    for name in ("null", "zero", "shm", "tty0"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("node, vendor, device_type", DETECTED)
def test_a_device_node_tells_the_vendor(dev, node, vendor, device_type):
    (dev / node).touch()
    facts = detect(None, dev=dev)
    assert (facts.vendor, facts.device_type, facts.assumed) == (vendor, device_type, False)


def test_without_a_known_node_it_is_the_cpu(dev):
    assert detect(None, dev=dev) == DeviceFacts("cpu", "cpu")


def test_a_folder_that_does_not_exist_means_the_cpu(tmp_path):
    assert detect(None, dev=tmp_path / "nowhere") == DeviceFacts("cpu", "cpu")


@pytest.mark.parametrize("node", ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "dri", "mxcd0"))
def test_a_driver_without_a_chip_is_no_device(dev, node):
    (dev / node).touch()
    assert detect(None, dev=dev).vendor == "cpu"


@pytest.mark.parametrize("particular", ("davinci0", "mxcd", "mkfd", "tang0"))
def test_a_node_of_its_own_outweighs_one_that_others_share(dev, particular):
    """MetaX and Hygon drivers may offer NVIDIA's or AMD's nodes beside their own."""
    expected = {node: vendor for node, vendor, _ in DETECTED}[particular]
    for node in ("nvidia0", "kfd", particular):
        (dev / node).touch()
    assert detect(None, dev=dev).vendor == expected


@pytest.mark.parametrize("info", VENDORS, ids=lambda info: info.name)
def test_each_vendor_can_be_named_whatever_the_machine_has(dev, info):
    (dev / "nvidia0").touch()
    facts = detect(info.name, dev=dev)
    assert (facts.vendor, facts.device_type) == (info.name, info.device_type)
    assert facts == facts_of(info.name)


@pytest.mark.parametrize(
    "name, hint",
    (("ascent", " Did you mean [\"']?ascend"), ("CUDA", " Did you mean [\"']?cuda"), ("xyz", "$")),
)
def test_an_unknown_vendor_is_an_error_with_its_source_and_the_valid_names(dev, name, hint):
    valid = ", ".join(sorted(info.name for info in VENDORS))
    said = rf"^environment variable VLLM_FL_PLATFORM: unknown vendor .{name}.; valid: {valid}\."
    with pytest.raises(ConfigError, match=said + hint):
        detect(name, dev=dev)


def test_an_assumed_device_says_so():
    assert facts_of("ascend", assumed=True) == DeviceFacts("ascend", "npu", assumed=True)


def test_a_vendor_that_a_plugin_brought_is_as_good_as_one_of_the_table():
    known = {"acme": VendorInfo("acme", "acmepu"), "unsaid": VendorInfo("unsaid", "")}
    assert facts_of("acme", known) == detect("acme", known) == DeviceFacts("acme", "acmepu")
    with pytest.raises(ConfigError, match=r"valid: acme, .*unsaid.* Did you mean .acme."):
        facts_of("acne", known)
    with pytest.raises(ConfigError) as caught:
        facts_of("unsaid", known)
    assert str(caught.value) == (
        'vendor: the vendor "unsaid" has implementations, but nobody said what PyTorch calls its '
        "device. Its package should set Backend.device_types, or call "
        'registry.declare_vendor(VendorInfo("unsaid", "<device type>"))'
    )


def test_the_names_of_the_table_are_unique_and_become_known():
    registry = OpRegistry()
    register_builtins(registry)
    names = [info.name for info in VENDORS]
    assert len(set(names)) == len(names)
    assert set(names) <= set(registry.snapshot().vendors)


@pytest.mark.parametrize(
    "said, vendor, device_type", (("ascend", "ascend", "npu"), ("cpu", "cpu", "cpu"))
)
def test_the_variable_decides_for_a_fresh_manager(monkeypatch, said, vendor, device_type):
    monkeypatch.setenv("VLLM_FL_PLATFORM", said)
    device = OpManager(config=load_config()).device
    assert (device.vendor, device.device_type) == (vendor, device_type)


def test_a_wrong_variable_is_an_error_of_the_manager(monkeypatch):
    monkeypatch.setenv("VLLM_FL_PLATFORM", "ascent")
    with pytest.raises(ConfigError, match=r"VLLM_FL_PLATFORM: unknown vendor .ascent."):
        OpManager(config=load_config()).device  # noqa: B018


def test_the_variable_may_name_a_vendor_that_a_plugin_declares(monkeypatch, tmp_path):
    (tmp_path / "vllm_fl_brought.py").write_text(
        "from vllm_fl.dispatch.types import VendorInfo\n"
        "def register(registry):\n"
        "    registry.declare_vendor(VendorInfo('brought', 'broughtpu'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "vllm_fl_brought")
    monkeypatch.setenv("VLLM_FL_PLATFORM", "brought")
    assert OpManager().device == DeviceFacts("brought", "broughtpu")
    manager = OpManager()
    manager.ensure_initialized()
    assert manager.device == DeviceFacts("brought", "broughtpu")


@pytest.fixture
def torch_with(monkeypatch):
    """torch_with(cuda={...}) is what `sys.modules` holds as torch."""

    def torch_with(**devices):
        modules = {name: types.SimpleNamespace(**members) for name, members in devices.items()}
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(**modules))

    return torch_with


H200 = {
    "is_available": lambda: True,
    "get_device_name": lambda: "NVIDIA H200",
    "get_device_capability": lambda: (9, 0),
}


def test_a_device_that_can_be_asked_tells_its_name_and_architecture(torch_with):
    torch_with(cuda=H200, npu={"is_available": lambda: True, "get_device_name": lambda: "910B3"})
    facts = observed(facts_of("cuda"))
    assert (facts.name, facts.arch, facts.device_class) == ("NVIDIA H200", "sm_90", "cuda:sm_90")
    assert observed(facts_of("ascend")) == DeviceFacts("ascend", "npu", "910B3")


def _broken():
    raise RuntimeError("no driver")


@pytest.mark.parametrize(
    "device", ({}, {**H200, "is_available": lambda: False}, {**H200, "get_device_name": _broken})
)
def test_what_cannot_be_learned_is_left_as_it_is(torch_with, device):
    torch_with(cuda=device)
    assert observed(facts_of("cuda")) == facts_of("cuda")
    assert observed(facts_of("cpu")) == facts_of("cpu")


def test_detection_imports_no_torch():
    code = (
        "import sys\n"
        "from vllm_fl.backends.vendor.devices import detect\n"
        "detect(None)\n"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
