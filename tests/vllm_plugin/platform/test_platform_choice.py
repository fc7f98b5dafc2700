# SPDX-License-Identifier: Apache-2.0
"""When vllm_fl offers a platform, and when it stays back."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.vllm_plugin import platform_choice
from vllm_fl.vllm_plugin.platform_choice import PLATFORM, choose, offer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what the machine has."""

    def set_up(vendor: str, *, extension: bool, rivals: dict[str, object] | None = None) -> None:
        def detect(asked: str | None):
            return facts_of(asked or vendor)

        points = [
            SimpleNamespace(name=name, value=f"{name}:plugin", load=lambda path=path: lambda: path)
            for name, path in (rivals or {}).items()
        ]
        points.append(SimpleNamespace(name="fl", value=f"{platform_choice.__name__}:offer"))
        monkeypatch.setattr(platform_choice, "detect", detect)
        monkeypatch.setattr(platform_choice, "has_extension", lambda: extension)
        monkeypatch.setattr(platform_choice, "entry_points", lambda group: points)

    monkeypatch.delenv("VLLM_FL_PLATFORM", raising=False)
    monkeypatch.setattr(platform_choice, "_said", set())
    monkeypatch.setattr(platform_choice, "configure_logging", lambda level: None)
    return set_up


def test_a_vllm_with_its_extension_needs_none(machine) -> None:
    machine("cuda", extension=True)
    assert choose() == (None, "vLLM has a platform for cuda, and its compiled extension is here")


def test_a_vllm_without_its_extension_gets_it(machine) -> None:
    machine("cuda", extension=False)
    assert choose() == (PLATFORM, "this vLLM has no compiled extension")


def test_a_chip_that_vllm_does_not_know_gets_it(machine) -> None:
    machine("mthreads", extension=True)
    assert choose() == (PLATFORM, "vLLM has no platform for mthreads")


def test_intels_kernels_are_a_package_and_no_part_of_vllm(machine, monkeypatch) -> None:
    machine("xpu", extension=False)
    why = "vLLM has a platform for xpu, whose kernels come with a package of their own"
    assert choose() == (None, why)
    monkeypatch.setenv("VLLM_FL_PLATFORM", "xpu")
    assert choose() == (PLATFORM, "VLLM_FL_PLATFORM=xpu")


def test_a_cpu_is_left_to_vllm(machine) -> None:
    machine("cpu", extension=False)
    assert choose()[0] is None


def test_it_stays_back_behind_another_plugin_with_one_line(machine, monkeypatch) -> None:
    machine("ascend", extension=False, rivals={"ascend": "vllm_ascend.platform.NPUPlatform"})
    lines: list[str] = []
    # Not caplog: which handlers see a record, and how often, depends on what ran before.
    log = logging.getLogger("vllm_fl")
    monkeypatch.setattr(log, "info", lambda text, *of: lines.append(text % of))
    assert offer() is None
    assert offer() is None  # vLLM asks twice
    assert lines == ["vllm_fl's platform stays back: the platform plugin 'ascend' is active"]


def test_a_plugin_that_offers_nothing_or_fails_is_no_rival(machine, monkeypatch) -> None:
    machine("ascend", extension=False, rivals={"idle": None})
    assert choose()[0] == PLATFORM


def test_a_plugin_that_vllm_may_not_load_is_no_rival(machine, monkeypatch) -> None:
    from vllm import envs

    machine("ascend", extension=False, rivals={"ascend": "somewhere.Platform"})
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["fl"], raising=False)
    assert choose()[0] == PLATFORM


def test_asked_for_it_steps_in_beside_a_working_vllm(machine, monkeypatch) -> None:
    machine("cuda", extension=True)
    monkeypatch.setenv("VLLM_FL_PLATFORM", "cuda")
    assert choose() == (PLATFORM, "VLLM_FL_PLATFORM=cuda")


def test_what_was_looked_at_is_told(machine, monkeypatch) -> None:
    machine("cuda", extension=False)
    assert platform_choice.describe() == {
        "steps_in": True,
        "reason": "this vLLM has no compiled extension",
        "vendor": "cuda",
        "extension": False,
        "asked": None,
        "rival": None,
    }
    machine("cuda", extension=True, rivals={"acme": "acme.Platform"})
    monkeypatch.setenv("VLLM_FL_PLATFORM", "cuda")
    told = platform_choice.describe()
    assert (told["steps_in"], told["asked"], told["rival"]) == (True, "cuda", "acme")
    monkeypatch.setenv("VLLM_FL_ENABLED", "0")
    told = platform_choice.describe()
    assert (told["steps_in"], told["reason"], told["vendor"]) == (False, "VLLM_FL_ENABLED=0", None)


def test_switched_off_it_offers_nothing(machine, monkeypatch) -> None:
    machine("cuda", extension=False)
    monkeypatch.setenv("VLLM_FL_ENABLED", "0")
    assert choose() == (None, "VLLM_FL_ENABLED=0")


def test_switched_off_not_even_the_device_table_is_imported() -> None:
    code = (
        "import os, sys; os.environ['VLLM_FL_ENABLED'] = '0'; "
        "from vllm_fl.vllm_plugin import platform_choice as p; assert p.offer() is None; "
        "print([m for m in sys.modules if m.startswith('vllm_fl.backends')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_question_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from vllm_fl.vllm_plugin import platform_choice as p; p.choose(); "
        "print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
