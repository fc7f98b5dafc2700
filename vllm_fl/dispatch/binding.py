# SPDX-License-Identifier: Apache-2.0
"""From a Decision to a callable: the function itself where nothing needs checking per call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .decision import Decision, Loser
from .errors import GuardRejected, NoImplementationError
from .log import logger
from .notes import annotate, annotate_guard, describe_arguments
from .types import OpImpl, OpSignature, Rejected, as_verdict

__all__ = [
    "Binding",
    "annotate",
    "annotate_call",
    "compose",
    "native_binding",
    "reachable",
    "refuse_first",
]

_REASONS_KEPT = 8
"""A reason may name a token count; a server must not remember all of them."""


@dataclass(slots=True)
class Binding:
    """A decision and the callable that carries it out.

    Attributes:
        op: the op's name.
        fn: what to call.
        decision: why.
        call_rejections: impl_id to the first reasons its call guard gave, each once.
        traced: builds a callable that does the same and first tells which implementation
            it calls; None where native was chosen.
        signature: the op's, to say what is wrong with a call; None where nobody declared it.
    """

    op: str
    fn: Callable[..., Any]
    decision: Decision
    call_rejections: dict[str, list[str]] = field(default_factory=dict)
    traced: Callable[[Callable[[OpImpl], None]], Callable[..., Any]] | None = None
    strict: bool = False
    facts_known: bool = True
    signature: OpSignature | None = None

    def is_like(self, other: Binding) -> bool:
        """Whether the other does the same for the same reasons."""
        mine = (self.decision, self.strict, self.facts_known)
        return mine == (other.decision, other.strict, other.facts_known)


def reachable(candidates: tuple[OpImpl, ...], *, facts_known: bool) -> tuple[OpImpl, ...]:
    """The candidates that a call can get to: up to the first without a guard left to ask."""
    for count, impl in enumerate(candidates, start=1):
        if impl.supports is None and (facts_known or impl.supports_layer is None):
            return candidates[:count]
    return candidates


def compose(
    decision: Decision,
    signature: OpSignature | None,
    *,
    donate: bool,
    facts_known: bool,
    strict: bool,
    otherwise: Callable[..., Any] | None = None,
) -> Binding:
    """Build the callable of a decision that has a winner.

    Args:
        donate: the caller gives up the arguments that an implementation writes.
        facts_known: the layer guards were answered; otherwise they are asked per call.
        strict: a call guard's rejection of the first choice is an error.
        otherwise: takes the calls that every candidate refuses; None: they are an error.
    """
    steps = [
        (impl, _check(impl, signature, facts_known), _callable(impl, signature, donate))
        for impl in reachable(decision.candidates, facts_known=facts_known)
    ]
    binding = Binding(
        decision.op, _native, decision, strict=strict, facts_known=facts_known, signature=signature
    )

    def assemble(steps: Sequence[_Step]) -> Callable[..., Any]:
        _, check, fn = steps[0]
        return fn if check is None else _guarded(binding, steps, strict, otherwise)

    binding.fn = assemble(steps)
    binding.traced = lambda tell: assemble(
        [(i, check, _told(tell, i, fn)) for i, check, fn in steps]
    )
    return binding


_Check = Callable[..., Any] | None
_Step = tuple[OpImpl, _Check, Callable[..., Any]]


def _told(
    tell: Callable[[OpImpl], None], impl: OpImpl, fn: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tell(impl)
        return fn(*args, **kwargs)

    return call


def annotate_call(
    error: Exception, binding: Binding, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Add to what a call raised whose it is; see `annotate`.

    Raises:
        TypeError: instead of one of a function's, for arguments that the op does not take.
    """
    _refuse_misfit(error, binding, args, kwargs)
    annotate(error, binding.op, binding.decision.winner_id, args, kwargs)


def _refuse_misfit(
    error: Exception, binding: Binding, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """A function names itself in what it raises for wrong arguments, and be it a private guard;
    who called the op knows nothing of it."""
    if isinstance(error, TypeError) and binding.signature is not None:
        binding.signature.check_arguments(args, kwargs)


def native_binding(decision: Decision) -> Binding:
    """The binding of a decision for native, whose `fn` only explains itself."""
    return Binding(decision.op, _native, decision)


def _native(*args: Any, **kwargs: Any) -> Any:
    raise NoImplementationError("native was chosen: call vLLM's own forward")


def _check(impl: OpImpl, signature: OpSignature | None, facts_known: bool) -> _Check:
    layer_guard = None if facts_known else impl.supports_layer
    call_guard = impl.supports
    if layer_guard is None or signature is None:
        return call_guard
    facts_of = signature.facts_of
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
    steps: Sequence[_Step],
    strict: bool,
    otherwise: Callable[..., Any] | None,
) -> Callable[..., Any]:
    op_name = binding.op
    first, first_check, first_fn = steps[0]
    assert first_check is not None

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        impl, asking = first, True
        try:
            verdict = first_check(*args, **kwargs)
            if verdict is True:
                asking = False
                return first_fn(*args, **kwargs)
            refusals: list[str] = []
            for impl, check, fn in steps:
                if impl is not first:
                    verdict = True if check is None else check(*args, **kwargs)
                answer = as_verdict(verdict)
                if not isinstance(answer, Rejected):
                    asking = False
                    return fn(*args, **kwargs)
                _note_rejection(binding, impl, answer)
                refusals.append(f"{impl.impl_id}: {answer.reason}")
                if strict:
                    raise GuardRejected(
                        f"op '{op_name}', strict mode: the first choice '{impl.impl_id}' "
                        f"refuses this call: {answer.reason}. Choose another implementation "
                        f"for {op_name}, or leave strict mode."
                    )
        except Exception as error:
            _refuse_misfit(error, binding, args, kwargs)
            if asking:
                annotate_guard(error, impl, args, kwargs)
            else:
                annotate(error, op_name, impl.impl_id, args, kwargs)
            raise
        if otherwise is not None:
            return otherwise(*args, **kwargs)
        refusals += [f"{loser.impl_id}: {loser.reason}" for loser in binding.decision.rejected()]
        raise NoImplementationError(
            f"op '{op_name}': every implementation refuses this call "
            f"({describe_arguments(args, kwargs)}): {'; '.join(refusals)}"
        )

    dispatch.__name__ = dispatch.__qualname__ = op_name
    return dispatch


def refuse_first(op_name: str, rejection: Loser) -> None:
    """Under strict: a guard refuses the first choice before any call.

    Raises:
        GuardRejected: always.
    """
    raise GuardRejected(
        f"op '{op_name}', strict mode: the first choice '{rejection.impl_id}' refuses: "
        f"{rejection.reason}. Choose another implementation for {op_name}, or leave strict mode."
    )


def _note_rejection(binding: Binding, impl: OpImpl, answer: Rejected) -> None:
    reasons = binding.call_rejections.setdefault(impl.impl_id, [])
    if answer.reason not in reasons and len(reasons) < _REASONS_KEPT:
        reasons.append(answer.reason)
        logger.info("%s: %s refuses a call: %s", binding.op, impl.impl_id, answer.reason)
