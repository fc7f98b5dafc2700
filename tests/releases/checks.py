# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a definition of vLLM. Every check says what it found, right or wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal, Protocol

from .source import Definition, Function, Source, parameters, statements, version_in

__all__ = ["Check", "Entry", "Finding", "Status"]

Status = Literal["ok", "missing", "changed", "absent"]
"""absent: it is not there, and this release need not have it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check, or a whole entry, came to.

    Attributes:
        status: see `Status`.
        text: what was found.
        at: file and line of it.
    """

    status: Status
    text: str = ""
    at: str = ""


class Check(Protocol):
    """One question about a definition that exists."""

    def look(self, source: Source, found: Definition) -> Finding:
        """Answer it for one release."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing of vLLM that vllm_fl relies on.

    Attributes:
        path: "module:Name.member", as vllm_fl writes it.
        why: what for.
        checks: what must be true of it, beside that it exists.
        since: the first release that must have it; None means all.
        gone: the first release that need not have it any more.
    """

    path: str
    why: str
    checks: tuple[Check, ...] = ()
    since: str | None = None
    gone: str | None = None

    def look(self, source: Source) -> Finding:
        """Audit it in one release."""
        found = source.find(self.path)
        if found is None:
            if in_range(source.version, self.since, self.gone):
                return Finding("missing", "not there")
            return Finding("absent")
        findings = [check.look(source, found) for check in self.checks]
        wrong = [finding for finding in findings if finding.status != "ok"]
        text = "; ".join(finding.text for finding in wrong or findings if finding.text)
        at = found.at if self.path.partition(":")[2] else found.file
        return Finding(wrong[0].status if wrong else "ok", text, at)


def in_range(version: str, since: str | None, gone: str | None) -> bool:
    """Whether a release is `since` or later, and before `gone`."""
    here = version_in(version)
    return (since is None or version_in(since) <= here) and (
        gone is None or here < version_in(gone)
    )


def verdict(right: bool, text: str, *, otherwise: Status = "changed") -> Finding:
    """A finding from one truth."""
    return Finding("ok" if right else otherwise, text)


@dataclass(frozen=True, slots=True)
class Kind:
    """It is a "class", a "function" (methods count), or a "value"."""

    kind: Literal["class", "function", "value"]

    def look(self, source: Source, found: Definition) -> Finding:
        kinds = {
            "class": ast.ClassDef,
            "function": Function,
            "value": ast.Assign | ast.AnnAssign,
        }
        if isinstance(found.node, kinds[self.kind]):
            return Finding("ok")
        return Finding("changed", f"a {type(found.node).__name__}, expected a {self.kind}")


@dataclass(frozen=True, slots=True)
class Takes:
    """A function with exactly these parameters, defaults included."""

    parameters: str

    def look(self, source: Source, found: Definition) -> Finding:
        if not isinstance(found.node, Function):
            return Kind("function").look(source, found)
        there = ", ".join(parameters(found.node))
        return verdict(there == self.parameters, f"({there})")


