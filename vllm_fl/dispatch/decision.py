# SPDX-License-Identifier: Apache-2.0
"""decide(): which implementation, and one concrete reason for each that lost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .fusion import ONE_BY_ONE, why_not_fused, with_native
from .notes import annotate_facts, annotate_guard
from .policy import NATIVE, SelectionPolicy, token_matches
from .types import (
    BackendImplKind,
    DeviceFacts,
    OpImpl,
    OpSignature,
    Rejected,
    Verdict,
    as_verdict,
)

__all__ = [
    "LEFT_TO_COMPILER",
    "Call",
    "Decision",
    "Loser",
    "decide",
    "only_named",
    "order_candidates",
]


LEFT_TO_COMPILER = "left to the compiler"
"""Why an op is native in compiled mode where nobody asked for a dispatch."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, for guards that look at them."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loser:
    """An implementation that was not chosen.

    Attributes:
        impl_id: its id, or "native".
        code: "device", "requires", "unavailable", "probe_error", "load_error",
            "denied_vendor", "not_allowed_vendor", "flagos_list", "batch_invariant",
            "fusion", "not_in_order", "layer_guard", "call_guard", "not_a_layer", "late",
            "after_winner".
        reason: one sentence.
    """

    impl_id: str
    code: str
    reason: str

    @property
    def was_rejected(self) -> bool:
        """True if it could not be used; False if it merely comes after the winner."""
        return self.code != "after_winner"


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to "what runs, and why".

    Attributes:
        op: the op's name.
        device: the device it was decided for.
        mode: "eager" or "compiled".
        winner: the implementation, or None (see `native`).
        native: vLLM's own forward was chosen.
        reason: why the winner won, or why nothing did.
        losers: everything else, in order of preference.
        candidates: the winner and, in order, what would follow if a call guard refused it.
        first_choice_rejected: the guard's rejection of the first choice, if that happened.
        policy: the policy's fields that differ from the defaults, each with its source.
        by_priority: nothing but priority made the winner win.
    """

    op: str
    device: DeviceFacts
    mode: str
    winner: OpImpl | None
    native: bool
    reason: str
    losers: tuple[Loser, ...]
    candidates: tuple[OpImpl, ...] = ()
    first_choice_rejected: Loser | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    by_priority: bool = False

    @property
    def winner_id(self) -> str | None:
        """The winner's impl_id, "native", or None."""
        return NATIVE if self.native else self.winner.impl_id if self.winner else None

    def rejected(self) -> tuple[Loser, ...]:
        """The losers that could not be used here."""
        return tuple(loser for loser in self.losers if loser.was_rejected)

    def nothing_text(self) -> str:
        """What to say where nothing can be used: every candidate with its reason."""
        lines = [f"op '{self.op}': no implementation can be used on {self.device.device_class}"]
        lines += [f"  {loser.impl_id}: {loser.reason}" for loser in self.losers]
        if not self.losers:
            lines.append("  none is registered; register one, or install the vendor's package")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        winner: dict[str, Any] | None = None
        if self.native:
            winner = {"impl_id": NATIVE, "kind": NATIVE, "vendor": None, "priority": None}
        elif self.winner is not None:
            winner = {
                "impl_id": self.winner.impl_id,
                "kind": self.winner.kind.value,
                "vendor": self.winner.vendor,
                "priority": int(self.winner.priority),
            }
        return {
            "op": self.op,
            "device": {
                "vendor": self.device.vendor,
                "device_type": self.device.device_type,
                "name": self.device.name,
                "arch": self.device.arch,
                "assumed": self.device.assumed,
                "assumed_modules": list(self.device.assumed_modules),
                "absent_modules": list(self.device.absent_modules),
            },
            "mode": self.mode,
            "winner": winner,
            "reason": self.reason,
            "losers": [
                {"impl_id": loser.impl_id, "code": loser.code, "reason": loser.reason}
                for loser in self.losers
            ],
            "policy": dict(self.policy),
        }

    def __str__(self) -> str:
        where = self.device.device_class + (" (assumed)" if self.device.assumed else "")
        lines = [f"{self.op} on {where}, {self.mode}: {self.winner_id or 'nothing available'}"]
        lines.append(f"  chosen: {self.reason}" if self.winner_id else f"  {self.reason}")
        lines += [f"  not {loser.impl_id}: {loser.reason}" for loser in self.losers]
        for name, entry in self.policy.items():
            lines.append(f"  policy {name} = {entry['value']} (from {entry['source']})")
        if self.device.assumed_modules:
            lines.append(f"  assumed installed: {', '.join(self.device.assumed_modules)}")
        if self.device.absent_modules:
            lines.append(f"  not assumed installed: {', '.join(self.device.absent_modules)}")
        return "\n".join(lines)


