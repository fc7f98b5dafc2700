# SPDX-License-Identifier: Apache-2.0
"""Serving a layer: when vLLM has built it, its ops are bound and its forward is pointed at them.

vLLM's CustomOp keeps the forward that it chose in the instance (`_forward_method`). That one
attribute is replaced; classes and registries stay as they are, so subclasses, LoRA's type
tests, `custom_ops` and other plugins see what they expect.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...backends.vendor.ascend.beside import claims
from ...dispatch.binding import Binding, annotate
from ...dispatch.default import get_default_manager
from ...dispatch.errors import NoImplementationError
from ...dispatch.log import logger
from ...dispatch.policy import active_scope, in_scope
from ...dispatch.types import BackendImplKind, OpImpl
from ...ops.library import Entry
from ..compile import EAGER, explicitly_off, fused_by_vllm, layer_mode, opaque
from ..features import batch_invariant, platform_has_kernels

__all__ = [
    "Asked",
    "BoundLayer",
    "LayerSpec",
    "ServedLayer",
    "ServedOp",
    "bind_served",
    "choices",
    "note",
    "records",
    "serve",
    "settle",
]

FORWARDS = ("native", "cuda", "hip", "cpu", "xpu", "tpu", "oot")
"""The suffixes of the forwards that vLLM's CustomOp dispatches to."""

_Facts = Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Asked:
    """Under what conditions an op is bound: vLLM's name of the layer or function, "eager" or
    "compiled", whether `custom_ops` enables it, and whether its arguments may be written."""

    layer: str
    mode: str
    enabled: bool
    donate: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How one vLLM layer is served.

    Attributes:
        name: vLLM's name of the layer, as in `custom_ops` and the OOT lists.
        paths: where its classes are ("module:Class"); those that a release lacks are skipped.
        facts: for each op that the layer calls, the facts known when it is built.
        forward: the new forward. Its first argument is a BoundLayer.
        refuses: a reason to leave this instance native, or None.
        root: a base of the class, in the same module, whose constructor is hooked instead: the
            root's other subclasses are then listed as native, and not passed over.
        functional: those of `paths` whose own forwards leave their arguments as they are.
        elsewhere: classes ("module:Class") below the root that have a spec of their own.
    """

    name: str
    paths: tuple[str, ...]
    facts: Callable[[Any], _Facts]
    forward: Callable[..., Any]
    refuses: Callable[[Any], str | None] = lambda layer: None
    root: str | None = None
    functional: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def is_for(self, cls: type) -> bool:
        """Whether a layer of that class, below the root, is this spec's business."""
        names = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}
        return names.isdisjoint(self.elsewhere)


@dataclass(slots=True)
class ServedOp:
    """One op of one layer.

    Attributes:
        op: its name.
        binding: what serves it, or None where vLLM's own forward does.
        native_reason: why it does.
        calls: impl_id to the calls counted; in compiled mode shared by the layers that share
            a binding.
        entry: in compiled mode, the binding as graphs know it.
        graph_fn: in compiled mode, the function that the compiler traces.
    """

    op: str
    binding: Binding | None
    native_reason: str
    calls: dict[str, int] = field(default_factory=dict)
    entry: Entry | None = None
    graph_fn: Callable[..., Any] | None = None

    @property
    def fn(self) -> Callable[..., Any] | None:
        """The bound function; None where vLLM's own forward serves the op."""
        if self.graph_fn is not None:
            return self.graph_fn
        return None if self.binding is None else self.binding.fn

    def count(self, impl: OpImpl) -> None:
        """One more call."""
        self.calls[impl.impl_id] = self.calls.get(impl.impl_id, 0) + 1


@dataclass(slots=True, eq=False)
class ServedLayer:
    """What was decided for one layer instance.

    Attributes:
        layer: the layer, which may be gone.
        class_name: of the layer.
        mode: "eager" or "compiled".
        ops: its ops.
        name: of the layer's spec.
        refused: why the layer as a whole is not served, or None.
        bound: what its forward was bound to, None where all is native. It is gone where
            somebody pointed the forward elsewhere since.
    """

    layer: weakref.ref[Any]
    class_name: str
    mode: str
    ops: tuple[ServedOp, ...]
    name: str
    refused: str | None = None
    bound: weakref.ref[BoundLayer] | None = None

    @property
    def replaced(self) -> bool:
        """Whether the layer was served, and somebody pointed its forward elsewhere since."""
        return self.bound is not None and self.bound() is None

    def set_counting(self, on: bool) -> None:
        """Swap the bound functions for counting ones, or back."""
        bound = self.bound() if self.bound is not None else None
        if bound is None:
            return
        for served in self.ops:
            if served.entry is not None:
                served.entry.set_counting(on)
                continue
            traced = served.binding.traced if served.binding is not None else None
            setattr(bound, served.op, traced(served.count) if on and traced else served.fn)


