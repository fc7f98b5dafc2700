# SPDX-License-Identifier: Apache-2.0
"""The table covers what vllm_fl uses of vLLM, and the vLLM of this environment meets the table."""

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_fl.ops import CONTRACTS
from vllm_fl.vllm_plugin.layers import LAYERS

from .audit import failures, read_installed
from .checks import Equals, OnlySince
from .source import Source
from .surface import RELEASES, SURFACE

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"vllm(\.\w+)+(:\w+)?")
LAYER_FILES = sorted((ROOT / "vllm_fl/vllm_plugin/layers").glob("*.py"))


@pytest.fixture(scope="module")
def installed() -> Source:
    source = read_installed()
    if source is None:
        pytest.skip("vLLM is not installed")
    return source


def trees() -> list[tuple[str, ast.Module]]:
    files = sorted((ROOT / "vllm_fl").rglob("*.py"))
    return [(str(file.relative_to(ROOT)), ast.parse(file.read_text("utf-8"))) for file in files]


def uses_in(tree: ast.Module) -> set[str]:
    """What a file of ours takes from vLLM: "module", "module:Name" and "module:Name.attribute"."""
    uses: set[str] = set()
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            uses |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.Constant) and PATH.fullmatch(str(node.value)):
            uses.add(str(node.value))
    for node in ast.walk(tree):
        owner, attribute = None, None
        if isinstance(node, ast.Attribute):
            owner, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, name = node.args[:2]
            attribute = name.value if isinstance(name, ast.Constant) else None
        if isinstance(owner, ast.Name) and owner.id in names and attribute is not None:
            uses.add(f"{names[owner.id]}.{attribute}")
    return uses | set(names.values())


def covered() -> set[str]:
    """Every path of the table and what it stands in, in each way to write a module's name."""
    paths: set[str] = set()
    for entry in SURFACE:
        paths |= {str(check.value) for check in entry.checks if isinstance(check, Equals)}
        module, _, name = entry.path.partition(":")
        package, _, last = module.rpartition(".")
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            dotted = ".".join(parts[:depth])
            paths.add(f"{module}:{dotted}" if dotted else module)
            paths.add(f"{module}.{dotted}" if dotted else module)  # as vLLM names classes
            if package:
                paths.add(f"{package}:{'.'.join([last, *parts[:depth]])}")
    return paths


def test_every_way_to_use_vllm_is_found() -> None:
    code = """
import vllm.sequence
from vllm import envs, LLM as Engine
SPEC = ("vllm.ops:Norm", "vllm.worker", "vllm", "about vllm.ops")
def act():
    from vllm.platforms import current_platform
    return envs.DEBUG, getattr(current_platform, "is_npu", None), current_platform.name.lower()
"""
    assert uses_in(ast.parse(code)) == {
        "vllm.sequence",
        "vllm:envs",
        "vllm:LLM",
        "vllm.ops:Norm",
        "vllm.worker",
        "vllm.platforms:current_platform",
        "vllm:envs.DEBUG",
        "vllm.platforms:current_platform.is_npu",
        "vllm.platforms:current_platform.name",
    }


def test_the_table_has_everything_that_vllm_fl_takes_from_vllm() -> None:
    known = covered()
    uses = {(file, use) for file, tree in trees() for use in uses_in(tree)}
    assert len(uses) > 20, "the search itself finds what is there"
    assert sorted(f"{file}: {use}" for file, use in uses if use not in known) == []


def test_the_table_has_every_class_that_is_served_and_every_call_site_of_a_contract() -> None:
    known = covered()
    paths = {path for spec in LAYERS for path in spec.paths}
    paths |= {site.where for contract in CONTRACTS for site in contract.call_sites}
    assert len(paths) > 15
    assert sorted(path for path in paths if path not in known) == []


def test_the_table_has_every_attribute_of_a_layer_that_vllm_fl_reads() -> None:
    known = {name for entry in SURFACE for name in entry.path.partition(":")[2].split(".")}
    for entry in SURFACE:
        for check in entry.checks:
            check = check.check if isinstance(check, OnlySince) else check
            known |= set(getattr(check, "names", ()))
    read: set[tuple[str, str]] = set()
    for file in LAYER_FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "layer":
                read.add((file.name, node.attr))
            elif isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(layer, '"):
                read.add((file.name, ast.literal_eval(node.args[1])))
    assert {name for _, name in read} > {"weight", "head_size", "_forward_method"}
    assert sorted(f"{file}: {n}" for file, n in read if n not in known and n != "__dict__") == []


def test_every_entry_says_why_and_no_path_stands_there_twice_for_the_same() -> None:
    assert [entry.path for entry in SURFACE if not entry.why] == []
    pairs = [(entry.path, entry.why) for entry in SURFACE]
    assert len(pairs) == len(set(pairs))


def test_the_installed_vllm_has_all_that_vllm_fl_relies_on(installed: Source) -> None:
    assert failures(installed) == []


def test_a_method_that_the_installed_vllm_would_rename_is_missed(installed: Source) -> None:
    def read(name: str) -> str:
        return installed.text(name).replace("def init_device(", "def start_device(")

    renamed = Source(installed.version, installed.names, read, installed.aliases)
    entries = [e for e in SURFACE if e.path.endswith("WorkerWrapperBase.init_device")]
    assert [line.partition(" (")[0] for line in failures(renamed, entries)] == [
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device: missing: not there"
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.releases.audit", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_audits_wheels_and_fails_where_something_is_missing(tmp_path: Path) -> None:
    for release in RELEASES:
        name = release.package.replace("-", "_")
        wheel = tmp_path / f"{name}-{release.version}-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", "")
            archive.writestr("vllm/plugins/__init__.py", "DEFAULT_PLUGINS_GROUP = 'other'\n")
    done = run("--wheels", str(tmp_path), "--json")
    assert done.returncode == 1, done.stderr
    rows = {row["path"]: row for row in json.loads(done.stdout)}
    group = rows["vllm.plugins:DEFAULT_PLUGINS_GROUP"]
    assert group["why"] == "the group of the entry point `fl`"
    assert group["releases"] == {
        release.version: {
            "status": "changed", "found": "'other'", "at": "vllm/plugins/__init__.py:1",
        }
        for release in RELEASES
    }  # fmt: skip
    assert rows["vllm:LLM"]["releases"]["0.33.0"]["status"] == "missing"
    plain = run("--wheels", str(tmp_path))
    assert plain.returncode == 1
    assert re.fullmatch(r"\d+ entries, 5 releases: \d+ failures", plain.stdout.splitlines()[-1])


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("--wheels", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"audit-hooks: {tmp_path} has no wheel of vllm 0.25.1\n"
