# SPDX-License-Identifier: Apache-2.0
"""The process's default manager, and the functions that go through it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .binding import annotate_call
from .decision import Decision
from .fork import reset_in_child
from .manager import OpManager

__all__ = ["call_op", "explain_op", "get_default_manager", "reset_default_manager", "resolve_op"]


class _Default:
    """The process's default manager, made at first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.manager: OpManager | None = None
        reset_in_child(self)

    def _after_fork_in_child(self) -> None:
        self.lock = threading.Lock()


_default = _Default()


def get_default_manager() -> OpManager:
    """The manager that call_op, resolve_op, explain_op and the vLLM plugin share."""
    manager = _default.manager
    if manager is None:
        with _default.lock:
            manager = _default.manager
            if manager is None:
                manager = _default.manager = OpManager()
    return manager


def reset_default_manager() -> None:
    """Forget the default manager; the next use makes a new one from the environment."""
    with _default.lock:
        _default.manager = None


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an op through the default manager."""
    # OpManager.call once more, because passing the arguments on through it costs 100 ns.
    binding = (_default.manager or get_default_manager())._binding(op_name)
    try:
        return binding.fn(*args, **kwargs)
    except Exception as error:
        annotate_call(error, binding, args, kwargs)
        raise


def resolve_op(op_name: str, /) -> Callable[..., Any]:
    """The default manager's callable for an op."""
    return get_default_manager().resolve(op_name)


def explain_op(op_name: str, /, *args: Any, **kwargs: Any) -> Decision:
    """What the default manager would run for these arguments, and why."""
    return get_default_manager().explain(op_name, *args, **kwargs)
