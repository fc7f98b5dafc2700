# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_fl.cli import new_vendor
from vllm_fl.cli.errors import CommandError, UsageError
from vllm_fl.cli.main import main
from vllm_fl.cli.new_vendor import DEFAULT_OPS, package_files, write_package
from vllm_fl.dispatch import OpRegistry
from vllm_fl.ops import CONTRACTS, register_builtins

ALL = [contract.name for contract in CONTRACTS]


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """vendor("acme", ops) writes a package and imports it; the modules are gone afterwards."""
    made = []

    def make(name: str, ops=DEFAULT_OPS, device_type: str = "cpu"):
        folder, _ = write_package(tmp_path, name, ops, device_type)
        monkeypatch.syspath_prepend(str(folder))
        made.append(f"vllm_fl_{name}")
        return importlib.import_module(f"vllm_fl_{name}")

    yield make
    for module in [m for m in sys.modules if m.partition(".")[0] in made]:
        del sys.modules[module]


@pytest.mark.parametrize("ops", (DEFAULT_OPS, ALL), ids=("by default", "every op"))
def test_what_is_written_registers_with_the_signatures_of_the_contracts(vendor, ops):
    module = vendor("written", ops)
    registry = OpRegistry()
    register_builtins(registry)
    module.register_builtins(registry)
    found = registry.snapshot().impls_by_op
    assert set(found) == set(ops)
    for (impl,) in found.values():
        assert (impl.impl_id, impl.vendor, impl.priority) == ("vendor.written", "written", 100)


def test_the_files_are_those_of_a_whole_package(tmp_path):
    folder, names = write_package(tmp_path, "acme", ["silu_and_mul"], "npu")
    assert sorted(names) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "vllm-plugin-acme"
    assert project["entry-points"]["vllm_fl.plugin"] == {"acme": "vllm_fl_acme:register_builtins"}
    assert 'device_types = ("npu",)' in (folder / "vllm_fl_acme" / "backend.py").read_text()
    for path in (".github/workflows/test.yml", "README.md", "tests/test_conformance.py"):
        assert "acme" in (folder / path).read_text() and "@" not in (
            (folder / path).read_text().replace("checkout@v4", "").replace("setup-python@v5", "")
        ).replace("`@backend", "").replace("@pytest", "")


@pytest.mark.parametrize("ops", (DEFAULT_OPS, ALL), ids=("by default", "every op"))
def test_what_is_written_is_formatted_and_has_no_lint(tmp_path, ops):
    folder, _ = write_package(tmp_path, "acme", ops)
    for path in folder.rglob("*.py"):
        ast.parse(path.read_text())
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    lint = ["check", "--isolated", "--select", "E,F,I,B", "--line-length", "100"]
    for arguments in (lint, ["format", "--isolated", "--check", "--line-length", "100"]):
        done = subprocess.run([ruff, *arguments, "."], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout


def test_the_command_writes_and_says_what_to_do_next(tmp_path, capfd):
    assert main(["new-vendor", "acme", "--ops", "rms_norm", "--directory", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert f"pip install {tmp_path}/vllm-plugin-acme\n" in said
    assert f"pytest {tmp_path}/vllm-plugin-acme\n" in said
    assert "vllm-fl check-vendor vllm_fl_acme\n" in said
    assert main(["new-vendor", "other", "--directory", str(tmp_path), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert Path(told["folder"]).name == "vllm-plugin-other"
    assert "vllm_fl_other/impl/activation.py" in told["files"]


def test_an_op_that_is_named_twice_is_written_once():
    once, twice = (package_files("acme", ["rms_norm"] * count) for count in (1, 2))
    assert once == twice


def test_the_build_includes_policies():
    data = tomllib.loads(package_files("acme", DEFAULT_OPS)["pyproject.toml"])
    assert data["tool"]["setuptools"]["package-data"] == {"vllm_fl_acme": ["policies/*.yaml"]}


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    files = {"one": "1", "one/below": "a file is no folder"}
    monkeypatch.setattr(new_vendor, "package_files", lambda *given: files)
    with pytest.raises(OSError):
        write_package(tmp_path, "acme", DEFAULT_OPS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "vllm-plugin-acme").mkdir()
    with pytest.raises(CommandError, match=r"vllm-plugin-acme is there already; remove it"):
        write_package(tmp_path, "acme", DEFAULT_OPS)


@pytest.mark.parametrize(
    "name, ops, device, said",
    (
        ("Acme", DEFAULT_OPS, "cpu", "cannot be a vendor's name; it starts with a small letter"),
        ("acme", ("rms_nrom",), "cpu", 'unknown op "rms_nrom"; valid: .* Did you mean "rms_norm"'),
        ("acme", (), "cpu", "--ops names no op"),
        ("ascend", DEFAULT_OPS, "npu", "vendor.ascend is taken; taken are ascend, cpu, cuda;"),
        ("cpu", DEFAULT_OPS, "cpu", "vendor.cpu is taken"),
        ("acme", DEFAULT_OPS, "nonsense", 'unknown device type "nonsense"; valid: cpu, cuda, '),
        ("acme", DEFAULT_OPS, "npu:0", '"npu:0" is no device type'),
    ),
)
def test_a_wrong_word_is_told(name, ops, device, said):
    with pytest.raises(UsageError, match=said):
        package_files(name, ops, device)


def test_the_template_is_a_backend_that_registers_and_is_not_built_in():
    from vllm_fl.backends.vendor.template import register_ops
    from vllm_fl.dispatch.builtin_ops import BUILTIN_MODULES

    registry = OpRegistry()
    register_builtins(registry)
    register_ops.register_builtins(registry)
    assert list(registry.snapshot().impls_by_op) == ["silu_and_mul"]
    assert not any("template" in module for module in BUILTIN_MODULES)


def test_nothing_of_the_template_is_left_in_a_package():
    for path, text in package_files("acme", DEFAULT_OPS).items():
        assert "emplate" not in text and "...." not in text, path
    assert new_vendor.DEFAULT_OPS == DEFAULT_OPS
