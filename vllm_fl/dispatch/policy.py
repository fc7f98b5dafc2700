# SPDX-License-Identifier: Apache-2.0
"""SelectionPolicy, its order tokens, and the context managers that change it for a while."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import ConfigError, did_you_mean
from .types import BackendImplKind, OpImpl

__all__ = [
    "MODES",
    "NATIVE",
    "PolicyScope",
    "SelectionPolicy",
    "active_scope",
    "check_kind",
    "check_order_key",
    "check_token",
    "in_scope",
    "policy_context",
    "token_matches",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

NATIVE = "native"
"""The order token for vLLM's own forward."""

MODES = ("eager", "compiled")
"""The two questions: is the layer's forward run as it is, or traced by the compiler?"""

_KINDS = tuple(kind.value for kind in BackendImplKind)
TOKEN_FORMS = (*_KINDS, "vendor:<name>", "impl:<impl_id>", NATIVE)


@dataclass(frozen=True, slots=True)
class SelectionPolicy:
    """Reorders or removes candidates; where it says nothing, priority decides.

    Attributes:
        prefer: "flagos", "vendor" or "reference": this kind first, the others after it.
        strict: plugin errors raise, and a guard's rejection of the first choice is an error.
        per_op_order: op name to order tokens ("flagos", "vendor", "vendor:<name>",
            "reference", "impl:<impl_id>", "native"). Takes a mapping or pairs. The key
            "op@eager" or "op@compiled" is for that mode and goes before "op". Under
            strict the order is closed, otherwise the default order follows it.
            "native" is chosen, or not, when a layer is built; a call that the chosen
            implementation's guard refuses goes to the next implementation.
        allow_vendors: only these vendors' implementations; None allows all.
        deny_vendors: not these vendors' implementations.
        flagos_whitelist: only these ops may use kind flagos; None allows all.
        flagos_blacklist: these ops may not use kind flagos.
    """

    prefer: str | None = None
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    flagos_whitelist: frozenset[str] | None = None
    flagos_blacklist: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.prefer is not None:
            set_(self, "prefer", check_kind(self.prefer))
        if not isinstance(self.strict, bool):
            raise ConfigError(f"SelectionPolicy: strict must be a bool, found {self.strict!r}")
        set_(self, "per_op_order", _freeze_orders(self.per_op_order))
        for name in ("allow_vendors", "flagos_whitelist"):
            value = getattr(self, name)
            set_(self, name, None if value is None else _freeze_names(name, value))
        for name in ("deny_vendors", "flagos_blacklist"):
            set_(self, name, _freeze_names(name, getattr(self, name)))

    def order_for(self, op_name: str, mode: str = "eager") -> tuple[str, ...]:
        """The order tokens of an op in a mode; empty where the policy does not name it."""
        return dict(self.per_op_order).get(self.order_key(op_name, mode), ())

    def order_key(self, op_name: str, mode: str) -> str:
        """The key under which the order of an op in a mode is given: "op@mode", else "op"."""
        split = f"{op_name}@{mode}"
        return split if any(key == split for key, _ in self.per_op_order) else op_name


def check_token(token: object) -> str:
    """Return the order token, or raise ConfigError naming the valid forms."""
    if isinstance(token, str):
        head, _, tail = token.partition(":")
        if token in (*_KINDS, NATIVE) or (head in ("vendor", "impl") and tail):
            return token
    raise ConfigError(
        f'unknown order token "{token}"; valid: {", ".join(TOKEN_FORMS)}.'
        f"{did_you_mean(str(token), (*_KINDS, NATIVE))}"
    )


def check_order_key(key: str) -> str:
    """Return the key of an order ("op", "op@eager" or "op@compiled"), or raise ConfigError."""
    _, separator, mode = str(key).partition("@")
    if separator and mode not in MODES:
        raise ConfigError(
            f'"{key}": unknown mode "{mode}"; valid: {", ".join(MODES)}.{did_you_mean(mode, MODES)}'
        )
    return str(key)


def token_matches(token: str, impl: OpImpl) -> bool:
    """Whether an order token names an implementation ("native" names none)."""
    head, _, tail = token.partition(":")
    if head == "impl":
        return impl.impl_id == tail
    if head == "vendor" and tail:
        return impl.vendor == tail
    return impl.kind.value == token


