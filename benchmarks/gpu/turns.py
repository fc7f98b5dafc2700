# SPDX-License-Identifier: Apache-2.0
"""How several processes share one GPU: they get ready together, and are measured one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Lock", "Turns"]

_LOOK_SECONDS = 0.02


class Lock:
    """A file that processes lock: shared while they get ready, alone while they are measured. An
    engine that is ready leaves the GPU idle, so who holds the lock alone has the GPU to itself.

    Args:
        path: None: nothing else runs, and there is nothing to wait for.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[float]:
        start = time.monotonic()
        if self.path is None:
            yield 0.0
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # closing it lets go
            fcntl.flock(file, how)
            yield time.monotonic() - start

    def shared(self) -> contextlib.AbstractContextManager[float]:
        """While others get ready too; gives the seconds that were waited."""
        return self._held(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[float]:
        """While nobody else does anything; gives the seconds that were waited."""
        return self._held(fcntl.LOCK_EX)


class Turns:
    """Rounds in which a known number of processes take turns, always in the same order.

    Args:
        folder: theirs alone; empty at the start.
        index: of this process, from 0.
        count: how many there are.
        patience: seconds to wait for another's turn.
    """

    def __init__(self, folder: Path, index: int, count: int, patience: float = 180.0) -> None:
        self.folder, self.index, self.count, self.patience = folder, index, count, patience
        folder.mkdir(parents=True, exist_ok=True)

    def ready(self) -> None:
        """Wait until all are.

        Raises:
            TimeoutError: one is not, in time.
        """
        self._done("ready", self.index)
        self._wait([f"ready.{i}" for i in range(self.count)])

    @contextlib.contextmanager
    def turn(self, round_: int) -> Iterator[None]:
        """This process' turn in a round, counted from 0.

        Raises:
            TimeoutError: the one before did not finish in time.
        """
        if self.index:
            self._wait([f"{round_}.{self.index - 1}"])
        elif round_:
            self._wait([f"{round_ - 1}.{self.count - 1}"])
        yield
        self._done(str(round_), self.index)

    def _done(self, what: str, index: int) -> None:
        (self.folder / f"{what}.{index}").touch()

    def _wait(self, names: list[str]) -> None:
        end = time.monotonic() + self.patience
        while missing := [name for name in names if not (self.folder / name).exists()]:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"process {self.index} of {self.count} waited {self.patience:g} s for "
                    f"{', '.join(missing)} in {self.folder}: another process ended or is slow"
                )
            time.sleep(_LOOK_SECONDS)