class BoundLayer:
    """What the forward of a served layer is bound to.

    It has an attribute for each op of the layer: the function that serves it, or None where
    vLLM's own forward does.

    Copied together with its layer, it serves the copy. Pickled, it gives the layer its own
    forward back, because the other process may have other implementations, or none.
    """

    def __init__(
        self, layer: Any, spec: LayerSpec, facts: _Facts, asked: Asked, native: Any
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.facts = facts
        self.asked = asked
        self.native = native
        self.scope = active_scope()
        self.record: ServedLayer

    def take(self, record: ServedLayer) -> None:
        """Call what the record says."""
        self.record = record
        record.bound = weakref.ref(self)
        for served in record.ops:
            setattr(self, served.op, served.fn)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLayer:
        layer = copy.deepcopy(self.layer, memo)
        if id(self) in memo:  # the layer led here
            copied: BoundLayer = memo[id(self)]
            return copied
        native = copy.deepcopy(self.native, memo)
        bound = BoundLayer(layer, self.spec, self.facts, self.asked, native)
        bound.scope = self.scope
        ops = tuple(replace(op, calls=op.entry.calls if op.entry else {}) for op in self.record.ops)
        bound.take(_record(layer, self.record.mode, ops, self.spec.name))
        return bound

    def __reduce__(self) -> tuple[Any, ...]:
        return _unbound, (self.spec.forward.__name__, self.native)


def _unbound(name: str, native: Any) -> Any:
    """What a pickled BoundLayer becomes: it has vLLM's own forward where ours was."""
    return types.SimpleNamespace(**{name: native})


records: list[ServedLayer] = []
"""Every layer of this process that was looked at, in the order in which they were built."""


def _record(
    layer: Any, mode: str, ops: tuple[ServedOp, ...], name: str, refused: str | None = None
) -> ServedLayer:
    def forget(_: object) -> None:
        with contextlib.suppress(ValueError):  # a test emptied the list
            records.remove(record)

    record = ServedLayer(weakref.ref(layer, forget), type(layer).__name__, mode, ops, name, refused)
    records.append(record)
    return record


def serve(layer: Any, spec: LayerSpec, base: type, *, donate: bool) -> None:
    """Bind the ops of a layer that has just been built, and point its forward at them.

    Args:
        base: the class that is served; the layer is of it, of a subclass, or of a sibling.
        donate: vLLM's own forwards may write their arguments, so ours may too.
    """
    mode = layer_mode()
    native = _why_native(layer, spec, base, mode)
    facts = spec.facts(layer)
    asked = Asked(spec.name, mode, bool(layer.enabled() or layer._enforce_enable), donate)
    ops = tuple(bind_served(op_name, of_op, asked, native) for op_name, of_op in facts.items())
    record = _record(layer, mode, ops, spec.name, native)
    if any(served.binding is not None for served in ops):
        bound = BoundLayer(layer, spec, facts, asked, layer._forward_method)
        bound.take(record)
        layer.__dict__["_forward_method"] = types.MethodType(spec.forward, bound)


def choices() -> tuple[str, ...]:
    """What was decided for the layers that were built, each once: what a compiler will trace."""
    said = set()
    for record in records:
        for served in record.ops:
            if served.entry is not None:
                what = served.entry.name
            elif served.binding is not None:
                what = str(served.binding.decision.winner_id)
            else:
                what = f"native ({served.native_reason})"
            said.add(f"{record.class_name}.{served.op} {record.mode}: {what}")
    return tuple(sorted(said))


def settle() -> None:
    """Decide again for the layers whose facts changed since they were built, because the
    constructor of a subclass went on, or loading replaced a weight."""
    for record in list(records):
        bound = record.bound() if record.bound is not None else None
        if bound is None:
            continue
        facts = bound.spec.facts(bound.layer)
        if facts == bound.facts:
            continue
        bound.facts = facts
        with in_scope(bound.scope):
            record.ops = tuple(
                bind_served(op_name, of_op, bound.asked, None) for op_name, of_op in facts.items()
            )
        bound.take(record)
        if not any(served.binding is not None for served in record.ops):
            bound.layer.__dict__["_forward_method"] = bound.native
            record.bound = None


def _why_native(layer: Any, spec: LayerSpec, base: type, mode: str) -> str | None:
    """Why a layer as a whole is not served, or None."""
    if not get_default_manager().config.serves_layer(spec.name):
        return "the OOT lists leave it native"
    claimed = claims(type(layer).__name__)
    if claimed is not None:
        return claimed
    own = _own_forward(type(layer), base)
    if own is not None:
        return own
    # Not enabled is vLLM's default under the compiler; in eager mode somebody asked for it.
    enabled = layer.enabled() or layer._enforce_enable
    names = (spec.name, getattr(type(layer), "name", spec.name))
    if any(map(explicitly_off, names)) or (mode == EAGER and not enabled):
        return "custom_ops disables it"
    return spec.refuses(layer)


def _own_forward(cls: type, base: type) -> str | None:
    """Why a class keeps its own mathematics, or None.

    A `forward` that stands in a mixin beside the served class can only pass on to it; one in
    a subclass of it is the subclass's own.
    """
    for suffix in (*FORWARDS, "static"):  # forward_static is what some of them share
        name = f"forward_{suffix}"
        if getattr(cls, name, None) is not getattr(base, name, None):
            return f"{cls.__module__}.{cls.__name__} has its own {name}"
    if not issubclass(cls, base):
        return f"{cls.__module__}.{cls.__name__} is no {base.__name__}"
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        if "forward" in vars(owner) and issubclass(owner, base):
            return f"{owner.__module__}.{owner.__name__} has its own forward"
    return None


def bind_served(
    op_name: str,
    facts: Mapping[str, Any] | None,
    asked: Asked,
    native: str | None,
    otherwise: Callable[..., Any] | None = None,
) -> ServedOp:
    """Decide an op of a layer, or of a function, for which facts are None.

    Args:
        native: why vLLM's own code serves it, if that is settled already.
        otherwise: takes the calls that the policy's choices refuse.
    """
    if native is not None:
        return ServedOp(op_name, None, native)
    manager = get_default_manager()
    bind = partial(
        manager.bind_op,
        op_name,
        facts=facts,
        mode=asked.mode,
        layer=True,
        dispatch_compiled=asked.enabled,
        batch_invariant=batch_invariant(),
        otherwise=otherwise,
    )
    try:
        binding = bind(donate=asked.donate)
    except NoImplementationError as error:
        logger.debug("%s stays native: %s", op_name, error)
        reasons = [line.strip() for line in str(error).splitlines()[1:]]
        return ServedOp(op_name, None, "; ".join(reasons) or str(error))
    decision = binding.decision
    if decision.native:
        return ServedOp(op_name, None, decision.reason)
    winner = decision.winner
    if (
        winner is not None
        and winner.kind is BackendImplKind.REFERENCE
        and decision.by_priority
        and platform_has_kernels()
    ):
        return ServedOp(
            op_name, None, "only the reference could serve it; vLLM's own kernel is faster"
        )
    if asked.mode == EAGER or winner is None:
        return ServedOp(op_name, binding, "")
    ordered = manager.policy_in_force.order_for(op_name, asked.mode)
    forced = bool(ordered) and not decision.by_priority
    fusion = None if forced else fused_by_vllm(asked.layer)
    if fusion is not None:
        return ServedOp(op_name, None, fusion)
    inplace = asked.donate and bool(winner.mutates)
    if asked.donate and not inplace:
        binding = bind(donate=False)  # the functional node must not write, whoever runs it
    entry, graph_fn = opaque(binding, facts, inplace=inplace)
    return ServedOp(op_name, entry.binding, "", entry.calls, entry, graph_fn)


def note(error: Exception, bound: Any, op_name: str, args: tuple[Any, ...]) -> None:
    """Add what a layer knows to an exception that passes through its forward."""
    for served in bound.record.ops:
        if served.op == op_name and served.binding is not None:
            annotate(error, op_name, served.binding.decision.winner_id, args, {})