def check_kind(value: object) -> str:
    """Return the kind's word, or raise ConfigError naming the valid ones."""
    text = value.value if isinstance(value, BackendImplKind) else value
    if text not in _KINDS:
        raise ConfigError(
            f'unknown kind "{value}"; valid: {", ".join(_KINDS)}.{did_you_mean(str(value), _KINDS)}'
        )
    return str(text)


def _freeze_orders(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    orders: dict[str, tuple[str, ...]] = {}
    try:
        entries = [(op_name, tokens) for op_name, tokens in pairs]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError(
            f"per_op_order must map op names to lists of order tokens, found {value!r}"
        ) from None
    for op_name, tokens in entries:
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ConfigError(
                f"per_op_order: the order of '{op_name}' must be a list of tokens, found {tokens!r}"
            )
        if op_name in orders:
            raise ConfigError(f"per_op_order: the op '{op_name}' is given twice")
        check_order_key(op_name)
        orders[op_name] = tuple(check_token(token) for token in tokens)
    return tuple(sorted(orders.items()))


def _freeze_names(field: str, value: object) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{field} must be a collection of names, found {value!r}")
    names = frozenset(value)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field} must hold strings, found {value!r}")
    return names


@dataclass(frozen=True, slots=True)
class PolicyScope:
    """What the policy contexts around some code say, as one change.

    It is applied to the policy of whichever manager decides, at the moment when it decides.

    Attributes:
        policy: the policy of the innermost `policy_context`; None: the manager's own.
        changes: what the helpers inside of it change: field to value, in the order of names.
    """

    policy: SelectionPolicy | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    def applied_to(self, base: SelectionPolicy) -> SelectionPolicy:
        """The policy in force where `base` is the manager's own."""
        policy = base if self.policy is None else self.policy
        changes = dict(self.changes)
        if "deny_vendors" in changes:
            changes["deny_vendors"] |= policy.deny_vendors
        return replace(policy, **changes)

    def with_change(self, name: str, value: Any) -> PolicyScope:
        """This scope with one more change."""
        changes = dict(self.changes)
        if name == "deny_vendors":  # denials add up, whoever says them
            value = value | changes.get(name, frozenset())
        changes[name] = value
        return replace(self, changes=tuple(sorted(changes.items())))


_active: contextvars.ContextVar[PolicyScope | None] = contextvars.ContextVar(
    "vllm_fl_policy", default=None
)


def active_scope() -> PolicyScope | None:
    """What the contexts of this thread or task say; None outside of any."""
    return _active.get()


@contextlib.contextmanager
def in_scope(scope: PolicyScope | None) -> Iterator[None]:
    """Enter the contexts that were active elsewhere, in place of those active here."""
    token = _active.set(scope)
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Use `policy` for what this thread or asyncio task resolves, calls, explains, binds, and
    for layers it builds, until the block ends."""
    if not isinstance(policy, SelectionPolicy):
        raise ConfigError(
            f"policy_context() takes a SelectionPolicy, found {type(policy).__name__}"
        )
    with in_scope(PolicyScope(policy)):
        yield policy


def _change(name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    return in_scope((_active.get() or PolicyScope()).with_change(name, value))


@contextlib.contextmanager
def with_preference(prefer: str | BackendImplKind) -> Iterator[None]:
    """The policy in force, with this kind first."""
    with _change("prefer", check_kind(prefer)):
        yield


@contextlib.contextmanager
def with_strict_mode() -> Iterator[None]:
    """The policy in force, strict."""
    with _change("strict", True):
        yield


@contextlib.contextmanager
def with_allowed_vendors(*vendors: str) -> Iterator[None]:
    """The policy in force, with these vendors' implementations only."""
    with _change("allow_vendors", _freeze_names("with_allowed_vendors", vendors)):
        yield


@contextlib.contextmanager
def with_denied_vendors(*vendors: str) -> Iterator[None]:
    """The policy in force, without these vendors' implementations."""
    with _change("deny_vendors", _freeze_names("with_denied_vendors", vendors)):
        yield
