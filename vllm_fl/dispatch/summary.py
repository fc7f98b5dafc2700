# SPDX-License-Identifier: Apache-2.0
"""What a process says of itself when it is ready, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .. import __version__
from .discovery import PluginRecord
from .log import logger
from .types import DeviceFacts

__all__ = ["hello", "say"]


def hello(
    device: DeviceFacts,
    op_names: Sequence[str],
    winner_of: Callable[[str], str],
    plugins: Iterable[PluginRecord],
) -> str:
    """Version, device, how many ops each implementation serves, and what failed.

    Args:
        winner_of: the impl_id that is chosen for an op; what it raises is told by a word here,
            and with its traceback to whoever binds the op.
    """
    served = dict[str, int]()
    for op_name in op_names:
        try:
            winner = winner_of(op_name)
        except Exception:
            winner = "a guard that raises"
        served[winner] = served.get(winner, 0) + 1
    by_backend = ", ".join(f"{name} {count}" for name, count in sorted(served.items()))
    failed = [f"{p.name} ({p.error})" for p in plugins if not p.ok]
    return (
        f"{__version__} on {device.device_class}: {len(op_names)} ops, served by "
        f"{by_backend or 'nothing'}; "
        + (f"FAILED plugins: {'; '.join(failed)}" if failed else "no plugin failed")
    )


def say(line: str, said: str) -> str:
    """Log the line, unless it is what was said before, as by the process that this one is a fork
    of; returns it."""
    if line != said:
        logger.info("%s", line)
    return line
