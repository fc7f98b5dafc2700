# SPDX-License-Identifier: Apache-2.0
"""Finds and runs what registers implementations: built-ins, entry points, named modules."""

from __future__ import annotations

import functools
import importlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import __version__
from .builtin_ops import BUILTIN_MODULES
from .errors import PluginError, RegistrationError, did_you_mean
from .log import logger
from .registry import OpRegistry
from .types import Origin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ENTRY_POINT_GROUP", "PluginRecord", "discover"]

ENTRY_POINT_GROUP = "vllm_fl.plugin"
REGISTRARS = ("register_builtins", "vllm_fl_register", "register")


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin.

    Attributes:
        name: the entry point's or module's name.
        source: "builtin", "entry_point" or "module".
        value: what was loaded, e.g. "vllm_fl_acme:register_builtins".
        package: the distribution it came from, where known.
        version: that distribution's version, where known.
        seconds: how long import and registration took.
        implementations: how many it registered.
        undeclared: ops it registered for that nobody declared.
        error: one line, or None.
        traceback: the whole story of the error, or None.
    """

    name: str
    source: str
    value: str
    package: str
    version: str
    seconds: float
    implementations: int = 0
    undeclared: tuple[str, ...] = ()
    error: str | None = None
    traceback: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it registered without an error."""
        return self.error is None

    def strict_error(self) -> PluginError:
        """What strict mode raises for a failure."""
        origin = Origin(self.source, self.name, self.package, self.version)
        return PluginError(f"{origin} failed and strict mode is on: {self.error}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"undeclared": list(self.undeclared)}


@dataclass(frozen=True, slots=True)
class _Plugin:
    origin: Origin
    value: str
    load: Callable[[], Any]


def discover(
    registry: OpRegistry,
    plugin_modules: Iterable[str] = (),
    *,
    strict: bool = False,
    watch: Callable[[Origin], str | None] = lambda origin: None,
) -> tuple[PluginRecord, ...]:
    """Run every plugin against the registry, in order, each all or nothing.

    Args:
        plugin_modules: the modules of VLLM_FL_PLUGIN_MODULES.
        strict: raise on the first failure, and refuse implementations of undeclared ops.
        watch: is told of each plugin before it is loaded; a text that it returns is the reason
            for leaving the plugin out.

    Raises:
        PluginError: under strict, from the plugin's own exception.
    """
    records: list[PluginRecord] = []
    seen: list[Callable[[OpRegistry], Any]] = []
    for plugin in _plugins(plugin_modules):
        refusal = watch(plugin.origin)
        if refusal is not None:
            plugin = replace(plugin, load=functools.partial(_refuse, refusal))
        records.append(_run(registry, plugin, seen, strict=strict))
    return tuple(records)


def _plugins(plugin_modules: Iterable[str]) -> Iterator[_Plugin]:
    from importlib.metadata import entry_points  # 17 ms, a third of importing vllm_fl.dispatch

    for module in BUILTIN_MODULES:
        origin = Origin("builtin", module, "vllm-fl", __version__)
        yield _Plugin(origin, module, _importer(module))
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        package, version = _distribution_of(entry)
        yield _Plugin(Origin("entry_point", entry.name, package, version), entry.value, entry.load)
    for module in plugin_modules:
        yield _Plugin(Origin("module", module), module, _importer(module))


def _distribution_of(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the package; empty where its METADATA cannot be read."""
    if entry.dist is None:
        return "", ""
    try:
        metadata = entry.dist.metadata
        return metadata["Name"] or "", metadata["Version"] or ""
    except Exception:  # what a damaged installation raises differs between Python versions
        return "", ""


def _refuse(reason: str) -> Any:
    raise PluginError(reason)


def _importer(module: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(module)


def _run(
    registry: OpRegistry,
    plugin: _Plugin,
    seen: list[Callable[[OpRegistry], Any]],
    *,
    strict: bool,
) -> PluginRecord:
    origin = plugin.origin
    start = time.perf_counter()
    before = _implementations_of(registry, origin)
    undeclared: tuple[str, ...] = ()
    error: BaseException | None = None
    try:
        with registry.batch(origin):
            registrar = _registrar(plugin.load(), plugin.value)
            if registrar not in seen:  # an entry point named again as a module
                registrar(registry)
                seen.append(registrar)
            undeclared = _undeclared_of(registry, origin)
            if strict and undeclared:
                raise RegistrationError(_undeclared_text(registry, undeclared))
    except (Exception, SystemExit) as caught:
        error = caught
    record = PluginRecord(
        name=origin.name,
        source=origin.source,
        value=plugin.value,
        package=origin.package,
        version=origin.version,
        seconds=time.perf_counter() - start,
        implementations=_implementations_of(registry, origin) - before,
        undeclared=() if error is not None else undeclared,
        error=None if error is None else f"{type(error).__name__}: {error}",
        traceback=None if error is None else "".join(traceback.format_exception(error)),
    )
    if error is not None:
        if strict:
            raise record.strict_error() from error
        logger.error("%s failed and registered nothing: %s", origin, record.error)
        logger.debug("%s", record.traceback)
    for op_name in record.undeclared:
        logger.warning("%s: %s", origin, _undeclared_text(registry, (op_name,)))
    return record


def _registrar(target: Any, value: str) -> Callable[[OpRegistry], Any]:
    for name in REGISTRARS:
        candidate = getattr(target, name, None)
        if callable(candidate):
            return candidate  # type: ignore[no-any-return]
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise RegistrationError(
        f"{value} is neither callable nor has one of {', '.join(REGISTRARS)}; "
        "expected a function f(registry), or a module or object with one of these"
    )


def _implementations_of(registry: OpRegistry, origin: Origin) -> int:
    return sum(1 for _ in _registered_by(registry, origin))


def _undeclared_of(registry: OpRegistry, origin: Origin) -> tuple[str, ...]:
    declared = registry.snapshot().declarations
    ops = {op for op in _registered_by(registry, origin) if op not in declared}
    return tuple(sorted(ops))


def _registered_by(registry: OpRegistry, origin: Origin) -> Iterator[str]:
    for op_name, impls in registry.snapshot().impls_by_op.items():
        for impl in impls:
            if impl.origin is not None and (impl.origin.source, impl.origin.name) == (
                origin.source,
                origin.name,
            ):
                yield op_name


def _undeclared_text(registry: OpRegistry, op_names: tuple[str, ...]) -> str:
    declared = registry.snapshot().declarations
    return "; ".join(
        f"op '{name}' is not declared, so its implementations are unchecked; declare it with "
        f"registry.declare(OpSignature.parse(...)).{did_you_mean(name, declared)}"
        for name in op_names
    )
