# SPDX-License-Identifier: Apache-2.0
"""What is registered and what becomes of it on this device, as JSON-ready data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dispatch.binding import reachable
from ..dispatch.decision import Decision, describe_policy
from ..dispatch.errors import DispatchError
from ..dispatch.manager import OpManager
from ..dispatch.policy import MODES
from ..dispatch.registry import OpRegistrySnapshot
from ..dispatch.types import BackendImplKind, OpImpl, Origin

__all__ = ["inventory", "note_of"]


def inventory(manager: OpManager) -> dict[str, Any]:
    """The registry and the choices of a manager.

    Returns:
        enabled, device, config, policy, fingerprint, plugins, vendors, ops (name to signature,
        summary, winner, why, closest), implementations (one entry each, with availability,
        origin, and why it is never selected), ties, behind (vendors' implementations that lose to
        FlagGems by priority alone).
    """
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot()
    device = manager.device
    closest = snapshot.undeclared()
    ops: dict[str, Any] = {}
    implementations: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []
    for op in sorted({*snapshot.declarations, *snapshot.impls_by_op}):
        impls = snapshot.impls_by_op.get(op, ())
        verdicts = {impl.impl_id: impl.availability(device) for impl in impls}
        decisions, problem = _decisions(manager, op)
        eager = decisions.get("eager")
        signature = snapshot.declarations.get(op)
        ops[op] = {
            "signature": None if signature is None else str(signature),
            "summary": "" if signature is None else signature.summary,
            "selector": signature is not None and signature.selector,
            "winner": None if eager is None else eager.winner_id,
            "why": problem if eager is None else eager.reason,
            "closest": closest.get(op),
        }
        facts_known = signature is None or signature.facts is None
        for impl in impls:
            verdict = verdicts[impl.impl_id]
            never = _never(impl, decisions, facts_known=facts_known)
            implementations.append(
                {
                    **_described(impl),
                    "declared": signature is not None,
                    "available": bool(verdict),
                    "reason": getattr(verdict, "reason", ""),
                    "never_selected": never,
                }
            )
        if eager is not None:
            ties += _ties(eager, snapshot)
            behind += _behind(eager)
    return {
        "enabled": manager.config.enabled,
        "device": {
            "vendor": device.vendor,
            "device_type": device.device_type,
            "device_class": device.device_class,
            "name": device.name,
            "arch": device.arch,
        },
        "config": manager.config.to_dict(),
        "policy": describe_policy(None, manager.base_policy, manager.config.sources),
        "fingerprint": manager.fingerprint(),
        "plugins": [record.to_dict() for record in manager.get_discovered_plugins()],
        "vendors": {n: v.device_type for n, v in sorted(snapshot.known_vendors().items())},
        "ops": ops,
        "implementations": implementations,
        "ties": ties,
        "behind": behind,
    }


def _described(impl: OpImpl) -> dict[str, Any]:
    backend = impl.backend
    types = None if backend is None else backend.device_types
    vendors = getattr(backend, "vendors", None)
    return {
        "op": impl.op_name,
        "impl_id": impl.impl_id,
        "kind": impl.kind.value,
        "vendor": impl.vendor,
        "priority": int(impl.priority),
        "device_types": None if types is None else list(types),
        "vendors": None if vendors is None else list(vendors),
        "requires": [] if backend is None else list(backend.requires),
        "mutates": list(impl.mutates),
        "guards": [n for n in ("supports_layer", "supports") if getattr(impl, n) is not None],
        "batch_invariant": impl.batch_invariant,
        "api_version": impl.api_version,
        "note": note_of(impl),
        "origin": _origin(impl.origin),
        "module": impl.origin.module if impl.origin is not None else "",
    }


def note_of(impl: OpImpl) -> str:
    """What its backend says of how it runs here; a vendor's object may have no such method."""
    note = getattr(impl.backend, "note", None)
    try:
        return str(note()) if callable(note) else ""
    except Exception as error:
        return f"as nobody knows: its note raised {type(error).__name__}: {error}"


def _origin(origin: Origin | None) -> str:
    """The package and its version, where known; else what registered it."""
    if origin is None:
        return ""
    return f"{origin.package} {origin.version}".strip() or str(origin)


def _decisions(manager: OpManager, op: str) -> tuple[dict[str, Decision], str]:
    """The decision in each mode, and why there is none where a guard raises."""
    try:
        return {mode: manager.decide(op, mode=mode) for mode in MODES}, ""
    except DispatchError as error:
        return {}, str(error)
    except Exception as error:  # an op without facts has its layer guards asked
        return {}, f"a guard raised {type(error).__name__}: {error}"


def _never(
    impl: OpImpl, decisions: Mapping[str, Decision], *, facts_known: bool
) -> dict[str, str] | None:
    """Why an implementation can never be selected here, in any mode; None if it can."""
    why: dict[str, str] | None = None
    for decision in decisions.values():
        chain = reachable(decision.candidates, facts_known=facts_known)
        if impl in chain:
            return None
        loser = next((entry for entry in decision.losers if entry.impl_id == impl.impl_id), None)
        if loser is None:
            return None
        if loser.was_rejected:
            why = why or {"code": loser.code, "reason": loser.reason}
        else:
            before = chain[-1].impl_id if chain else decision.winner_id
            why = why or {"code": "never_reached", "reason": f"{before} takes every call"}
    return why


def _behind(decision: Decision) -> list[dict[str, Any]]:
    """Vendors' implementations that could run, and that FlagGems' priority is before."""
    winner = decision.winner
    if winner is None or winner.kind is not BackendImplKind.DEFAULT or not decision.by_priority:
        return []
    return [
        {
            "op": decision.op,
            "impl_id": impl.impl_id,
            "priority": int(impl.priority),
            "winner": winner.impl_id,
            "winners_priority": int(winner.priority),
        }
        for impl in decision.candidates
        if impl.kind is BackendImplKind.VENDOR
    ]


def _ties(decision: Decision, snapshot: OpRegistrySnapshot) -> list[dict[str, Any]]:
    """Implementations of different vendors that priority does not tell apart, where one of them
    was chosen."""
    winner = decision.winner
    if winner is None or winner.vendor is None:
        return []
    equal = [i for i in decision.candidates if i.priority == winner.priority and i.vendor]
    if len({impl.vendor for impl in equal}) < 2:
        return []
    if not decision.by_priority:
        settled = "the policy"
    elif winner.vendor == decision.device.vendor:
        settled = "it is the device's own vendor's"
    else:
        settled = "the smaller id"
    return [
        {
            "op": decision.op,
            "priority": int(winner.priority),
            "winner": winner.impl_id,
            "others": [impl.impl_id for impl in equal if impl is not winner],
            "settled_by": settled,
        }
    ]
