# SPDX-License-Identifier: Apache-2.0
"""Objects with locks, made usable again in a forked child.

One handler for the whole process walks the live objects. They are held weakly and in order
of creation: a registry is renewed before the manager that uses it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

__all__ = ["renew_all", "reset_in_child"]


class _Resettable(Protocol):
    def _after_fork_in_child(self) -> None: ...


_objects: list[weakref.ref[_Resettable]] = []


def reset_in_child(obj: _Resettable) -> None:
    """Call ``obj._after_fork_in_child()`` in every child forked from now on."""
    # list.append is atomic; the callback may run in any thread, so it only drops dead entries.
    _objects.append(weakref.ref(obj, _forget))


def _forget(reference: weakref.ref[_Resettable]) -> None:
    with contextlib.suppress(ValueError):
        _objects.remove(reference)


def renew_all() -> None:
    """Renew every live object. Only for a child in which nobody else runs yet."""
    for reference in list(_objects):
        obj = reference()
        if obj is not None:
            obj._after_fork_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=renew_all)
