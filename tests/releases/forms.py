# SPDX-License-Identifier: Apache-2.0
"""Which modules of a release have a forward that vllm_fl recognises: by the code that recognises
it in a worker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_fl.vllm_plugin.fusions.forms import QK_NORM_ROPE, forward_in, names_in

from .checks import Finding, in_range
from .source import Definition, Source

__all__ = ["OfForm", "Recognised"]

SPLITS = ".split(["
"""What every form of QK_NORM_ROPE does with its projection: other files are not parsed."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """A class whose forward is of a known form, and the first release in which it is."""

    path: str
    since: str | None = None


@dataclass(frozen=True, slots=True)
class OfForm:
    """The package has exactly these classes with a forward of a known form."""

    known: tuple[Recognised, ...]

    def look(self, source: Source, found: Definition) -> Finding:
        expected = {k.path for k in self.known if in_range(source.version, k.since, None)}
        there = set(recognised(source))
        wrong = [f"new: {path}" for path in sorted(there - expected)]
        wrong += [f"not recognised any more: {path}" for path in sorted(expected - there)]
        if wrong:
            return Finding("changed", "; ".join(wrong))
        return Finding("ok", ", ".join(path.partition(":")[2] for path in sorted(there)))


def recognised(source: Source) -> Iterator[str]:
    """The classes of a release, as "module:Class"."""
    for name in source.names:
        if not name.endswith(".py") or SPLITS not in source.text(name):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.walk(source.tree(module)):
            forward = forward_in(node) if isinstance(node, ast.ClassDef) else None
            if forward is not None and names_in(forward, QK_NORM_ROPE) is not None:
                assert isinstance(node, ast.ClassDef)
                yield f"{module}:{node.name}"
