# SPDX-License-Identifier: Apache-2.0
"""Serving a function: once the model is loaded its op is bound, and if anything but vLLM's own
code won, the attributes under which callers look the function up are pointed at it.

A function that stays native is not touched. It does so where vLLM's own code can run and nobody
named an implementation: priority replaces what is missing, and no kernel that vLLM was tuned for.
One that is served is listed in the route table from its first call on: most models call few.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ...dispatch.binding import annotate
from ...dispatch.default import get_default_manager
from ...dispatch.log import logger
from ...dispatch.types import BackendImplKind
from .. import hooks
from ..compile import EAGER
from ..features import batch_invariant, has_kernels, on_cpu, runs_triton, tuned_by_vllm
from ..layers.serve import Asked, ServedOp, bind_served

__all__ = [
    "TRITON",
    "FunctionSpec",
    "ServedFunction",
    "always",
    "bind",
    "hook_module",
    "records",
    "release",
]

_REFERENCE = BackendImplKind.REFERENCE

TRITON = "triton"
"""What a function needs that runs a Triton kernel of vLLM's own."""


def _never() -> bool:
    return False


def always() -> bool:
    """For `FunctionSpec.traced`: vLLM's compiled layers call the function."""
    return True


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """How one function of vLLM is served.

    Several may be for one function: the first whose `arguments` takes a call serves it.

    Attributes:
        op: the op that does what the function does; also its name in the OOT lists.
        path: "module:function", where vLLM defines it.
        arguments: takes what vLLM's function takes, in every release, and returns the op's
            positional arguments, or None for a call that is vLLM's own business.
        callers: modules that import it by name, and so have an attribute of their own; those
            that a release lacks are skipped.
        writes: the op's arguments that vLLM's function writes in place of returning anything.
        finish: takes what the op returned and what vLLM's function was called with; writes and
            returns what vLLM's function would. None: that is what `writes` says, or the result.
        donate: vLLM's function may write its arguments, so another implementation may.
        needs: what vLLM's own function cannot do without: kernels of its extension, such as
            "_moe_C.topk_softmax", or `TRITON`. Where they are here it stays native unless a
            policy names an implementation, and takes the calls which that one refuses. Empty:
            priority decides.
        stand_in: it is replaced only where what it needs is missing, whatever a policy says of
            the op: the op has another call site, which the policy is about.
        traced: whether a compiler, where vLLM uses one, sees through its callers to the function.
        cpu: whether vLLM comes this way on a CPU.
    """

    op: str
    path: str
    arguments: Callable[..., tuple[Any, ...] | None]
    callers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    finish: Callable[..., Any] | None = None
    donate: bool = False
    needs: tuple[str, ...] = ()
    stand_in: bool = False
    traced: Callable[[], bool] = _never
    cpu: bool = True

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
        mode: "eager": no compiler sees the call.
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

_compiled = False
"""Whether vLLM compiles the model that was loaded last."""


def bind(specs: tuple[FunctionSpec, ...], *, compiled: bool = False) -> None:
    """Decide for every function whose module is there, and serve those that another
    implementation won. Those whose module is imported later follow then.

    Args:
        compiled: a compiler traces the model, and what it calls without an opaque op between.
    """
    global _compiled
    release()
    _compiled = compiled
    _specs[:] = [spec for spec in specs if spec.cpu or not on_cpu()]
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
    group = [record for record in records if record.spec.path == spec.path]
    if not group and module.__name__ == spec.module_name:
        native = getattr(module, spec.name, None)
        group = [_decide(each, native) for each in _specs if each.path == spec.path]
        records.extend(group)
        served = [record for record in group if record.fn is not None]
        if served:
            replacement = _replacement(served)
            for record in served:
                record.replacement = replacement
    for record in group:
        if record.replacement is not None:
            record.install(module)


def _decide(spec: FunctionSpec, native: Any) -> ServedFunction:
    asked = Asked(spec.op, EAGER, True, spec.donate or bool(spec.writes))
    kept = _why_native(spec, native) or _why_kept(spec)
    otherwise = _left_to_vllm if _can_run(spec) else None
    served = bind_served(spec.op, None, asked, kept, otherwise)
    record = ServedFunction(spec, (served,), native)
    if served.binding is not None:
        record.call(served.binding.fn)
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
    if _compiled and spec.traced():
        return "the compiler traces its callers; it is served where vLLM compiles nothing"
    return None


def _can_run(spec: FunctionSpec) -> bool:
    """Whether what vLLM's own function is known to need is here."""
    kernels = [name for name in spec.needs if name != TRITON]
    return bool(spec.needs) and has_kernels(kernels) and (TRITON not in spec.needs or runs_triton())


_REFUSED = object()


def _left_to_vllm(*args: Any) -> object:
    """What every implementation refuses goes to vLLM's own function."""
    return _REFUSED


def _why_kept(spec: FunctionSpec) -> str | None:
    """Why vLLM's own function is not given up, or None.

    What would win is only looked at: what nobody asked for is not loaded.
    """
    if not _can_run(spec):
        return None
    if spec.stand_in:
        return f"vLLM's own kernel is here; {spec.op} stands in for a missing one"
    decision = get_default_manager().decide(
        spec.op, mode=EAGER, layer=True, batch_invariant=batch_invariant()
    )
    winner = decision.winner
    if winner is None or not decision.by_priority:
        return None
    if TRITON in spec.needs and not tuned_by_vllm() and winner.kind is not _REFERENCE:
        return None  # Triton runs there, and priority knows better than vLLM what is fast
    return f"vLLM's own kernel is here, and no order names an implementation of {spec.op}"


def _replacement(served: list[ServedFunction]) -> Callable[..., Any]:
    native = served[0].native
    cases = [(record, record.spec.arguments, _finish(record.spec)) for record in served]

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        for record, arguments, finish in cases:
            fn = record.fn
            given = None if fn is None else arguments(*args, **kwargs)
            if fn is None or given is None:
                continue
            try:
                result = fn(*given)
            except Exception as error:
                binding = record.ops[0].binding
                winner = None if binding is None else binding.decision.winner_id
                annotate(error, record.spec.op, winner, given, {})
                raise
            if result is _REFUSED:
                continue
            return result if finish is None else finish(result, given, args, kwargs)
        return native(*args, **kwargs)

    return call


def _finish(spec: FunctionSpec) -> Callable[..., Any] | None:
    """What turns (the op's result, its arguments, those of vLLM's function) into the result of
    vLLM's function."""
    finish = spec.finish
    if finish is not None:
        return lambda result, given, args, kwargs: finish(result, *args, **kwargs)
    if not spec.writes:
        return None
    signature = get_default_manager().registry.get_signature(spec.op)
    names = signature.parameter_names if signature is not None else ()
    written = tuple(names.index(name) for name in spec.writes)

    def write(result: Any, given: tuple[Any, ...], args: Any, kwargs: Any) -> None:
        if result is not given[written[0]]:  # else its one argument was written in place
            _write(given, written, result)

    return write


def _write(given: tuple[Any, ...], written: tuple[int, ...], result: Any) -> None:
    """Copy an op's outputs into the arguments that vLLM's function would have written."""
    results = result if isinstance(result, tuple) else (result,)
    for position, value in zip(written, results, strict=True):
        if value is not given[position]:
            given[position].copy_(value)
