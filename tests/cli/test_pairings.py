# SPDX-License-Identifier: Apache-2.0
"""doctor on a machine that is stock, `empty`, with and without FlagGems: nothing of it is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from tests.cli import samples
from tests.cli.helpers import text_of
from vllm_fl.backends.flaggems import versions as flaggems_versions
from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend
from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.cli.diagnosis import diagnose
from vllm_fl.cli.doctor import render
from vllm_fl.vllm_plugin import platform_choice
from vllm_fl.vllm_plugin.platform_choice import PLATFORM, describe

STOCK = "vllm.platforms.cuda.NvmlCudaPlatform"
ON_A_GPU = {"vllm": "0.25.1", "torch": "2.11.0+cu130", "triton": "3.6.0"}
NEEDED = ("schemas of _C", "_C::weak_ref_tensor", "get_accelerator_view_from_cpu_tensor")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(extension=..., gems=...) is what doctor finds on a machine with an NVIDIA GPU."""

    def machine(
        *,
        extension: bool,
        gems: str | None,
        active: str | None = None,
        rivals: tuple[str, ...] = (),
        states: str = "in place",
        **packages: str | None,
    ) -> dict[str, Any]:
        monkeypatch.setattr(platform_choice, "detect", lambda asked: facts_of("cuda"))
        monkeypatch.setattr(platform_choice, "has_extension", lambda: extension)
        points = [
            SimpleNamespace(name=name, value=f"{name}:offer", load=lambda: lambda: "a.Platform")
            for name in rivals
        ]
        monkeypatch.setattr(platform_choice, "entry_points", lambda group: points)
        installed = {**ON_A_GPU, "flag-gems": gems, **packages}
        found = samples.found()
        found["device"] |= {"vendor": "cuda", "device_type": "cuda"}
        for package, name in (("triton", "triton_version"), ("flag-gems", "flaggems_version")):
            version = None if installed[package] is None else Version(installed[package])
            monkeypatch.setattr(flaggems_versions, name, lambda version=version: version)
        note = FlagGemsBackend().note()
        found["implementations"][0] |= {"impl_id": "default.flaggems", "note": note}
        active = active or (STOCK if extension else PLATFORM)
        ours = active == PLATFORM
        shims = [
            {"name": name, "state": states if ours else "not needed", "reason": "because"}
            for name in NEEDED
        ]
        return diagnose(
            [
                {**entry, "version": installed.get(entry["package"], entry["version"])}
                for entry in samples.VERSIONS
            ],
            samples.IMPORTS,
            found,
            {**samples.HOOKS, "device": "cuda"},
            samples.NATIVE,
            {"error": None, **describe(), "active": active, "shims": shims},
        )

    monkeypatch.delenv("VLLM_FL_PLATFORM", raising=False)
    return machine


def texts(data: dict[str, Any], level: str = "problem") -> list[str]:
    return [f"{f['about']}: {f['text']}" for f in data["findings"] if f["level"] == level]


@pytest.mark.parametrize("gems", [None, "5.0.2"])
def test_a_stock_machine_is_fine_and_its_platform_is_vllms(machine, gems) -> None:
    data = machine(extension=True, gems=gems)
    assert texts(data) == []
    text = text_of(render, data)
    assert (
        "vllm_fl's platform stays back: vLLM has a platform for cuda, and its compiled extension "
        "is here" in text
    )
    assert f"vLLM's platform here: {STOCK}" in text
    assert {shim["state"] for shim in data["platform"]["shims"]} == {"not needed"}


@pytest.mark.parametrize("gems", [None, "5.0.2"])
def test_an_empty_machine_is_fine_and_its_stand_ins_are_told(machine, gems) -> None:
    data = machine(extension=False, gems=gems)
    assert texts(data) == []
    text = text_of(render, data)
    assert "vllm_fl's platform steps in: this vLLM has no compiled extension" in text
    assert "vLLM is installed without its compiled extension" in text
    assert text.count("in place") >= len(NEEDED)


def test_a_stand_in_that_is_missing_is_a_problem(machine) -> None:
    data = machine(extension=False, gems=None, states="needed")
    assert texts(data)[0] == ("platform: the stand-in for schemas of _C is not in place: because")


def test_an_empty_machine_without_our_platform_is_told_who_came_first(machine) -> None:
    data = machine(extension=False, gems=None, rivals=("acme",), active="acme.Platform")
    assert texts(data) == []
    assert texts(data, "note")[-1] == (
        "platform: this vLLM has no compiled extension, and vllm_fl's platform stays back: the "
        "platform plugin 'acme' is active"
    )


def test_two_platforms_are_a_problem_because_vllm_refuses_them(machine, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_FL_PLATFORM", "cuda")
    data = machine(extension=True, gems=None, rivals=("acme",), active="acme.Platform")
    assert texts(data) == [
        "platform: two platform plugins are active, vllm_fl's (VLLM_FL_PLATFORM=cuda) and 'acme': "
        "vLLM refuses two"
    ]


def test_a_platform_that_vllm_did_not_take_is_a_problem(machine) -> None:
    data = machine(
        extension=False, gems=None, active="vllm.platforms.interface.UnspecifiedPlatform"
    )
    assert texts(data) == [
        "platform: vllm_fl's platform would step in (this vLLM has no compiled extension), and "
        "vLLM took vllm.platforms.interface.UnspecifiedPlatform"
    ]


def test_a_platform_that_cannot_be_asked_is_a_problem() -> None:
    unknown = {**samples.platform(), "error": "ImportError: no"}
    data = diagnose([], {}, samples.found(), samples.HOOKS, samples.NATIVE, unknown)
    text = "platform: whether vllm_fl's platform steps in could not be told: ImportError: no"
    assert text in texts(data)


@pytest.mark.parametrize("triton", ["3.7.1", "3.8.0"])
def test_flaggems_on_a_later_triton_is_named_with_its_shim(machine, triton) -> None:
    data = machine(extension=True, gems="5.0.2", triton=triton, torch="2.11.0+cu130")
    assert texts(data) == []
    assert [note for note in texts(data, "note") if note.startswith("implementations: ")] == [
        f"implementations: default.flaggems runs on Triton {triton} with a shim: constants are "
        "passed by position, generated kernels use no block pointers"
    ]


@pytest.mark.parametrize(
    ("packages", "pair"),
    [
        ({"triton": "3.2.0"}, "flag-gems 5.0.2 with triton 3.2.0"),
        ({"triton": "3.9.0"}, "flag-gems 5.0.2 with triton 3.9.0"),
        ({"numpy": "1.26.4"}, "vllm 0.25.1 with numpy 1.26.4"),
        ({"sqlalchemy": None}, "flag-gems 5.0.2 without sqlalchemy"),
        ({"triton": None}, "flag-gems 5.0.2 without triton"),
        ({"torch": "2.11.0+cpu"}, "flag-gems 5.0.2 with torch 2.11.0+cpu on a device of cuda"),
    ],
)
def test_a_broken_pairing_is_called_that(machine, packages, pair) -> None:
    data = machine(extension=True, gems="5.0.2", **packages)
    (found,) = texts(data)
    assert found.startswith(f"broken pairing: {pair}: ")


def test_on_a_machine_without_a_device_no_torch_is_wrong_for_flaggems(machine) -> None:
    entries = [
        {**e, "version": "3.6.0"} if e["package"] == "triton" else e for e in samples.VERSIONS
    ]
    data = diagnose(entries, samples.IMPORTS, samples.found(), samples.HOOKS, samples.NATIVE)
    assert data["findings"] == [] and data["platform"] is None