@dataclass(frozen=True, slots=True)
class Accepts:
    """A function that can be called with these arguments and no others.

    Attributes:
        names: their names.
        first: how many of them are given by position.
        rest: a function that it gives any further ones to.
    """

    names: tuple[str, ...]
    first: int = 0
    rest: str | None = None

    def look(self, source: Source, found: Definition) -> Finding:
        if not isinstance(found.node, Function):
            return Kind("function").look(source, found)
        there = parameters(found.node)
        names = [name.partition("=")[0] for name in there if not name.startswith("*")]
        lacking = [name for name in self.names if name not in names]
        if lacking:
            return Finding("changed", f"no parameter {', '.join(lacking)}: ({', '.join(there)})")
        needed = [name for name in there if "=" not in name and not name.startswith("*")]
        more = [name for name in needed if name not in self.names]
        if more:
            return Finding("changed", f"also needs {', '.join(more)}: ({', '.join(there)})")
        leading = tuple(names[: self.first])
        if leading != self.names[: self.first]:
            return Finding("changed", f"begins with ({', '.join(leading)})")
        if self.rest is not None and not self._passes_on(found.node):
            return Finding("changed", f"gives no further arguments to {self.rest}")
        rest = (f"others go to {self.rest}",) if self.rest else ()
        return Finding("ok", f"takes {', '.join((*self.names, *rest)) or 'no argument'}")

    def _passes_on(self, function: Function) -> bool:
        rest = function.args.kwarg
        return rest is not None and any(
            ast.unparse(call.func) == self.rest
            and any(word.arg is None and ast.unparse(word.value) == rest.arg
                    for word in call.keywords)
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnlySince:
    """A check of what stands under a name since a release; before it, that was something else,
    which vllm_fl leaves alone."""

    version: str
    check: Check
    before: str

    def look(self, source: Source, found: Definition) -> Finding:
        if not in_range(source.version, self.version, None):
            return Finding("ok", self.before)
        return self.check.look(source, found)


@dataclass(frozen=True, slots=True)
class Sets:
    """A method that gives `self` these attributes."""

    names: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        there = {name for name, _ in assigned(found.node)}
        lacking = [name for name in self.names if name not in there]
        if lacking:
            return Finding("missing", f"does not set {', '.join(lacking)}")
        return Finding("ok", f"sets {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class Has:
    """A class with these attributes, fields or members, its own or inherited."""

    names: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        lacking = [name for name in self.names if source.member(found, name) is None]
        if lacking:
            return Finding("missing", f"no {', '.join(lacking)}")
        return Finding("ok", f"has {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class FieldsAmong:
    """A class none of whose annotated fields is unknown."""

    names: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        there = [
            node.target.id
            for node in statements(getattr(found.node, "body", ()))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        unknown = [name for name in there if name not in self.names]
        if unknown:
            return Finding("changed", f"new: {', '.join(unknown)}")
        return verdict(bool(there), ", ".join(there) or "no fields")


@dataclass(frozen=True, slots=True)
class Does:
    """Code that stands somewhere inside; `_` stands for any expression."""

    code: str

    def look(self, source: Source, found: Definition) -> Finding:
        if lines_of(self.code, found.node):
            return Finding("ok", self.code)
        return Finding("changed", f"nowhere in it: {self.code}")


@dataclass(frozen=True, slots=True)
class InOrder:
    """Code that stands inside, one after the other."""

    codes: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        lines = [min(lines_of(code, found.node), default=0) for code in self.codes]
        lacking = [code for code, line in zip(self.codes, lines, strict=True) if not line]
        if lacking:
            return Finding("changed", f"nowhere in it: {'; '.join(lacking)}")
        return verdict(lines == sorted(lines), " then ".join(self.codes))


@dataclass(frozen=True, slots=True)
class Equals:
    """A variable with this value."""

    value: Any

    def look(self, source: Source, found: Definition) -> Finding:
        there = getattr(found.node, "value", None)
        text = ast.unparse(there) if there is not None else "no value"
        return verdict(text == repr(self.value), text)


@dataclass(frozen=True, slots=True)
class HasKeys:
    """A dict literal with these keys among its own."""

    keys: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        there = getattr(found.node, "value", None)
        if not isinstance(there, ast.Dict):
            return Finding("changed", "not a dict literal")
        keys = {key.value for key in there.keys if isinstance(key, ast.Constant)}
        lacking = [key for key in self.keys if key not in keys]
        if lacking:
            return Finding("missing", f"no {', '.join(lacking)}")
        return Finding("ok", f"a dict with {', '.join(self.keys)}" if self.keys else "a dict")


@dataclass(frozen=True, slots=True)
class IsA:
    """A class that inherits from another one."""

    path: str

    def look(self, source: Source, found: Definition) -> Finding:
        base = source.find(self.path)
        text = f"inherits {self.path.partition(':')[2]}"
        return verdict(base in source.mro(found), text if base else f"{self.path} is not there")


@dataclass(frozen=True, slots=True)
class Decorated:
    """A class or function under this decorator."""

    code: str

    def look(self, source: Source, found: Definition) -> Finding:
        there = [ast.unparse(node) for node in getattr(found.node, "decorator_list", [])]
        return verdict(self.code in there, ", ".join(f"@{code}" for code in there) or "bare")


@dataclass(frozen=True, slots=True)
class Built:
    """A class whose `__init__`, its own or inherited, runs when it is built."""

    def look(self, source: Source, found: Definition) -> Finding:
        init = source.member(found, "__init__")
        if init is None:
            return Finding("missing", "no __init__")
        owner = init.name.rpartition(".")[0]
        return Finding("ok", "own __init__" if owner == found.name else f"{owner}.__init__")


@dataclass(frozen=True, slots=True)
class NamesClass:
    """A string that is the dotted path of a class which exists."""

    def look(self, source: Source, found: Definition) -> Finding:
        value = getattr(getattr(found.node, "value", None), "value", None)
        module, _, name = str(value).rpartition(".")
        there = source.find(f"{module}:{name}") if module else None
        return verdict(there is not None and isinstance(there.node, ast.ClassDef), str(value))


@dataclass(frozen=True, slots=True)
class Files:
    """The package brings a file that matches a pattern."""

    pattern: str

    def look(self, source: Source, found: Definition) -> Finding:
        folder = found.file.rpartition("/")[0]
        there = [name for name in source.names if fnmatch(name, f"{folder}/{self.pattern}")]
        names = ", ".join(name.rpartition("/")[2] for name in there)
        return verdict(bool(there), names or f"no {self.pattern}", otherwise="missing")


@dataclass(frozen=True, slots=True)
class MentionedOnlyIn:
    """A word that stands in these files and in no other."""

    word: str
    files: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        there = [
            name
            for name in source.names
            if name.endswith(".py") and self.word in source.text(name) and name not in self.files
        ]
        text = f"{self.word} stands in {', '.join(there)} too" if there else ""
        return verdict(not there, text or f"{self.word} is not used elsewhere")


def lines_of(code: str, inside: ast.AST) -> list[int]:
    """The lines where code stands, compared as syntax; `_` stands for any expression."""
    statement = ast.parse(code).body[0]
    pattern = statement.value if isinstance(statement, ast.Expr) else statement
    return [
        getattr(node, "lineno", 1)
        for node in ast.walk(inside)
        if type(node) is type(pattern) and _same(pattern, node)
    ]


def _same(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return isinstance(node, ast.expr)
    if isinstance(pattern, ast.AST):
        fields = [name for name in pattern._fields if name not in ("ctx", "type_comment", "kind")]
        return type(pattern) is type(node) and all(
            _same(getattr(pattern, name, None), getattr(node, name, None)) for name in fields
        )
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(map(_same, pattern, node))
    return bool(pattern == node)


def assigned(function: ast.AST) -> Iterator[tuple[str, int]]:
    """The attributes that a method gives `self`, and the lines where."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                targets += target.elts if isinstance(target, ast.Tuple) else [target]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer":
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant):
                yield str(name.value), node.lineno
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, target.lineno


def own_functions(cls: Definition) -> dict[str, Function]:
    """The functions that a class body defines."""
    body = getattr(cls.node, "body", ())
    return {node.name: node for node in statements(body) if isinstance(node, Function)}
