# SPDX-License-Identifier: Apache-2.0
"""Checks of the layers that vllm_fl serves: what their forwards take, and which subclasses they
have. The rule of `vllm_fl.vllm_plugin.layers.serve` about subclasses, read from the sources."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .checks import Finding, assigned, in_range, own_functions, verdict
from .source import Definition, Source, parameters

__all__ = ["DispatchesTo", "ForwardsTake", "KeptBySubclasses", "Known", "Subclasses", "own_forward"]

SERVE = Path(__file__).parents[2] / "vllm_fl/vllm_plugin/layers/serve.py"

CUSTOM_OP = "CustomOp"
"""The class whose forwards only pass on to each other."""


@cache
def forwards() -> tuple[str, ...]:
    """`FORWARDS` of serve.py, which a bare Python cannot import."""
    for node in ast.parse(SERVE.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FORWARDS":
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{SERVE} does not define FORWARDS")


@dataclass(frozen=True, slots=True)
class DispatchesTo:
    """A method that returns one of these forwards, all of which vllm_fl knows, or the result of
    a call on one."""

    names: tuple[str, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        returned = [node.value for node in ast.walk(found.node) if isinstance(node, ast.Return)]
        names = sorted(
            {
                node.attr.removeprefix("forward_")
                for value in returned
                if value is not None
                for node in ast.walk(value)
                if isinstance(node, ast.Attribute) and node.attr.startswith("forward_")
            }
        )
        without = [
            ast.unparse(value)
            for value in returned
            if value is not None and "self.forward_" not in ast.unparse(value)
        ]
        unknown = [f"forward_{name}" for name in names if name not in forwards()]
        if unknown or without:
            return Finding("changed", f"returns {', '.join(unknown + without)}")
        text = f"returns forward_ {', '.join(names) or '(none)'}"
        return verdict(names == sorted(self.names), text)


@dataclass(frozen=True, slots=True)
class ForwardsTake:
    """A class all of whose forwards take exactly these parameters."""

    parameters: str

    def look(self, source: Source, found: Definition) -> Finding:
        there: dict[str, str] = {}
        for cls in reversed(source.mro(found)):
            if isinstance(cls, Definition) and cls.name != CUSTOM_OP:
                for name, function in own_functions(cls).items():
                    if name == "forward" or name.removeprefix("forward_") in forwards():
                        there[name] = ", ".join(parameters(function))
        wrong = [f"{name}({taken})" for name, taken in there.items() if taken != self.parameters]
        if wrong or not there:
            return Finding("changed", ", ".join(wrong) or "no forward of its own")
        return Finding("ok", f"({self.parameters})")


@dataclass(frozen=True, slots=True)
class KeptBySubclasses:
    """A method that no subclass of its class overrides."""

    def look(self, source: Source, found: Definition) -> Finding:
        owner, _, name = found.name.rpartition(".")
        base = source.find(f"{found.module}:{owner}")
        assert base is not None
        subclasses = source.subclasses(base)
        wrong = [cls.path for cls in subclasses if source.owns(cls, name)]
        if wrong:
            return Finding("changed", f"{', '.join(wrong)} overrides it")
        return Finding("ok", f"kept by {', '.join(c.name for c in subclasses) or 'no subclass'}")


@dataclass(frozen=True, slots=True)
class Known:
    """A subclass of a served layer, and what becomes of it.

    Attributes:
        path: "module:Class".
        becomes: "served", or what it has of its own, as `own_forward` says.
        since: the first release that has it.
        gone: the first release without it.
    """

    path: str
    becomes: str = "served"
    since: str | None = None
    gone: str | None = None


@dataclass(frozen=True, slots=True)
class Subclasses:
    """A class whose constructor is wrapped, and which has exactly the known subclasses.

    Attributes:
        known: the table.
        served: the class that is served, where it is one of them; else it is the class itself.
        once: the attributes that vllm_fl reads only when the wrapped `__init__` has ended.
    """

    known: tuple[Known, ...] = ()
    served: str | None = None
    once: tuple[str, ...] = ()

    def look(self, source: Source, found: Definition) -> Finding:
        base = found if self.served is None else source.find(self.served)
        if base is None:
            return Finding("missing", f"{self.served} is not there")
        expected = {
            known.path: known.becomes
            for known in self.known
            if in_range(source.version, known.since, known.gone)
        }
        subclasses = {cls.path: cls for cls in source.subclasses(found) if cls != base}
        there = {path: own_forward(source, cls, base) for path, cls in subclasses.items()}
        wrong = [f"new: {path} ({there[path]})" for path in sorted(there.keys() - expected.keys())]
        wrong += [f"not there: {path}" for path in sorted(expected.keys() - there.keys())]
        wrong += [
            f"{path}: {there[path]}, expected {expected[path]}"
            for path in sorted(there.keys() & expected.keys())
            if there[path] != expected[path]
        ]
        for path, cls in subclasses.items():
            if there[path] == "served" and (text := self._unfinished(source, cls, found)):
                wrong.append(f"{path} {text}")
        return Finding("changed", "; ".join(wrong)) if wrong else Finding("ok", _summary(there))

    def _unfinished(self, source: Source, cls: Definition, wrapped: Definition) -> str:
        """Why what is read once is not right yet when the wrapped `__init__` ends."""
        order = source.mro(cls)
        for owner in order[: order.index(wrapped)]:
            init = own_functions(owner).get("__init__") if isinstance(owner, Definition) else None
            if init is None:
                continue
            calls = [
                node.lineno
                for node in ast.walk(init)
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__init__")
            ]
            if not calls:
                return "does not call its base's __init__"
            names = (*self.once, "_forward_method")
            after = {name for name, line in assigned(init) if name in names and line > min(calls)}
            if after:
                return f"sets {', '.join(sorted(after))} after its base's __init__"
        return ""


def own_forward(source: Source, cls: Definition, base: Definition) -> str:
    """ "served", or what a class has of its own; the rule of `serve._own_forward`."""
    for suffix in (*forwards(), "static"):
        name = f"forward_{suffix}"
        if source.member(cls, name) != source.member(base, name):
            return f"own {name}"
    order = source.mro(cls)
    if base not in order:
        return f"no {base.name}"
    for owner in order[: order.index(base)]:
        if not isinstance(owner, Definition) or base not in source.mro(owner):
            continue  # a mixin beside the served class can only pass on to it
        if source.owns(owner, "forward"):
            return "own forward"
    return "served"


def _summary(there: dict[str, str]) -> str:
    if not there:
        return "no subclass"
    by_kind: dict[str, list[str]] = {}
    for path, becomes in there.items():
        by_kind.setdefault(becomes, []).append(path.partition(":")[2])
    return "; ".join(
        f"{kind}: {', '.join(by_kind[kind])}" for kind in sorted(by_kind, reverse=True)
    )
