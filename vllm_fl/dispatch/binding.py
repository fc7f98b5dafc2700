# SPDX-License-Identifier: Apache-2.0
"""From a Decision to a callable: the function itself where nothing needs checking per call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .decision import Decision
from .errors import DispatchError, GuardRejected, NoImplementationError
from .log import logger
from .types import OpImpl, OpSignature, Rejected, as_verdict

__all__ = ["Binding", "annotate", "compose"]


@dataclass(slots=True)
class Binding:
    """A decision and the callable that carries it out.

    Attributes:
        op: the op's name.
        fn: what to call.
        decision: why.
        call_rejections: impl_id to the reasons its call guard gave, each once.
    """

    op: str
    fn: Callable[..., Any]
    decision: Decision
    call_rejections: dict[str, list[str]] = field(default_factory=dict)


def compose(
    decision: Decision,
    signature: OpSignature | None,
    *,
    donate: bool,
    facts_known: bool,
    strict: bool,
) -> Binding:
    """Build the callable of a decision that has a winner.

    Args:
        donate: the caller gives up the arguments that an implementation writes.
        facts_known: the layer guards were answered; otherwise they are asked per call.
        strict: a call guard's rejection of the first choice is an error.
    """
    steps = [
        (impl, _check(impl, signature, facts_known), _callable(impl, signature, donate))
        for impl in decision.candidates
    ]
    _, check, fn = steps[0]
    binding = Binding(decision.op, fn, decision)
    if check is not None:
        binding.fn = _guarded(binding, steps, strict)
    return binding


_Check = Callable[..., Any] | None


def _check(impl: OpImpl, signature: OpSignature | None, facts_known: bool) -> _Check:
    layer_guard = None if facts_known else impl.supports_layer
    call_guard = impl.supports
    facts_of = signature.facts if signature is not None else None
    if layer_guard is None or facts_of is None:
        return call_guard
    if call_guard is None:
        return lambda *args, **kwargs: layer_guard(facts_of(*args, **kwargs))

    def both(*args: Any, **kwargs: Any) -> Any:
        verdict = layer_guard(facts_of(*args, **kwargs))
        return call_guard(*args, **kwargs) if verdict is True or as_verdict(verdict) else verdict

    return both


def _callable(impl: OpImpl, signature: OpSignature | None, donate: bool) -> Callable[..., Any]:
    if donate or not impl.mutates:
        return impl.fn
    names = (
        signature.parameter_names
        if signature is not None
        else tuple(inspect.signature(impl.fn).parameters)
    )
    positions = [names.index(name) for name in impl.mutates if name in names]
    fn, mutates = impl.fn, impl.mutates

    @functools.wraps(fn)
    def on_clones(*args: Any, **kwargs: Any) -> Any:
        owned = list(args)
        for i in positions:
            if i < len(owned) and owned[i] is not None:
                owned[i] = owned[i].clone()
        for name in mutates:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].clone()
        return fn(*owned, **kwargs)

    return on_clones


def _guarded(
    binding: Binding,
    steps: Sequence[tuple[OpImpl, _Check, Callable[..., Any]]],
    strict: bool,
) -> Callable[..., Any]:
    op_name = binding.op
    first, first_check, first_fn = steps[0]
    assert first_check is not None

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        impl = first
        try:
            verdict = first_check(*args, **kwargs)
            if verdict is True:
                return first_fn(*args, **kwargs)
            for impl, check, fn in steps:
                if impl is not first:
                    verdict = True if check is None else check(*args, **kwargs)
                answer = as_verdict(verdict)
                if not isinstance(answer, Rejected):
                    return fn(*args, **kwargs)
                _note_rejection(binding, impl, answer)
                if strict:
                    raise GuardRejected(
                        f"op '{op_name}', strict mode: the first choice '{impl.impl_id}' "
                        f"refuses this call: {answer.reason}. Choose another implementation "
                        f"for {op_name}, or leave strict mode."
                    )
        except Exception as error:
            annotate(error, op_name, impl.impl_id, args, kwargs)
            raise
        raise NoImplementationError(
            f"op '{op_name}': every implementation refuses this call "
            f"({_shapes(args, kwargs)}): {_rejection_text(binding)}"
        )

    dispatch.__name__ = dispatch.__qualname__ = op_name
    return dispatch


def _note_rejection(binding: Binding, impl: OpImpl, answer: Rejected) -> None:
    reasons = binding.call_rejections.setdefault(impl.impl_id, [])
    if answer.reason not in reasons:
        reasons.append(answer.reason)
        logger.info("%s: %s refuses a call: %s", binding.op, impl.impl_id, answer.reason)


def _rejection_text(binding: Binding) -> str:
    said = [f"{i}: {', '.join(reasons)}" for i, reasons in binding.call_rejections.items()]
    said += [f"{loser.impl_id}: {loser.reason}" for loser in binding.decision.rejected()]
    return "; ".join(said)


_NOTE = "vllm_fl: "


def annotate(
    error: BaseException,
    op_name: str,
    impl_id: str | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Add op, implementation and argument shapes to an exception that passes by, once.

    The dispatcher's own errors say it all by themselves."""
    if isinstance(error, DispatchError) or any(
        note.startswith(_NOTE) for note in getattr(error, "__notes__", ())
    ):
        return
    error.add_note(
        f"{_NOTE}raised by implementation '{impl_id}' of op '{op_name}', called with "
        f"{_shapes(args, kwargs)}. No other implementation was tried, because the arguments "
        "may already be overwritten. If this is a case that it does not handle, its "
        "`supports` guard should refuse it."
    )


def _shapes(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    shown = [_shape(value) for value in args]
    shown += [f"{name}={_shape(value)}" for name, value in kwargs.items()]
    return ", ".join(shown) or "no arguments"


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    strides = value.stride() if callable(getattr(value, "stride", None)) else ""
    return f"{dtype}{list(shape)} strides {list(strides)}"
