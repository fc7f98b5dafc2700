# SPDX-License-Identifier: Apache-2.0
"""examples/vendor_package: its own tests, its Triton kernel in Triton's interpreter, and what it
says where Triton cannot run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "vendor_package"
WITHOUT_TRITON = """
import sys
class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker)
"""
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(*command: str, interpret: bool, path: Path = EXAMPLE) -> str:
    """What a command prints that has the example on its path; the test fails where it does."""
    paths = os.pathsep.join([str(path), str(EXAMPLE), str(EXAMPLE.parents[1])])
    variables = {
        "PYTHONPATH": paths,
        "VLLM_FL_PLUGIN_MODULES": "vllm_fl_acme",
        "TRITON_INTERPRET": "1" if interpret else "0",
    }
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLE,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def explained(**where) -> dict[str, str]:
    """impl_id to the reason for which it is not chosen for rms_norm; "" for the winner."""
    said = run("-m", "vllm_fl.cli.main", "explain", "rms_norm", "--json", **where)
    data = json.loads(said)
    reasons = {loser["impl_id"]: loser["reason"] for loser in data["losers"]}
    return {**reasons, data["winner"]["impl_id"]: ""}


@NEEDS_TRITON
def test_in_the_interpreter_the_triton_kernel_keeps_its_contract() -> None:
    said = run(
        "-m", "vllm_fl.cli.main", "verify", "--impl", "vendor.acme.triton", "--json",
        interpret=True,
    )  # fmt: skip
    report = json.loads(said)
    [op] = report["ops"]
    [impl] = op["implementations"]
    assert (op["op"], impl["impl"]) == ("rms_norm", "vendor.acme.triton")
    assert set(impl["dtypes"]) == {"bfloat16", "float16", "float32"}
    assert all(found["passed"] >= 12 for found in impl["dtypes"].values()), impl
    assert report["failed"] == 0


@pytest.mark.extended
def test_its_own_tests_run_where_triton_interprets_and_where_it_does_not() -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "vllm_fl.testing.pytest_plugin")
    command = ("-m", "pytest", "-q", *plugins, "--vllm-fl-vendor", "acme", "-rs", "tests")
    ran = {}
    for interpret in (True, False):
        said = run(*command, interpret=interpret)
        ran[interpret] = int(re.search(r"(\d+) passed", said)[1])
        if not interpret:
            assert "Triton compiles nothing for a CPU" in said
    assert ran[True] > ran[False] + 40 > 80


@NEEDS_TRITON
@pytest.mark.extended
def test_it_has_every_item_of_the_checklist() -> None:
    said = run("-m", "vllm_fl.cli.main", "check-vendor", "vllm_fl_acme", interpret=True)
    assert "vllm_fl_acme: all 13 items are there" in said


def test_without_the_interpreter_it_says_why_it_cannot_run() -> None:
    assert explained(interpret=False)["vendor.acme.triton"] == (
        "Triton compiles nothing for a CPU; its interpreter is on with TRITON_INTERPRET=1"
        if find_spec("triton")
        else "requires triton, not installed"
    )


def test_without_triton_it_registers_and_says_what_is_missing(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    reasons = explained(interpret=True, path=tmp_path)
    assert reasons["vendor.acme.triton"] == "requires triton, not installed"
