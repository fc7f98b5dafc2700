# SPDX-License-Identifier: Apache-2.0
"""A command that is told to end ends as one that fails: what it started and wrote is cleared away.

By default SIGTERM and SIGHUP end a Python process on the spot, so no `finally` runs: child
processes go on, and half-written folders stay. Here they are raised as exceptions, as SIGINT is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Ended", "raised_as_exceptions"]

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # fmt: skip


class Ended(BaseException):
    """This process was told to end; no `except Exception` is to stop it.

    Attributes:
        signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def raised_as_exceptions() -> Iterator[None]:
    """Raise Ended in the main thread where the block gets a signal that would end the process.

    A signal that is ignored, as SIGHUP is under nohup, or that somebody handles, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what becomes of a signal
        return
    here = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != here:  # in a fork, which inherits this and clears nothing away
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        raise Ended(signum)

    ours = [signum for signum in _SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in ours:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in ours:
            if signal.getsignal(signum) is end:
                signal.signal(signum, signal.SIG_DFL)
