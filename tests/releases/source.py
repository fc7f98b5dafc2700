# SPDX-License-Identifier: Apache-2.0
"""vLLM's sources as syntax trees, from a wheel, a folder or texts. Nothing of it is imported."""

from __future__ import annotations

import ast
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Definition", "Source", "parameters", "statements", "version_in"]

Function = ast.FunctionDef | ast.AsyncFunctionDef

_CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)[ \t]*\(([^)]*)\)", re.MULTILINE)
_AS = re.compile(r"\b(\w+)[ \t]+as[ \t]+(\w+)")
_EQUALS = re.compile(r"^(\w+)[ \t]*=[ \t]*(?:\w+\.)*(\w+)[ \t]*$", re.MULTILINE)


def version_in(text: str) -> tuple[int, ...]:
    """The first dotted number in a text, for comparisons: "vllm-0.25.1-cp38" -> (0, 25, 1)."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module or class body does, whatever `if`, `try` or `with`
    they stand in. What only a type checker sees, or only runs after an error, is left out."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
        elif not isinstance(node, Function | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))


def parameters(function: Function) -> list[str]:
    """A function's parameters as they are written, without annotations: "x", "residual=None",
    "*", "use_tqdm=True", "**kwargs"; `self` or `cls` is left out."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    found = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if spec.vararg is not None:
        found.append(f"*{spec.vararg.arg}")
    elif spec.kwonlyargs:
        found.append("*")
    found += [_parameter(*pair) for pair in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    if spec.kwarg is not None:
        found.append(f"**{spec.kwarg.arg}")
    return [name for name in found if name not in ("self", "cls")]


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """Something of vLLM, and where it stands.

    Attributes:
        module: the module that defines it, e.g. "vllm.config.vllm".
        name: its name there, e.g. "VllmConfig.compute_hash"; empty for the module itself.
        node: its syntax tree.
        file: its file inside the wheel.
    """

    module: str
    name: str
    node: ast.AST
    file: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)

    @property
    def at(self) -> str:
        """File and line."""
        return f"{self.file}:{getattr(self.node, 'lineno', 1)}"

    @property
    def path(self) -> str:
        """As in the table: "module:Name"."""
        return f"{self.module}:{self.name}" if self.name else self.module


