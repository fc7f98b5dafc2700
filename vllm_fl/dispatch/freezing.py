# SPDX-License-Identifier: Apache-2.0
"""What a loaded model relies on, in words: orders, and what came too late."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from .decision import Decision, Loser, order_candidates
from .policy import MODES, NATIVE, SelectionPolicy
from .types import DeviceFacts, OpImpl

__all__ = ["LATE", "frozen_text", "order_text", "with_late_ones"]

LATE = "registered after the freeze; not used until thaw"


def frozen_text(what: str) -> str:
    """The error for a change to what is frozen."""
    return (
        f"{what}, but a loaded model relies on the present choice. Call thaw() on the manager "
        "first and build the model anew afterwards."
    )


def with_late_ones(
    decision: Decision, seen: Iterable[OpImpl], registered: Iterable[OpImpl]
) -> Decision:
    """A decision that also tells of implementations which the freeze left out."""
    ids = {impl.impl_id for impl in seen}
    late = tuple(Loser(i.impl_id, "late", LATE) for i in registered if i.impl_id not in ids)
    return replace(decision, losers=decision.losers + late) if late else decision


def order_text(
    op_name: str,
    impls: Sequence[OpImpl],
    policy: SelectionPolicy,
    device: DeviceFacts,
    usable: Collection[str],
) -> str:
    """Who can run, in order, with "native" where a layer could choose it.

    Args:
        usable: impl_ids of those that are available under the policy.
    """
    orders = []
    for mode in MODES:
        ordered, _ = order_candidates(op_name, impls, policy, device, mode)
        names = [c if isinstance(c, str) else c.impl_id for c in ordered]
        orders.append(", ".join(n for n in names if n == NATIVE or n in usable) or "nothing")
    return orders[0] if orders[0] == orders[1] else f"{orders[0]} (compiled: {orders[1]})"
