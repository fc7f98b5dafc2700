# SPDX-License-Identifier: Apache-2.0
"""The process in which implementations run, because they may crash or hang.

On the CPU it is a fork: any function can be checked, closures too, and starting one takes
milliseconds. A device that was used once cannot be used in a fork, so for others it is a new
interpreter (`python -m vllm_fl.testing.child`), which finds the implementations by their ids or
unpickles them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..dispatch import get_default_manager
from ..dispatch.errors import DispatchError
from ..dispatch.types import OpImpl
from .check import Checker
from .contracts import contract_at, home_of
from .memory import synchronize
from .report import CaseResult
from .target import Target

__all__ = ["Child", "Job", "start", "warm_up"]

_DEVICE_LOST = 70
"""The exit code of a child whose device failed."""

_LOOK_SECONDS = 2.0
"""How often a child without work looks whether its parent is still there."""

_TAIL = 3
"""Lines of what a child wrote before it died that are shown."""


@dataclass(frozen=True, slots=True)
class Job:
    """One case of one target; dtype and case by name."""

    target: int
    dtype: str
    case: str


class _Process(Protocol):
    """What a process of either kind is asked."""

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...

    def code(self) -> int | None: ...


class Child:
    """The parent's end of a child process."""

    def __init__(self, process: _Process, connection: Connection, log: Path) -> None:
        self.process = process
        self.connection = connection
        self.log = log
        self.jobs: list[Job] = []

    def send(self, job: Job) -> None:
        """Give it a case to check."""
        self.jobs.append(job)
        self.connection.send(job)

    def receive(self) -> CaseResult:
        """Its answer.

        Raises:
            EOFError: it ended instead.
            RuntimeError: the kit itself failed in there; holds the traceback.
        """
        try:
            answer = self.connection.recv()
        except OSError as error:  # it ended in the middle of an answer
            raise EOFError from error
        if isinstance(answer, str):
            raise RuntimeError(f"the conformance kit failed in a child process:\n{answer}")
        assert isinstance(answer, CaseResult)
        return answer

    def epitaph(self) -> str:
        """How it ended, and the last that it wrote."""
        code = self.process.code()
        how = "ended without an answer" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"died of signal {_signal_name(-code)}"
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                how += f"; it wrote: {' | '.join(lines[-_TAIL:])}"
        return how

    def close(self) -> None:
        """End it, if it has not ended."""
        self.connection.close()
        self.process.kill()
        with contextlib.suppress(OSError):
            self.log.unlink()


def start(targets: Sequence[Target], device: str, method: str) -> Child:
    """Start a child process.

    Args:
        targets: what jobs refer to, by index.
        method: "fork" or "spawn".

    Raises:
        DispatchError: an implementation cannot be brought into a new process.
    """
    packed = [] if method == "fork" else [_packed(target) for target in targets]
    mine, its = multiprocessing.Pipe()
    descriptor, name = tempfile.mkstemp(prefix="vllm_fl-verify-", suffix=".log")
    process: _Process
    try:
        if method == "fork":
            process = _Forked(targets, device, its, descriptor)
        else:
            process = _Spawned(its, descriptor)
            mine.send((device, packed))
    finally:
        its.close()
        os.close(descriptor)
    return Child(process, mine, Path(name))


@functools.cache
def warm_up(compiler: bool) -> None:
    """Import what every fork would else import for itself: 0.9 s, with the compiler 3 s."""
    with FakeTensorMode() as mode:
        mode.from_tensor(torch.empty(2, 3)).new_empty(2)
    if compiler:
        for module in ("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"):
            importlib.import_module(module)


class _Forked:
    def __init__(
        self, targets: Sequence[Target], device: str, connection: Connection, log: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_serve_in_fork, args=(targets, device, connection, log), daemon=True
        )
        with warnings.catch_warnings():
            # Python warns of a fork beside threads. The child uses none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def code(self) -> int | None:
        self._process.join(timeout=5)
        return self._process.exitcode


class _Spawned:
    def __init__(self, connection: Connection, log: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_fl.testing.child", str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return self._process.returncode


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


# ---------------------------------------------------------------- into a new interpreter


def _packed(target: Target) -> tuple[str | None, str, Any]:
    """(module of the contract, op, impl id or the pickled implementation)."""
    contract, impl = target.contract, target.impl
    home = home_of(contract, impl)
    if home is None:
        raise DispatchError(
            f"the contract of {contract.name} cannot be found from a new process; put it into a "
            f"tuple CONTRACTS in the module of {impl.impl_id}'s function, or in a package above"
        )
    if impl.origin is not None and impl.origin.source != "manual":
        return home, contract.name, impl.impl_id
    try:
        return home, contract.name, pickle.dumps(impl)
    except Exception as error:
        raise DispatchError(
            f"{impl.impl_id} of {contract.name} cannot be brought into a new process ({error}); "
            "make its functions module-level ones, or register it through a plugin"
        ) from error


def _unpacked(packed: tuple[str, str, Any]) -> Target:
    home, op_name, which = packed
    if isinstance(which, bytes):
        return Target(contract_at(home, op_name), pickle.loads(which))  # from our own parent
    manager = get_default_manager()
    manager.ensure_initialized()
    found: OpImpl | None = manager.registry.get_implementation(op_name, which)
    if found is None:
        raise LookupError(f"{op_name} has no implementation {which} in the new process")
    return Target(contract_at(home, op_name), found)


# ---------------------------------------------------------------------- inside the child


def _serve_in_fork(
    targets: Sequence[Target], device: str, connection: Connection, log: int
) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Whoever replaced these in the parent, as a test runner does, is not to hear of it.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    # The parent's OpenMP threads do not exist here: a kernel that waited for them would hang.
    torch.set_num_threads(1)
    _serve(targets, device, connection)


def _serve(targets: Sequence[Target], device: str, connection: Connection) -> None:
    _settle()
    parent = os.getppid()
    checkers: dict[int, Checker] = {}
    while True:
        while not connection.poll(_LOOK_SECONDS):
            if os.getppid() != parent:
                return
        try:
            job = connection.recv()
        except EOFError:
            return
        answer: CaseResult | str
        lost: str | None = None
        try:
            if job.target not in checkers:
                checkers[job.target] = Checker(targets[job.target], device)
            answer = checkers[job.target].check(job.dtype, job.case)
        except Exception as error:
            import traceback

            answer = traceback.format_exc()
            if isinstance(error, torch.AcceleratorError):  # of a launch, told at a later call
                lost = str(error).splitlines()[0]
        lost = lost or _device_error(device)
        if lost is not None:
            # Every later call would fail with the same error: the case counts as a crash, and
            # the next one gets a process of its own.
            os.write(2, f"the device failed: {lost}\n".encode())
            os._exit(_DEVICE_LOST)
        connection.send(answer)


def _device_error(device: str) -> str | None:
    """What the device says after a kernel that it did not survive, or None: it is well."""
    try:
        synchronize(device)
    except Exception as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def _settle() -> None:
    """Die without a dump, leave Ctrl-C to the parent, and keep warnings out of the way."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a parent's handler is no business of a fork
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    torch.set_num_threads(1)  # there are as many of us as there are workers
    connection = Connection(int(sys.argv[1]))
    device, packed = connection.recv()
    _serve([_unpacked(p) for p in packed], device, connection)


if __name__ == "__main__":
    _main()