def order_candidates(
    op_name: str,
    impls: Sequence[OpImpl],
    policy: SelectionPolicy,
    device: DeviceFacts,
    mode: str = "eager",
) -> tuple[list[OpImpl | str], list[OpImpl]]:
    """Order implementations by policy, then priority.

    Priority decides; equal priority: the device's vendor first, then the smaller impl_id.

    Returns:
        (candidates in order, possibly with the word "native" among them; implementations
        that a closed per-op order leaves out).
    """
    default = sorted(impls, key=lambda impl: _rank(impl, device))
    if policy.prefer is not None:
        default.sort(key=lambda i: i.kind.value != policy.prefer)  # stable
    tokens = policy.order_for(op_name, mode)
    ordered: list[OpImpl | str] = []
    for token in tokens:
        if token == NATIVE:
            if NATIVE not in ordered:
                ordered.append(NATIVE)
            continue
        ordered += [i for i in default if token_matches(token, i) and i not in ordered]
    rest = [i for i in default if i not in ordered]
    if tokens and policy.strict:
        return ordered, rest
    return [*ordered, *rest], []


def _rank(impl: OpImpl, device: DeviceFacts) -> tuple[int, bool, str]:
    return -impl.priority, impl.vendor != device.vendor, impl.impl_id


def decide(
    op_name: str,
    impls: Sequence[OpImpl],
    policy: SelectionPolicy,
    device: DeviceFacts,
    *,
    availability: Callable[[OpImpl], Verdict],
    signature: OpSignature | None = None,
    facts: Mapping[str, Any] | None = None,
    call: Call | None = None,
    mode: str = "eager",
    layer: bool = False,
    dispatch_compiled: bool = False,
    batch_invariant: bool = False,
    parts: Mapping[str, OpImpl | None] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Decision:
    """Choose for one op. Reads nothing but its arguments.

    Args:
        availability: answers for one implementation; the manager's answer is remembered.
        facts: the layer's facts; `supports_layer` guards are asked when given, or when the
            op has none.
        call: a call's arguments; both guards are asked when given.
        mode: "eager" or "compiled".
        layer: whether "native" (vLLM's own forward) can be chosen.
        dispatch_compiled: in compiled mode a layer's op is native unless this is set or the
            policy has an order for the op.
        batch_invariant: only implementations that are marked so.
        parts: for an op that fuses others, what serves each of those.
        sources: policy field (or "per_op_order.<op>") to where its value came from.

    Raises:
        TypeError: the call's arguments are not those of the op.
    """
    if call is not None and signature is not None:
        signature.check_arguments(call.args, call.kwargs)
    if facts is None:
        if signature is None or signature.facts is None:
            facts = {}  # the op has none
        elif call is not None:
            try:
                facts = signature.facts_of(*call.args, **call.kwargs)
            except Exception as error:
                annotate_facts(error, op_name, call.args, call.kwargs)
                raise
    ordered, left_out = order_candidates(op_name, impls, policy, device, mode)
    if mode == "compiled" and layer and not dispatch_compiled and NATIVE not in ordered:
        # After what the order names: what nobody asked for is left to the compiler.
        tokens = policy.order_for(op_name, mode)
        named = [i for i in impls if any(token_matches(token, i) for token in tokens)]
        ordered.insert(len(named), NATIVE)
    fused = signature if signature is not None and signature.fuses and layer else None
    if fused is not None:
        ordered = with_native(ordered, mode)
    losers: list[Loser] = []
    usable: list[OpImpl] = []
    first_rejected: Loser | None = None
    native = False
    for candidate in ordered:
        if isinstance(candidate, str):
            if not layer:
                losers.append(
                    Loser(NATIVE, "not_a_layer", "vLLM's own forward exists only inside a layer")
                )
            elif usable or native:
                losers.append(Loser(NATIVE, "after_winner", "comes after the chosen one"))
            else:
                native = True
            continue
        # Compared with None throughout, because a Rejected is false.
        refusal = _policy_refusal(op_name, candidate, policy, batch_invariant)
        if refusal is None and not native:
            refusal = _as_refusal(availability(candidate))
            if refusal is None and fused is not None:
                refusal = why_not_fused(candidate, fused, policy, mode, parts or {})
            if refusal is None:
                # Behind the winner a call guard is asked only when the winner's refuses a call.
                refusal = _guard_refusal(candidate, facts, None if usable else call)
                if refusal is not None and not usable and first_rejected is None:
                    first_rejected = _loser(candidate, refusal)
        if refusal is not None:
            losers.append(_loser(candidate, refusal))
            continue
        if usable or native:
            losers.append(_behind(candidate, usable, device))
        if not native:
            usable.append(candidate)
    losers += [
        Loser(
            impl.impl_id,
            "not_in_order",
            f"strict closes the order given for {op_name}, which does not name it",
        )
        for impl in left_out
    ]
    winner = usable[0] if usable and not native else None
    return Decision(
        op=op_name,
        device=device,
        mode=mode,
        winner=winner,
        native=native,
        reason=_reason(op_name, winner, native, policy, impls, sources or {}, mode, fused),
        losers=tuple(losers),
        candidates=() if native else tuple(usable),
        first_choice_rejected=first_rejected,
        policy=describe_policy(op_name, policy, sources or {}),
        by_priority=winner is not None and not _is_named(winner, op_name, policy, mode),
    )


def _is_named(impl: OpImpl, op_name: str, policy: SelectionPolicy, mode: str) -> bool:
    """Whether the policy asks for an implementation, and more than its priority speaks for it."""
    if policy.prefer == impl.kind.value:
        return True
    return any(token_matches(token, impl) for token in policy.order_for(op_name, mode))


def only_named(decision: Decision, policy: SelectionPolicy) -> Decision:
    """The decision, with none but those for candidates that the policy asks for."""
    named = [i for i in decision.candidates if _is_named(i, decision.op, policy, decision.mode)]
    return replace(decision, candidates=tuple(named))


def _policy_refusal(
    op_name: str, impl: OpImpl, policy: SelectionPolicy, batch_invariant: bool
) -> Rejected | None:
    if impl.vendor is not None and impl.vendor in policy.deny_vendors:
        return Rejected(f"deny_vendors holds '{impl.vendor}'", "denied_vendor")
    if (
        impl.vendor is not None
        and policy.allow_vendors is not None
        and impl.vendor not in policy.allow_vendors
    ):
        allowed = ", ".join(sorted(policy.allow_vendors)) or "nobody"
        return Rejected(f"allow_vendors admits {allowed}", "not_allowed_vendor")
    if impl.kind is BackendImplKind.DEFAULT:
        if op_name in policy.flagos_blacklist:
            return Rejected("the flagos blacklist holds this op", "flagos_list")
        if policy.flagos_whitelist is not None and op_name not in policy.flagos_whitelist:
            return Rejected("the flagos whitelist does not hold this op", "flagos_list")
    if batch_invariant and not impl.batch_invariant:
        return Rejected(
            "VLLM_BATCH_INVARIANT is on and it is not marked batch-invariant", "batch_invariant"
        )
    return None


def _as_refusal(verdict: Verdict) -> Rejected | None:
    return verdict if isinstance(verdict, Rejected) else None


def _guard_refusal(
    impl: OpImpl, facts: Mapping[str, Any] | None, call: Call | None
) -> Rejected | None:
    if facts is not None and impl.supports_layer is not None:
        try:
            verdict = as_verdict(
                impl.supports_layer(facts), default_reason="its layer guard says no"
            )
        except Exception as error:
            annotate_guard(error, impl, kwargs=facts)
            raise
        if isinstance(verdict, Rejected):
            return Rejected(verdict.reason, "layer_guard")
    if call is not None and impl.supports is not None:
        try:
            verdict = as_verdict(
                impl.supports(*call.args, **call.kwargs), default_reason="its call guard says no"
            )
        except Exception as error:
            annotate_guard(error, impl, call.args, call.kwargs)
            raise
        if isinstance(verdict, Rejected):
            return Rejected(verdict.reason, "call_guard")
    return None


def _loser(impl: OpImpl, refusal: Rejected) -> Loser:
    return Loser(impl.impl_id, refusal.code, refusal.reason)


def _behind(impl: OpImpl, usable: Sequence[OpImpl], device: DeviceFacts) -> Loser:
    if not usable:
        return Loser(impl.impl_id, "after_winner", f"comes after {NATIVE}")
    winner = usable[0]
    if _rank(winner, device) > _rank(impl, device):
        why = f"the policy puts {winner.impl_id} first"
    elif winner.priority > impl.priority:
        why = f"priority {int(impl.priority)} is below {winner.impl_id}'s {int(winner.priority)}"
    elif winner.vendor == device.vendor != impl.vendor:
        why = f"equal priority; {winner.impl_id} is the device's own vendor's"
    else:
        why = f"equal priority; {winner.impl_id} is the smaller id"
    return Loser(impl.impl_id, "after_winner", why)


def _reason(
    op_name: str,
    winner: OpImpl | None,
    native: bool,
    policy: SelectionPolicy,
    impls: Sequence[OpImpl],
    sources: Mapping[str, str],
    mode: str,
    fused: OpSignature | None,
) -> str:
    tokens = policy.order_for(op_name, mode)
    per_op = sources.get(f"per_op_order.{policy.order_key(op_name, mode)}", "the policy")
    if native and fused is not None and mode == "compiled":
        return LEFT_TO_COMPILER  # whatever the order says: see fusion.py
    if native and NATIVE not in tokens:
        unusable = f"; nothing that the order for {op_name} names can be used" if tokens else ""
        return (ONE_BY_ONE if mode == "eager" else LEFT_TO_COMPILER) + unusable
    if native:
        return f"the order for {op_name} names native (from {per_op})"
    if winner is None:
        if not impls:
            return "no implementation is registered"
        return "every implementation was rejected"
    if any(token_matches(token, winner) for token in tokens):
        return f"the order for {op_name} names it (from {per_op})"
    if policy.prefer == winner.kind.value:
        return f"prefer = {policy.prefer} (from {sources.get('prefer', 'the policy')})"
    return f"highest priority available ({int(winner.priority)})"


def describe_policy(
    op_name: str | None, policy: SelectionPolicy, sources: Mapping[str, str]
) -> dict[str, Any]:
    """The policy's fields that differ from the defaults: name to value and source.

    Args:
        op_name: of the per-op orders show this op's alone; None shows them all.
    """
    default = SelectionPolicy()
    described: dict[str, Any] = {}
    for name in (
        "prefer",
        "strict",
        "allow_vendors",
        "deny_vendors",
        "flagos_whitelist",
        "flagos_blacklist",
    ):
        value = getattr(policy, name)
        if value != getattr(default, name):
            shown = sorted(value) if isinstance(value, frozenset) else value
            described[name] = {"value": shown, "source": sources.get(name, "the policy")}
    for key, tokens in policy.per_op_order:
        if op_name is None or key.partition("@")[0] == op_name:
            described[f"op_backends.{key}"] = {
                "value": list(tokens),
                "source": sources.get(f"per_op_order.{key}", "the policy"),
            }
    return described