class Source:
    """The sources of one release.

    Args:
        version: the release.
        names: every file, e.g. "vllm/envs.py".
        read: the text of one of them.
        aliases: for a "module:name" that is made at run time, the "module:Class" to read instead.
    """

    def __init__(
        self,
        version: str,
        names: Iterable[str],
        read: Callable[[str], str],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.version = version
        self.names = sorted(names)
        self.aliases = dict(aliases or {})
        self._known = frozenset(self.names)
        self._read = read
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._classes: dict[str, tuple[list[tuple[str, set[str]]], list[tuple[str, str]]]] = {}

    @classmethod
    def of_wheel(cls, wheel: Path, aliases: Mapping[str, str] | None = None) -> Source:
        """The sources inside a wheel, read from the archive as they are asked for."""
        archive = zipfile.ZipFile(wheel)
        names = [name for name in archive.namelist() if name.startswith("vllm/")]
        version = ".".join(map(str, version_in(wheel.name)))
        return cls(version, names, lambda name: archive.read(name).decode(), aliases)

    @classmethod
    def of_folder(
        cls, folder: Path, version: str, aliases: Mapping[str, str] | None = None
    ) -> Source:
        """The sources of an installed vLLM; `folder` holds the folder `vllm`."""
        files = (path for path in (folder / "vllm").rglob("*") if path.suffix in (".py", ".so"))
        names = [path.relative_to(folder).as_posix() for path in files]
        return cls(version, names, lambda name: (folder / name).read_text("utf-8"), aliases)

    @classmethod
    def of_texts(
        cls, version: str, texts: Mapping[str, str], aliases: Mapping[str, str] | None = None
    ) -> Source:
        """Sources given by hand: {"vllm/envs.py": "..."}."""
        return cls(version, texts, texts.__getitem__, aliases)

    def text(self, name: str) -> str:
        """A file's text."""
        if name not in self._texts:
            self._texts[name] = self._read(name)
        return self._texts[name]

    def file_of(self, module: str) -> str | None:
        """The file of a module, or None where the release has no such module."""
        path = module.replace(".", "/")
        found = [name for name in (f"{path}.py", f"{path}/__init__.py") if name in self._known]
        return found[0] if found else None

    def tree(self, module: str) -> ast.Module:
        """The syntax tree of a module that exists."""
        file = self.file_of(module)
        assert file is not None, module
        if file not in self._trees:
            with warnings.catch_warnings():  # vLLM's own, e.g. about escape sequences
                warnings.simplefilter("ignore")
                self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def find(self, path: str) -> Definition | None:
        """What "module:Name.member" is: imports, lazy attributes and base classes are followed."""
        path = self.aliases.get(path, path)
        module, _, dotted = path.partition(":")
        if self.file_of(module) is None:
            return None
        if not dotted:
            return self._define(module, "", self.tree(module))
        first, *rest = dotted.split(".")
        found = self._in_module(module, first, frozenset())
        for position, name in enumerate(rest, start=1):
            alias = self.aliases.get(f"{module}:{'.'.join([first, *rest][:position])}")
            found = self.find(alias) if alias is not None else found
            if found is None:
                return None
            found = (
                self.member(found, name)
                if found.name
                else self._in_module(found.module, name, frozenset())
            )
        return found

    def _define(self, module: str, name: str, node: ast.AST) -> Definition:
        file = self.file_of(module)
        assert file is not None, module
        return Definition(module, name, node, file)

    def _in_module(self, module: str, name: str, asked: frozenset[str]) -> Definition | None:
        here = f"{module}:{name}"
        if here in asked:
            return None
        if here in self.aliases:
            return self.find(self.aliases[here])
        asked |= {here}
        if self.file_of(module) is None:
            return None
        node = _bound(self.tree(module).body, name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(*_imports_of(module, self._is_package(module), node)[name], asked)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name):
            return self._in_module(module, node.value.id, asked) or self._define(module, name, node)
        if node is not None:
            return self._define(module, name, node)
        if self.file_of(f"{module}.{name}") is not None:
            return self._define(f"{module}.{name}", "", self.tree(f"{module}.{name}"))
        return self._lazy(module, name, asked)

    def _imported(self, module: str, name: str, asked: frozenset[str]) -> Definition | None:
        if not name:
            return self.find(module)
        return self._in_module(module, name, asked)

    def _lazy(self, module: str, name: str, asked: frozenset[str]) -> Definition | None:
        """What a module's `__getattr__` gives: an item of a dict that it reads, where
        ".module:Name" says what to import, or a name that it knows."""
        getter = _bound(self.tree(module).body, "__getattr__")
        if getter is None:
            return None
        words = {node.id for node in ast.walk(getter) if isinstance(node, ast.Name)}
        for node in statements(self.tree(module).body):
            if not isinstance(getattr(node, "value", None), ast.Dict):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not words & {target.id for target in targets if isinstance(target, ast.Name)}:
                continue
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if not isinstance(key, ast.Constant) or key.value != name:
                    continue
                if isinstance(value, ast.Constant) and ":" in str(value.value):
                    relative, _, attribute = str(value.value).partition(":")
                    return self._in_module(module + relative, attribute, asked)
                return self._define(module, name, value)
        known = {node.value for node in ast.walk(getter) if isinstance(node, ast.Constant)}
        return self._define(module, name, getter) if name in known else None

    def member(self, owner: Definition, name: str) -> Definition | None:
        """An attribute of a class, its own or inherited."""
        for cls in self.mro(owner):
            if isinstance(cls, Definition):
                node = _bound(getattr(cls.node, "body", ()), name)
                if node is not None:
                    return self._define(cls.module, f"{cls.name}.{name}", node)
        return None

    def owns(self, owner: Definition, name: str) -> bool:
        """Whether a class body itself binds a name."""
        return _bound(getattr(owner.node, "body", ()), name) is not None

    def bases(self, owner: Definition) -> list[Definition | str]:
        """The base classes; those outside of vLLM as they are written."""
        if not isinstance(owner.node, ast.ClassDef):
            return []
        found: list[Definition | str] = []
        for base in owner.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found.append(self._class_named(owner.module, base) or ast.unparse(base))
        return found

    def _class_named(self, module: str, expression: ast.expr) -> Definition | None:
        first, *rest = ast.unparse(expression).split(".")
        imported = self._all_imports(module).get(first)
        if imported is not None:
            found = self._imported(*imported, frozenset())
        else:
            found = self._in_module(module, first, frozenset()) or self._nested(module, first)
        for name in rest:
            if found is None or found.name:
                return None
            found = self._in_module(found.module, name, frozenset())
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None

    def _all_imports(self, module: str) -> dict[str, tuple[str, str]]:
        """Every import of a file, those inside functions too: name -> (module, name)."""
        if module not in self._imports:
            found: dict[str, tuple[str, str]] = {}
            for node in ast.walk(self.tree(module)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    found |= _imports_of(module, self._is_package(module), node)
            self._imports[module] = found
        return self._imports[module]

    def _is_package(self, module: str) -> bool:
        return (self.file_of(module) or "").endswith("/__init__.py")

    def _nested(self, module: str, name: str) -> Definition | None:
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._define(module, name, node)
        return None

    def mro(self, owner: Definition) -> list[Definition | str]:
        """Python's method resolution order. A class outside of vLLM counts as one without bases."""
        lines = [self.mro(base) if isinstance(base, Definition) else [base]
                 for base in self.bases(owner)]  # fmt: skip
        return [owner, *_merged([*lines, self.bases(owner)])]

    def subclasses(self, base: Definition) -> list[Definition]:
        """Every class of the release that has `base` among its bases, however far away."""
        known = {base.name.rpartition(".")[2]}
        found: dict[str, Definition] = {}
        while True:
            names = set(known)
            for file, (classes, renamed) in self._index().items():
                names |= {new for new, old in renamed if old in known}
                if any(known & bases for _, bases in classes):
                    names |= {cls.name for cls in self._inheriting(file, base, found)}
            if names == known:
                return [found[path] for path in sorted(found)]
            known = names

    def _inheriting(
        self, file: str, base: Definition, found: dict[str, Definition]
    ) -> list[Definition]:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        classes = [
            self._define(module, node.name, node)
            for node in ast.walk(self.tree(module))
            if isinstance(node, ast.ClassDef) and node is not base.node
        ]
        inheriting = [cls for cls in classes if base in self.mro(cls)]
        found.update({cls.path: cls for cls in inheriting})
        return inheriting

    def _index(self) -> dict[str, tuple[list[tuple[str, set[str]]], list[tuple[str, str]]]]:
        """Of each file what its text tells about classes: (name, words among its bases), and
        (new name, name) for imports and module variables. Parsing everything takes a minute."""
        if not self._classes:
            for file in self.names:
                if file.endswith(".py"):
                    text = self.text(file)
                    classes = [
                        (match[1], set(re.findall(r"\w+", match[2])))
                        for match in _CLASS.finditer(text)
                    ]
                    renamed = [(match[2], match[1]) for match in _AS.finditer(text)]
                    renamed += [(match[1], match[2]) for match in _EQUALS.finditer(text)]
                    self._classes[file] = classes, renamed
        return self._classes


def _bound(body: Iterable[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement of a body that binds a name: the one that counts."""
    found: ast.stmt | None = None
    for node in statements(body):
        if isinstance(node, Function | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names = [node.target.id] if isinstance(node.target, ast.Name) else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        else:
            continue
        # An annotation alone binds nothing where a value follows from elsewhere.
        alone = isinstance(node, ast.AnnAssign) and node.value is None
        if name in names and not (alone and found is not None):
            found = node
    return found


def _imports_of(
    module: str, package: bool, node: ast.Import | ast.ImportFrom
) -> dict[str, tuple[str, str]]:
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: (
                alias.name if alias.asname else alias.name.partition(".")[0],
                "",
            )
            for alias in node.names
        }
    origin = node.module or ""
    if node.level:
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + package]
        origin = ".".join([*kept, origin]).rstrip(".")
    return {alias.asname or alias.name: (origin, alias.name) for alias in node.names}


def _merged(lines: list[list[Definition | str]]) -> list[Definition | str]:
    """The C3 merge; an order that Python would refuse is taken as it comes."""
    order: list[Definition | str] = []
    while lines := [line for line in lines if line]:
        heads = [line[0] for line in lines]
        tails = [entry for line in lines for entry in line[1:]]
        chosen = next((head for head in heads if head not in tails), heads[0])
        order.append(chosen)
        lines = [[entry for entry in line if entry != chosen] for line in lines]
    return order
