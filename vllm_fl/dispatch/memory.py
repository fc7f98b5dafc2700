# SPDX-License-Identifier: Apache-2.0
"""Remembering a bounded number of things."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["SCOPES_KEPT", "remember"]

K = TypeVar("K")
V = TypeVar("V")

SCOPES_KEPT = 64
"""A server that enters a policy context of its own for each request must not keep them all; what
is forgotten is worked out again."""


def remember(table: dict[K, V], key: K, value: V, *, limit: int = SCOPES_KEPT) -> V:
    """`table.setdefault(key, value)`, after the oldest entries made room. Needs no lock: threads
    that do this at once may forget one entry more."""
    while key not in table and len(table) >= limit:
        try:
            table.pop(next(iter(table)), None)
        except (StopIteration, RuntimeError):  # another thread changed it meanwhile
            continue
    return table.setdefault(key, value)
