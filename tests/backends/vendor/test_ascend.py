# SPDX-License-Identifier: Apache-2.0
"""vendor.ascend without an NPU: its tests inside the harness, and what happens without CANN."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.backends.vendor.ascend import ascend
from vllm_fl.backends.vendor.ascend.ascend import AscendBackend, backend
from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch import NoImplementationError, OpManager, SelectionPolicy
from vllm_fl.dispatch.config import Config

ROOT = Path(__file__).parents[3]


def run(*command: object, **variables: str) -> str:
    """What a command printed; the test fails with it where the command does."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("release", ("2.13.0", pytest.param("2.10.0", marks=pytest.mark.extended)))
def test_the_operators_conform_inside_the_harness(release):
    folder = ROOT / "tests/backends/vendor/ascend"
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, ASCEND_HARNESS=release)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) > 180, said[-2000:]


@pytest.mark.extended
def test_the_conformance_kit_passes_inside_the_harness():
    said = run("-m", "tests.backends.vendor.ascend.kit")
    passed = re.findall(r"^(\w+) +\d+ cases, passed$", said, re.MULTILINE)
    assert set(passed) >= {i.op_name for i in backend.implementations} - {"attention_backend"}


# ------------------------------------------------------------------------------ without it


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A torch_npu on the path that does as the real one without CANN."""

    def make(body: str) -> None:
        folder = tmp_path / "torch_npu"
        folder.mkdir()
        (folder / "__init__.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)

    yield make
    sys.modules.pop("torch_npu", None)


def manager() -> OpManager:
    """For an Ascend that is really there, and the reference left out."""
    policy = SelectionPolicy(strict=True, per_op_order={"rms_norm": ("vendor:ascend",)})
    return OpManager(config=Config(policy=policy), device=facts_of("ascend"))


def test_without_torch_npu_the_reason_is_that_it_is_not_installed():
    decision = OpManager(config=Config(), device=facts_of("ascend")).decide("rms_norm")
    reasons = {loser.impl_id: (loser.code, loser.reason) for loser in decision.losers}
    assert reasons["vendor.ascend"] == ("requires", "requires torch_npu, not installed")
    assert decision.winner_id == "reference.torch"


def test_without_cann_the_reason_is_the_loader_s_message(package):
    said = "libhccl.so: cannot open shared object file: No such file or directory"
    package(f"raise ImportError({said!r})\n")
    with pytest.raises(NoImplementationError, match=re.escape(f"raised ImportError: {said}")):
        manager().bind("rms_norm")


def test_asking_imports_nothing(package):
    package("raise SystemExit('imported')\n")
    assert manager().decide("rms_norm").winner_id == "vendor.ascend"
    assert "torch_npu" not in sys.modules


FAKE = """
import torch
__version__ = {version!r}
class npu:
    get_soc_version = staticmethod(lambda: {soc})
    get_device_name = staticmethod(lambda: "Ascend310P3")
"""


def test_a_torch_npu_without_an_operator_that_is_called_is_refused_by_its_name(package):
    package(FAKE.format(version="2.9.0", soc=223))
    with pytest.raises(RuntimeError, match=r"^torch_npu 2.9.0 has no npu_.*npu_swiglu"):
        AscendBackend().load()


def test_a_chip_of_another_family_is_refused(package, monkeypatch):
    package(FAKE.format(version="2.13.0", soc=202))
    monkeypatch.setattr(AscendBackend, "operators", ())
    said = r"^it is for A2 and A3, and this chip is Ascend310P3 \(version 202, 310P\)$"
    with pytest.raises(RuntimeError, match=said):
        AscendBackend().load()


@pytest.mark.parametrize("version, warns", (("2.13.0.post1", 0), ("2.10.0", 0), ("2.14.0", 1)))
def test_a_release_that_is_not_known_is_told(package, monkeypatch, version, warns):
    package(FAKE.format(version=version, soc=223))
    said = []
    monkeypatch.setattr(AscendBackend, "operators", ())
    monkeypatch.setattr(ascend.logger, "warning", lambda text, *of: said.append(text % of))
    AscendBackend().load()
    assert len(said) == warns
    assert all("2.14.0" in text and "2.10 to 2.13" in text for text in said)


def test_registering_it_imported_neither_torch_npu_nor_a_device():
    assert backend.implementations
    assert "torch_npu" not in sys.modules
