# SPDX-License-Identifier: Apache-2.0
"""Serving a function: once the model is loaded its op is bound, and if anything but vLLM's own
code won, the attributes under which callers look the function up are pointed at it.

A function that stays native is not touched. One that is served is listed in the route table from
its first call on: most models call few of them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ...dispatch.binding import Binding, annotate
from ...dispatch.default import get_default_manager
from ...dispatch.log import logger
from .. import hooks
from ..compile import EAGER
from ..layers.serve import Asked, ServedOp, bind_served

__all__ = ["FunctionSpec", "ServedFunction", "bind", "hook_module", "records", "release"]


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """How one function of vLLM is served.

    Attributes:
        op: the op that does what the function does; also its name in the OOT lists.
        path: "module:function", where vLLM defines it.
        arguments: takes what vLLM's function takes, in every release, and returns the op's
            positional arguments, or None for a call that is vLLM's own business.
        callers: modules that import it by name, and so have an attribute of their own; those
            that a release lacks are skipped.
        writes: the op's arguments that vLLM's function writes in place of returning anything.
        donate: vLLM's function may write its arguments, so another implementation may.
    """

    op: str
    path: str
    arguments: Callable[..., tuple[Any, ...] | None]
    callers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    donate: bool = False

    @property
    def module_name(self) -> str:
        """Where vLLM defines it."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        """Its name there, and in the callers."""
        return self.path.partition(":")[2]


@dataclass(slots=True, eq=False)
class ServedFunction:
    """What was decided for one function.

    Attributes:
        spec: which one.
        ops: its op, alone.
        native: vLLM's own function.
        mode: "eager": a compiler traces none of the callers.
        fn: what the replacement calls; None is vLLM's own.
        replacement: what callers find in place of vLLM's own function, if it is served.
        hooks: the attributes that hold it.
        called: whether vLLM has called it.
    """

    spec: FunctionSpec
    ops: tuple[ServedOp]
    native: Any
    mode: str = EAGER
    fn: Callable[..., Any] | None = None
    replacement: Callable[..., Any] | None = None
    hooks: list[hooks.Hook] = field(default_factory=list)
    called: bool = False

    @property
    def replaced(self) -> bool:
        """Whether somebody pointed every one of its attributes elsewhere since."""
        return bool(self.hooks) and not any(hook.in_place for hook in self.hooks)

    @property
    def listed(self) -> bool:
        """Whether the route table has it: it was called, or stays native."""
        return self.called or self.replacement is None

    def set_counting(self, on: bool) -> None:
        """Swap the bound function for a counting one, or back."""
        (served,) = self.ops
        if served.binding is not None and self.fn is not None:
            traced = served.binding.traced
            self.call(traced(served.count) if on and traced else served.binding.fn)

    def call(self, fn: Callable[..., Any]) -> None:
        """Call this one from now on; the first call is noted."""

        def first(*args: Any) -> Any:
            self.called, self.fn = True, fn
            return fn(*args)

        self.fn = fn if self.called else first

    def install(self, module: ModuleType) -> None:
        """Point a module's attribute at the op, unless it is somebody else's by now."""
        name = self.spec.name
        present = vars(module).get(name)
        if present is not self.native and present is not self.replacement:
            if present is not None:  # this release's caller may not have it
                owner = getattr(present, "__module__", "somebody else")
                logger.info("%s.%s is %s's; left as it is", module.__name__, name, owner)
            return
        hook = hooks.install(
            module, name, lambda _: self.replacement, purpose=f"serve {self.spec.op}"
        )
        if hook not in self.hooks:
            self.hooks.append(hook)


records: list[ServedFunction] = []
"""The functions of this process that were looked at, since the last model was loaded."""

_specs: list[FunctionSpec] = []
"""Those to serve; empty until a model is loaded."""


def bind(specs: tuple[FunctionSpec, ...]) -> None:
    """Decide for every function whose module is there, and serve those that another
    implementation won. Those whose module is imported later follow then."""
    release()
    _specs[:] = specs
    for spec in specs:
        for module_name in (spec.module_name, *spec.callers):
            module = sys.modules.get(module_name)
            if module is not None:
                _hook(spec, module)


def release() -> None:
    """Give every function back. Who still holds a replacement calls vLLM's own with it."""
    _specs.clear()
    for record in records:
        record.fn = None
        for hook in reversed(record.hooks):
            hooks.uninstall(hook)
    records.clear()


def hook_module(module: ModuleType) -> None:
    """Serve what a module that was just imported defines or calls."""
    for spec in _specs:
        if module.__name__ in (spec.module_name, *spec.callers):
            _hook(spec, module)


def _hook(spec: FunctionSpec, module: ModuleType) -> None:
    record = next((record for record in records if record.spec is spec), None)
    if record is None and module.__name__ == spec.module_name:
        record = _decide(spec, getattr(module, spec.name, None))
        records.append(record)
    if record is not None and record.replacement is not None:
        record.install(module)


def _decide(spec: FunctionSpec, native: Any) -> ServedFunction:
    asked = Asked(spec.op, EAGER, True, spec.donate or bool(spec.writes))
    served = bind_served(spec.op, None, asked, _why_native(spec, native))
    record = ServedFunction(spec, (served,), native)
    if served.binding is not None:
        record.call(served.binding.fn)
        record.replacement = _replacement(record, served.binding)
    return record


def _why_native(spec: FunctionSpec, native: Any) -> str | None:
    """Why a function is not served, or None."""
    if not get_default_manager().config.serves_layer(spec.op):
        return "the OOT lists leave it native"
    if native is None:
        return f"this vLLM has no {spec.path}"
    owner = str(getattr(native, "__module__", None))
    if owner.partition(".")[0] != "vllm":
        return f"{owner} replaced it"
    known = inspect.signature(spec.arguments).parameters
    unknown = [name for name in inspect.signature(native).parameters if name not in known]
    if unknown:
        return f"vLLM's function takes {', '.join(unknown)}, which vllm_fl does not know"
    return None


def _replacement(record: ServedFunction, binding: Binding) -> Callable[..., Any]:
    op, native, arguments = record.spec.op, record.native, record.spec.arguments
    winner, writes = binding.decision.winner_id, record.spec.writes
    signature = get_default_manager().registry.get_signature(op)
    names = signature.parameter_names if signature is not None else ()
    written = tuple(names.index(name) for name in writes)

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        fn = record.fn
        given = None if fn is None else arguments(*args, **kwargs)
        if fn is None or given is None:
            return native(*args, **kwargs)
        try:
            result = fn(*given)
        except Exception as error:
            annotate(error, op, winner, given, {})
            raise
        if not written:
            return result
        if result is not given[written[0]]:  # else its one argument was written in place
            _write(given, written, result)
        return None

    return call


def _write(given: tuple[Any, ...], written: tuple[int, ...], result: Any) -> None:
    """Copy an op's outputs into the arguments that vLLM's function would have written."""
    results = result if isinstance(result, tuple) else (result,)
    for position, value in zip(written, results, strict=True):
        if value is not given[position]:
            given[position].copy_(value)
