# SPDX-License-Identifier: Apache-2.0
"""Checks of the functions that vllm_fl serves: what they take, and who has a name of their own for
them. What is served is read from `vllm_fl/vllm_plugin/functions`, which a bare Python cannot
import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .checks import Finding, verdict
from .source import Definition, Function, Source, parameters, statements

__all__ = ["ImportedByNameIn", "ServedFunction", "TakesAmong", "served_functions"]

FOLDER = Path(__file__).parents[2] / "vllm_fl/vllm_plugin/functions"


@dataclass(frozen=True, slots=True)
class ServedFunction:
    """As much of a `FunctionSpec` as its release must meet.

    Attributes:
        op: the op's name.
        path: "module:function" of vLLM.
        callers: the modules that are known to import it by name.
        parameters: those that the spec knows what to do with.
    """

    op: str
    path: str
    callers: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.path.partition(":")[2]


@cache
def served_functions() -> tuple[ServedFunction, ...]:
    """Every FunctionSpec of vllm_fl."""
    return tuple(spec for file in sorted(FOLDER.glob("*.py")) for spec in _specs_in(file))


def _specs_in(file: Path) -> Iterator[ServedFunction]:
    tree = ast.parse(file.read_text("utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "FunctionSpec"):
            continue
        given = {word.arg: word.value for word in node.keywords}
        mapping = functions[ast.unparse(given["arguments"])]
        callers = given.get("callers", ast.Tuple(elts=[]))
        callers = constants.get(ast.unparse(callers), callers)
        yield ServedFunction(
            op=ast.literal_eval(given["op"]),
            path=ast.literal_eval(given["path"]),
            callers=ast.literal_eval(callers),
            parameters=tuple(name.partition("=")[0] for name in parameters(mapping)),
        )


@dataclass(frozen=True, slots=True)
class TakesAmong:
    """A function whose parameters are all known, those that have a position in this order: with one
    that is not, vllm_fl leaves it native."""

    names: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        if not isinstance(found.node, Function):
            return Finding("changed", f"a {type(found.node).__name__}, expected a function")
        there = parameters(found.node)
        names = [name.partition("=")[0] for name in there]
        placed = names.index("*") if "*" in names else len(names)
        known = names[:placed] == list(self.names[:placed]) and set(names) <= {"*", *self.names}
        return verdict(known, f"({', '.join(there)})")


@dataclass(frozen=True, slots=True)
class ImportedByNameIn:
    """A function that no module but these imports under a name that outlives the import, and they
    under its own name."""

    modules: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        name = found.name
        there = {}
        for file in source.names:
            if file.endswith(".py") and name in source.text(file) and file != found.file:
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                for bound in _imported(source, module, name):
                    if source.find(f"{module}:{bound}") == found:
                        there[module] = bound
        wrong = [module for module in there if module not in self.modules]
        renamed = [f"{module} as {bound}" for module, bound in there.items() if bound != name]
        if wrong or renamed:
            return Finding("changed", f"imported by {', '.join(wrong + renamed)}")
        return Finding("ok", f"imported by {', '.join(there) or 'nobody'}")


def _imported(source: Source, module: str, name: str) -> list[str]:
    """The names that a module's own imports give to `name` of another module."""
    return [
        alias.asname or alias.name
        for node in statements(source.tree(module).body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == name
    ]
