# SPDX-License-Identifier: Apache-2.0
"""What holds for every file of the package, read from its syntax tree."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_fl

ROOT = Path(vllm_fl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT = {
    "": {"dispatch"},  # the files of the top folder
    "dispatch": set(),
    "ops": {"dispatch"},
    "backends": {"dispatch", "ops"},
    "testing": {"dispatch", "ops", "backends"},
    "vllm_plugin": {"dispatch", "ops", "backends"},
    "cli": {"dispatch", "ops", "backends", "testing", "vllm_plugin"},
}
"""Package to the others that it may import; every one may import the top folder's files."""

LINES = 500
HEAVY = {"torch", "vllm", "triton", "flag_gems", "torch_npu"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return "" if path.parent == ROOT else path.relative_to(ROOT).parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_by(path: Path, nodes: Iterator[ast.AST] | list[ast.AST]) -> Iterator[str]:
    """Dotted names of what the nodes import, relative ones made absolute."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported, `if TYPE_CHECKING` aside."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_module_level(child)


every_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def test_the_files_are_found() -> None:
    assert len(FILES) > 40
    assert {package_of(path) for path in FILES} <= set(MAY_IMPORT)


@every_file
def test_imports_point_one_way(path: Path) -> None:
    own = package_of(path)
    found = set()
    for name in imported_by(path, list(ast.walk(tree_of(path)))):
        parts = name.split(".")
        if parts[0] != "vllm_fl" or len(parts) < 2:
            continue
        package = parts[1] if (ROOT / parts[1]).is_dir() else ""
        found.add(package)
    assert found - {"", own} <= MAY_IMPORT[own], f"{name_of(path)} imports {sorted(found)}"


@every_file
def test_only_the_plugin_imports_vllm_at_module_level(path: Path) -> None:
    names = imported_by(path, list(at_module_level(tree_of(path))))
    found = {name.partition(".")[0] for name in names}
    if package_of(path) != "vllm_plugin":
        assert "vllm" not in found
    if package_of(path) in ("", "dispatch", "cli"):
        assert not found & HEAVY


def test_the_dispatch_core_and_the_contracts_import_nothing_heavy() -> None:
    program = (
        "import sys, vllm_fl, vllm_fl.types, vllm_fl.dispatch, vllm_fl.cli.main\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


READS_ENVIRONMENT = {"dispatch/config.py"}
SETS_DEFAULTS = {"cli/demo.py"}


@every_file
def test_only_the_configuration_reads_our_environment_variables(path: Path) -> None:
    if name_of(path) in READS_ENVIRONMENT:
        return
    found = list(uses_of_environ(tree_of(path)))
    if name_of(path) in SETS_DEFAULTS:
        found = [(how, key) for how, key in found if how != "setdefault"]
    # A key that is computed could be any.
    assert [use for use in found if use[1] is None or use[1].startswith("VLLM_FL_")] == []


def uses_of_environ(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(how, key) for each use of os.environ or os.getenv; the key is None where it is not
    written there as text."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (("import", None) for a in node.names if a.name in ("environ", "getenv"))
        if not isinstance(node, ast.Attribute) or node.attr not in ("environ", "getenv"):
            continue
        use = parents[node]
        if isinstance(use, ast.Subscript):
            yield "[]", text_of(use.slice)
        elif isinstance(use, ast.Compare):
            yield "in", text_of(use.left)
        elif isinstance(use, ast.Attribute):
            call = parents[use]
            yield use.attr, text_of(call.args[0]) if isinstance(call, ast.Call) else None
        elif isinstance(use, ast.Call) and use.func is node:
            yield "getenv", text_of(use.args[0])
        else:
            yield "whole", None


def text_of(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_the_search_for_environment_variables_finds_each_way_to_read_one() -> None:
    program = """
import os
from os import environ
os.environ["A"]
os.environ.get("B", "")
os.getenv("C")
"D" in os.environ
dict(os.environ)
os.environ.get(name)
"""
    assert sorted(uses_of_environ(ast.parse(program)), key=repr) == [
        ("[]", "A"),
        ("get", "B"),
        ("get", None),
        ("getenv", "C"),
        ("import", None),
        ("in", "D"),
        ("whole", None),
    ]


@every_file
def test_the_license_is_in_the_first_line(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first == "# SPDX-License-Identifier: Apache-2.0"


@every_file
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


@every_file
def test_a_module_has_what_its_all_names(path: Path) -> None:
    module = importlib.import_module(module_of(path))
    exported = getattr(module, "__all__", ())
    assert len(set(exported)) == len(exported)
    assert [name for name in exported if not hasattr(module, name)] == []


@every_file
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = tree_of(path)
    exported = getattr(importlib.import_module(module_of(path)), "__all__", None)
    missing = ["the module"] if ast.get_docstring(tree) is None else []
    for node in definitions(tree):
        if exported is not None and node.name not in exported:
            continue
        if ast.get_docstring(node) is None:
            missing.append(node.name)
        # What a Protocol asks for is told by its own docstring.
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            missing += [
                f"{node.name}.{method.name}"
                for method in definitions(node)
                if ast.get_docstring(method) is None
            ]
    assert missing == []


def definitions(
    node: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The public functions and classes that a module or class defines itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not (
            child.name.startswith("_")
        ):
            yield child
