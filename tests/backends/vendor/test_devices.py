# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_fl.backends.vendor.device_table import CPU, DEVICES, Marker
from vllm_fl.backends.vendor.devices import (
    VENDORS,
    Surroundings,
    describe,
    detect,
    facts_of,
    flaggems_name,
    observed,
    read_torch_marks,
    register_builtins,
    survey,
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

WAYS = [
    pytest.param(info.name, markers, id=f"{info.name} by {' and '.join(map(str, markers))}")
    for info in DEVICES
    for markers in info.markers
]
"""Every way in which a vendor is found."""


class Machine:
    """A machine that has nothing but what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.dev, self.bin = root / "dev", root / "bin"
        for folder in (self.dev, self.bin):
            folder.mkdir()
        for name in ("null", "zero", "shm", "tty0"):
            (self.dev / name).touch()
        self.around = Surroundings(self.dev, str(self.bin), {}, frozenset(), frozenset())

    def put(self, *markers: Marker) -> Machine:
        for marker in markers:
            around, what = self.around, marker.what
            if marker.kind == "node":
                (self.dev / what.replace("[0-9]*", "0").replace("*", "0")).touch()
            elif marker.kind == "tool":
                tool = self.bin / what
                tool.write_text("#!/bin/sh\n")
                tool.chmod(0o755)
            elif marker.kind == "module":
                self.around = replace(around, modules=around.modules | {what})
            elif marker.kind == "torch":
                self.around = replace(around, torch_marks=around.torch_marks | {what})
            else:
                self.around = replace(around, variables={**around.variables, what: "/opt"})
        return self

    def vendor(self) -> str:
        return detect(None, around=self.around).vendor


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def tool(name: str) -> Marker:
    return Marker("tool", name)


# ------------------------------------------------------------------------------ detection


@pytest.mark.parametrize("node, vendor, device_type", DETECTED)
def test_a_device_node_tells_the_vendor(machine, node, vendor, device_type):
    (machine.dev / node).touch()
    facts = detect(None, around=machine.around)
    assert (facts.vendor, facts.device_type, facts.assumed) == (vendor, device_type, False)


@pytest.mark.parametrize("vendor, markers", WAYS)
def test_each_way_of_the_table_finds_its_vendor(machine, vendor, markers):
    machine.put(*markers)
    assert machine.vendor() == vendor
    [sighting] = [s for s in survey(machine.around) if s.found]
    assert str(sighting) == f"{vendor}: found by {', '.join(map(str, markers))}"


@pytest.mark.parametrize(
    "vendor, markers", [way for way in WAYS if len(way.values[1]) > 1], ids=str
)
def test_a_part_of_a_way_finds_nobody_and_says_what_is_missing(machine, vendor, markers):
    machine.put(*markers[:-1])
    assert machine.vendor() == "cpu"
    said = [str(sighting) for sighting in survey(machine.around)]
    assert f"{vendor}: not found; {markers[0]} is here, but not {markers[-1]}" in said


def test_without_any_marker_it_is_the_cpu(machine):
    assert detect(None, around=machine.around) == DeviceFacts("cpu", "cpu")
    assert survey(machine.around) == ()


def test_a_folder_that_does_not_exist_means_the_cpu(machine, tmp_path):
    nowhere = replace(machine.around, dev=tmp_path / "nowhere", path=str(tmp_path / "nothing"))
    assert detect(None, around=nowhere) == DeviceFacts("cpu", "cpu")


@pytest.mark.parametrize("node", ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "dri", "mxcd0"))
def test_a_driver_without_a_chip_is_no_device(machine, node):
    (machine.dev / node).touch()
    assert machine.vendor() == "cpu"


@pytest.mark.parametrize("info", [i for i in DEVICES if i.extension], ids=lambda info: info.name)
def test_an_extension_that_pip_installed_is_no_chip(machine, info):
    """But for Enflame, of whom nothing else is known."""
    machine.put(Marker("module", info.extension))
    assert machine.vendor() == ("enflame" if info.name == "enflame" else "cpu")


@pytest.mark.parametrize("particular", ("davinci0", "mxcd", "mkfd", "tang0"))
def test_a_node_of_its_own_outweighs_one_that_others_share(machine, particular):
    """MetaX and Hygon drivers may offer NVIDIA's or AMD's nodes beside their own."""
    expected = {node: vendor for node, vendor, _ in DETECTED}[particular]
    for node in ("nvidia0", "kfd", particular):
        (machine.dev / node).touch()
    assert machine.vendor() == expected


# ------------------------------------------------------- what several vendors have in common


@pytest.mark.parametrize("info", [i for i in DEVICES if i.device_type == "cuda"], ids=str)
def test_no_vendor_is_found_by_its_device_type(machine, info):
    """A build of torch with CUDA in it, as eight vendors have, tells none of them."""
    assert machine.put(Marker("torch", "cuda")).vendor() == "cpu"
    assert machine.put(*info.markers[-1]).vendor() == info.name


def test_the_tool_of_two_vendors_alone_tells_neither(machine):
    machine.put(tool("xpu-smi"))
    assert machine.vendor() == "cpu"
    assert {s.vendor: s.missing for s in survey(machine.around)} == {
        "kunlunxin": ("module torch_xmlir",),
        "xpu": ("torch's mark xpu",),
    }


def test_the_tool_of_two_vendors_is_kunlunxin_s_beside_its_extension(machine):
    machine.put(tool("xpu-smi"), Marker("module", "torch_xmlir"), Marker("torch", "cuda"))
    assert machine.vendor() == "kunlunxin"


def test_the_tool_of_two_vendors_is_intel_s_beside_its_build_of_torch(machine):
    assert machine.put(tool("xpu-smi"), Marker("torch", "xpu")).vendor() == "xpu"


@pytest.mark.parametrize(
    "own, vendor",
    (
        (tool("mx-smi"), "metax"),
        (tool("ixsmi"), "iluvatar"),
        (tool("ppu-smi"), "thead"),
        (Marker("env", "PPU_SDK"), "thead"),
        (Marker("torch", "corex"), "iluvatar"),
    ),
    ids=str,
)
def test_nvidia_s_tool_beside_another_vendor_s_marker_is_an_imitation(machine, own, vendor):
    machine.put(tool("nvidia-smi"), Marker("torch", "cuda"), own)
    assert machine.vendor() == vendor


def test_amd_s_tool_beside_hygon_s_build_of_torch_is_hygon(machine):
    machine.put(tool("rocm-smi"), Marker("torch", "hip"), Marker("node", "kfd"))
    assert machine.vendor() == "rocm"
    assert machine.put(Marker("torch", "__hcu_version__")).vendor() == "hygon"


# -------------------------------------------------------------------------- torch's marks


@pytest.mark.parametrize(
    "version, init, marks",
    (
        ("cuda: Optional[str] = '12.8'\nhip = None\nxpu = None\n", "", {"cuda"}),
        ("cuda = None\nhip: Optional[str] = '6.2.1'\nxpu: Optional[str] = None\n", "", {"hip"}),
        ("xpu = '20250201'\n", "from torch import cuda, xpu\n", {"xpu"}),
        ("cuda = '10.2'\n", "corex = True\n", {"cuda", "corex"}),
        ("hip = '6.1'\n", "__hcu_version__ = version.hcu\n", {"hip", "__hcu_version__"}),
        ("__hcu_version__ = '25.04'\n", "", {"__hcu_version__"}),
        ("corex = False\n", "", set()),
        ("hiprtc = '1'\n", "    hip = 1\n", set()),
        (None, None, set()),
    ),
)
def test_the_marks_of_a_torch_are_read_from_its_sources(tmp_path, version, init, marks):
    for name, text in (("version.py", version), ("__init__.py", init)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert read_torch_marks(tmp_path) == marks


def test_an_imported_torch_is_asked_for_its_marks(monkeypatch):
    import torch

    marker = Marker("torch", "corex")
    assert not Surroundings().has(marker)
    monkeypatch.setattr(torch, "corex", True, raising=False)
    assert Surroundings().has(marker)


def test_the_sources_of_this_torch_say_what_it_says_itself():
    import torch

    own = {mark for mark in ("cuda", "hip", "xpu") if getattr(torch.version, mark, None)}
    assert read_torch_marks(Path(torch.__file__).parent) == own


# ------------------------------------------------------------------------- by name, as data


@pytest.mark.parametrize("info", VENDORS, ids=lambda info: info.name)
def test_each_vendor_can_be_named_whatever_the_machine_has(machine, info):
    (machine.dev / "nvidia0").touch()
    facts = detect(info.name, around=machine.around)
    assert (facts.vendor, facts.device_type) == (info.name, info.device_type)
    assert facts == facts_of(info.name)


@pytest.mark.parametrize(
    "name, hint",
    (("ascent", " Did you mean [\"']?ascend"), ("CUDA", " Did you mean [\"']?cuda"), ("xyz", "$")),
)
def test_an_unknown_vendor_is_an_error_with_its_source_and_the_valid_names(machine, name, hint):
    valid = ", ".join(sorted(info.name for info in VENDORS))
    said = rf"^environment variable VLLM_FL_PLATFORM: unknown vendor .{name}.; valid: {valid}\."
    with pytest.raises(ConfigError, match=said + hint):
        detect(name, around=machine.around)


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


def test_the_table_holds_fourteen_vendors_and_the_cpu():
    names = [info.name for info in VENDORS]
    assert len(DEVICES) == 14 and VENDORS[0] is CPU
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_a_vendor_s_row_is_whole(info):
    assert info.markers and info.dispatch_key and info.communication and info.visible_devices
    fields = set(describe(info.name))
    for name, known in info.open:
        assert name in fields, f"{name} is said to be open, and is no field"
        assert known
    said = dict(info.open)
    for name in ("library", "tool", "flaggems"):
        # What is missing is said to be missing.
        assert getattr(info, name) or name in said or "library is not known" in str(said)


def test_the_names_of_the_table_become_known():
    registry = OpRegistry()
    register_builtins(registry)
    assert {info.name for info in VENDORS} <= set(registry.snapshot().vendors)


def test_flaggems_calls_vendors_by_names_of_its_own():
    names = {info.name: flaggems_name(info.name) for info in VENDORS}
    assert names.pop("cuda") == "nvidia" and names.pop("rocm") == "amd"
    assert {vendor for vendor, name in names.items() if name is None} == {"cpu", "thead", "xpu"}
    assert all(name in (None, vendor) for vendor, name in names.items())
    assert flaggems_name("acme") is None


def test_a_description_is_data_and_says_what_is_here_and_what_is_open(machine):
    machine.put(Marker("module", "torch_xmlir"))
    told = json.loads(json.dumps(describe("kunlunxin", machine.around)))
    assert (told["device_type"], told["extension"]) == ("cuda", "torch_xmlir")
    assert told["markers"] == [
        [
            {"kind": "module", "what": "torch_xmlir", "here": True},
            {"kind": "tool", "what": "xpu-smi", "here": False},
        ]
    ]
    assert told["found"] is False
    assert told["open"]["tool"] == "Intel's has the same name"
    assert machine.put(tool("xpu-smi")) and describe("kunlunxin", machine.around)["found"]


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_what_would_run_can_be_asked_for_each_vendor_from_here(info):
    manager = OpManager(config=load_config({}), device=facts_of("cpu"))
    facts = facts_of(info.name, assumed=True)
    decision = manager.decide("rms_norm", device=facts)
    assert decision.winner_id is not None
    assert decision.to_dict()["device"]["assumed"] is True
    assert all(loser.reason for loser in decision.losers)


# -------------------------------------------------------------------------------- the users


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


def test_detection_imports_neither_torch_nor_an_extension():
    extensions = {info.extension for info in DEVICES if info.extension}
    code = (
        "import sys\n"
        "from vllm_fl.backends.vendor.devices import describe, detect, survey, VENDORS\n"
        "detect(None); survey(); [describe(info.name) for info in VENDORS]\n"
        f"print(sorted({ ({'torch', 'vllm'} | extensions)!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
