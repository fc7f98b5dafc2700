# SPDX-License-Identifier: Apache-2.0
"""Serving a layer: when vLLM has built it, its ops are bound and its forward is pointed at them.

vLLM's CustomOp keeps the forward that it chose in the instance (`_forward_method`). That one
attribute is replaced; classes and registries stay as they are, so subclasses, LoRA's type
tests, `custom_ops` and other plugins see what they expect.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...dispatch.binding import Binding, annotate
from ...dispatch.errors import NoImplementationError
from ...dispatch.log import logger
from ...dispatch.manager import get_default_manager
from ...dispatch.types import BackendImplKind, OpImpl
from ..compile import LEFT_TO_COMPILER, layer_mode
from ..features import batch_invariant, platform_has_kernels

__all__ = ["LayerSpec", "ServedLayer", "records", "serve", "slot_of"]

FORWARDS = ("native", "cuda", "hip", "cpu", "xpu", "tpu", "oot")
"""The suffixes of the forwards that vLLM's CustomOp dispatches to."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How one vLLM layer is served.

    Attributes:
        name: vLLM's name of the layer, as in `custom_ops` and the OOT lists.
        paths: where its classes are ("module:Class"); those that a release lacks are skipped.
        facts: for each op that the layer calls, the facts known when it is built.
        forward: the new forward; it finds the op's function with `slot_of`.
        refuses: a reason to leave this instance native, or None.
    """

    name: str
    paths: tuple[str, ...]
    facts: Callable[[Any], Mapping[str, Mapping[str, Any] | None]]
    forward: Callable[..., Any]
    refuses: Callable[[Any], str | None] = lambda layer: None


@dataclass(slots=True)
class ServedOp:
    """One op of one layer: its binding, or why it stays native, and its calls by impl_id."""

    op: str
    binding: Binding | None
    native_reason: str
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, impl: OpImpl) -> None:
        """One more call."""
        self.calls[impl.impl_id] = self.calls.get(impl.impl_id, 0) + 1


@dataclass(slots=True, eq=False)
class ServedLayer:
    """What was decided for one layer instance."""

    layer: weakref.ref[Any]
    class_name: str
    mode: str
    ops: tuple[ServedOp, ...]

    def set_counting(self, on: bool) -> None:
        """Swap the bound functions for counting ones, or back."""
        layer = self.layer()
        for served in self.ops:
            if layer is None or served.binding is None:
                continue
            if on and served.binding.traced is not None:
                fn = served.binding.traced(served.count)
            else:
                fn = served.binding.fn
            layer.__dict__[slot_of(served.op)] = fn


records: list[ServedLayer] = []
"""Every layer of this process that was looked at, in the order in which they were built."""


def _forget(dead: weakref.ref[Any]) -> None:
    records[:] = [record for record in records if record.layer is not dead]


def slot_of(op_name: str) -> str:
    """The attribute of a layer that holds the bound function of an op; None there means
    that vLLM's own forward serves it."""
    return f"_vllm_fl_{op_name}"


def serve(layer: Any, spec: LayerSpec, base: type) -> None:
    """Bind the ops of a layer that has just been built, and point its forward at them."""
    mode = layer_mode()
    native = _why_native(layer, spec, base, mode)
    ops = tuple(_bind(op_name, facts, mode, native) for op_name, facts in spec.facts(layer).items())
    record = ServedLayer(weakref.ref(layer, _forget), type(layer).__name__, mode, ops)
    records.append(record)
    if any(served.binding is not None for served in ops):
        for served in ops:
            layer.__dict__[slot_of(served.op)] = served.binding.fn if served.binding else None
        layer.__dict__["_vllm_fl_native"] = layer._forward_method
        layer.__dict__["_forward_method"] = types.MethodType(spec.forward, layer)


def _why_native(layer: Any, spec: LayerSpec, base: type, mode: str) -> str | None:
    """Why a layer as a whole is not served, or None."""
    if not get_default_manager().config.serves_layer(spec.name):
        return "the OOT lists leave it native"
    own = _own_forward(type(layer), base)
    if own is not None:
        return own
    if not (layer.enabled() or layer._enforce_enable):
        # Under the compiler that is vLLM's default; in eager mode somebody asked for it.
        return LEFT_TO_COMPILER if mode == "compiled" else "custom_ops disables it"
    if mode == "compiled":
        return LEFT_TO_COMPILER
    return spec.refuses(layer)


def _own_forward(cls: type, base: type) -> str | None:
    """Why a subclass keeps its own mathematics, or None.

    A `forward` that stands in a mixin beside the served class can only pass on to it; one in
    a subclass of it is the subclass's own.
    """
    for suffix in FORWARDS:
        name = f"forward_{suffix}"
        if getattr(cls, name, None) is not getattr(base, name, None):
            return f"{cls.__module__}.{cls.__name__} has its own {name}"
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        if "forward" in vars(owner) and issubclass(owner, base):
            return f"{owner.__module__}.{owner.__name__} has its own forward"
    return None


def _bind(op_name: str, facts: Mapping[str, Any] | None, mode: str, native: str | None) -> ServedOp:
    if native is not None:
        return ServedOp(op_name, None, native)
    manager = get_default_manager()
    try:
        binding = manager.bind_op(
            op_name,
            donate=True,  # vLLM's own forwards write these arguments too
            facts=facts,
            mode=mode,
            layer=True,
            batch_invariant=batch_invariant(),
        )
    except NoImplementationError as error:
        logger.debug("%s stays native: %s", op_name, error)
        return ServedOp(op_name, None, "; ".join(str(error).splitlines()[1:]) or str(error))
    decision = binding.decision
    if decision.native:
        return ServedOp(op_name, None, decision.reason)
    winner = decision.winner
    if (
        winner is not None
        and winner.kind is BackendImplKind.REFERENCE
        and decision.reason.startswith("highest priority")
        and platform_has_kernels()
    ):
        return ServedOp(
            op_name, None, "only the reference could serve it; vLLM's own kernel is faster"
        )
    return ServedOp(op_name, binding, "")


def note(error: Exception, layer: Any, op_name: str, args: tuple[Any, ...]) -> None:
    """Add what a layer knows to an exception that passes through its forward."""
    for record in records:
        if record.layer() is layer:
            for served in record.ops:
                if served.op == op_name and served.binding is not None:
                    winner = served.binding.decision.winner_id
                    annotate(error, op_name, winner, args, {})
