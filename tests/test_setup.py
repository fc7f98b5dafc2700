# SPDX-License-Identifier: Apache-2.0
"""setup.py builds what can be built, and says what it did not; `vllm_fl.native` reads that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl import native
from vllm_fl.native import NativeBuild, native_build, native_refusal

ROOT = Path(__file__).parents[1]


def build(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Build the Python part into a folder; no compiler is run for that."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def record(tmp_path, monkeypatch):
    """record(**changes) puts another record in the place of the installation's."""

    def record(**changes: object) -> None:
        path = tmp_path / "record.json"
        known = {"asked": "auto", "built": ["cpu"], "torch": None, "compiler": None, "reason": None}
        path.write_text(json.dumps(known | changes))
        build = native_build(path)
        monkeypatch.setattr(native, "native_build", lambda: build)

    return record


@pytest.mark.parametrize(
    ("environ", "reason"),
    (
        ({"VLLM_FL_DEVICE": "none"}, "VLLM_FL_DEVICE=none"),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler (no-such-compiler)"),
    ),
    ids=("none", "no compiler"),
)
def test_without_native_code_the_package_is_built_and_says_why(tmp_path, environ, reason):
    done = build(tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    assert f"installing as pure Python, without native kernels: {reason}" in done.stderr
    assert (tmp_path / "vllm_fl/__init__.py").is_file()
    found = native_build(tmp_path / "vllm_fl/_native.json")
    assert (found.built, found.reason) == ((), reason)


@pytest.mark.parametrize(
    ("environ", "says"),
    (
        (
            {"VLLM_FL_DEVICE": "cpu", "CXX": "no-such-compiler"},
            "VLLM_FL_DEVICE=cpu cannot be built: there is no C++ compiler",
        ),
        ({"VLLM_FL_DEVICE": "abacus"}, "must be one of auto, cpu, none, found 'abacus'"),
    ),
    ids=("cpu", "unknown"),
)
def test_what_is_asked_for_by_name_and_cannot_be_built_is_an_error(tmp_path, environ, says):
    done = build(tmp_path, **environ)
    assert done.returncode != 0
    assert says in done.stderr


def test_where_nothing_was_written_nothing_is_claimed(tmp_path):
    assert native_build(tmp_path / "absent.json") == NativeBuild(
        "", (), None, None, "it was not built by setup.py"
    )


def test_a_broken_record_is_told(tmp_path):
    path = tmp_path / "_native.json"
    path.write_text("{")
    reason = native_build(path).reason
    assert reason is not None and reason.startswith("_native.json cannot be read (JSONDecodeError")


def test_native_code_for_another_torch_is_refused(record, monkeypatch):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(native.metadata, "version", lambda name: "2.13.0+cpu")
    record(torch="2.13.0+cu130")
    assert native_refusal("cpu") is None  # the same release, built for another device
    record(torch="2.12.0")
    refusal = native_refusal("cpu")
    assert refusal is not None
    assert "was built for torch 2.12.0, and this is 2.13.0+cpu: install a C++ compiler" in refusal


def test_native_code_for_another_device_is_refused(record, monkeypatch):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: object())
    record(torch="2.13.0", built=["cuda"])
    assert native_refusal("cpu") == "vllm_fl's native code is for cuda, not cpu"


def test_without_the_extension_the_reason_and_the_way_to_build_it_are_told(record, monkeypatch):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    record(built=[], reason="there is no C++ compiler (c++)")
    assert native_refusal("cpu") == (
        "vllm_fl was installed without native code (there is no C++ compiler (c++)): "
        f"{native.HOW_TO_BUILD}"
    )


def test_a_backend_without_its_extension_is_unavailable_and_its_guards_say_so(monkeypatch):
    """Guards are asked, too, for a device that is only assumed."""
    pytest.importorskip("torch")
    from vllm_fl.backends.vendor.cpu import fl

    monkeypatch.setattr(fl, "native_refusal", lambda device: "not built")
    monkeypatch.setitem(sys.modules, "vllm_fl._C", None)
    assert fl.backend.is_available() == "not built"
    assert fl._Kernels().supports_rms_norm(None) == "not built"
    with pytest.raises(ImportError):
        fl._Kernels().rms_norm(None)
