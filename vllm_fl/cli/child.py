# SPDX-License-Identifier: Apache-2.0
"""Asks a child process, because what is to be found out may end the process that asks.

A plugin may crash when it is imported, an extension may take the interpreter down, a driver may
hang. The child is told the question and where to write its answer (`probes.py`); on its way it
says what it is about to do, so that the parent knows what was being done when it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .errors import CommandError, UsageError

__all__ = ["Reply", "ask", "questions", "survey"]

TIMEOUT_S = 180
"""Importing vLLM takes 6 s here; on a machine with a cold disk, many times that."""

LOG_LINES = 20
CRASHES_TOLD = 8

_stopping = threading.Event()
"""Set while the questions of other threads are to end without an answer."""


class _Stopped(BaseException):
    """Nobody waits for the answer any more."""


_BOOT = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from vllm_fl.cli.probes import reply; reply(given)"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a question.

    Attributes:
        answer: the answer, or None.
        error: {"text", "usage"} where the child could tell what went wrong.
        ended: how the child ended without an answer, e.g. "was killed by SIGSEGV".
        doing: what it was doing then: a word and a name, e.g. ("plugin", "acme").
        log: the last lines of what it wrote to stderr, where that was kept.
        seconds: how long it took.
    """

    answer: dict[str, Any] | None
    error: dict[str, Any] | None
    ended: str | None
    doing: tuple[str, ...] | None
    log: tuple[str, ...]
    seconds: float


@contextlib.contextmanager
def questions(at_once: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that ask. Where the block is left by an exception, Ctrl-C among them, they stop
    asking and end their children: a pool by itself would wait for every answer."""
    try:
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            try:
                yield pool
            except BaseException:
                _stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        _stopping.clear()


def ask(
    question: str, arguments: Mapping[str, Any], *, timeout: float = TIMEOUT_S, quiet: bool = False
) -> Reply:
    """Ask one question of `probes.py` in a child process.

    Args:
        quiet: keep the child's stderr in the reply instead of passing it on.
    """
    started = time.monotonic()
    readable, writable = os.pipe()
    given = {"question": question, "arguments": arguments, "path": sys.path, "pipe": writable}
    with tempfile.TemporaryFile() as log, os.fdopen(readable, "rb", buffering=0) as pipe:
        stderr = log if quiet else None
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=log if quiet else 2,
                stderr=stderr,
                pass_fds=(writable,),
                start_new_session=True,  # so that what it starts can be ended with it
            )
        finally:
            os.close(writable)
        try:
            messages, timed_out = _messages(process, pipe, started + timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    last = messages[-1] if messages else {}
    doing = next((m["doing"] for m in reversed(messages) if "doing" in m), None)
    ended = None
    if "answer" not in last and "error" not in last:
        ended = f"gave no answer in {timeout:.0f} s" if timed_out else _ending(process.returncode)
    return Reply(
        answer=last.get("answer"),
        error=last.get("error"),
        ended=ended,
        doing=None if doing is None else tuple(doing),
        log=tuple(tail),
        seconds=time.monotonic() - started,
    )


def _messages(
    process: subprocess.Popen[bytes], pipe: Any, deadline: float
) -> tuple[list[dict[str, Any]], bool]:
    """What the child says until it answers, ends, or the time is over; and whether that was it.

    The end of the pipe is not waited for: a process that the child left behind may hold it open.
    """
    text = b""
    while True:
        if _stopping.is_set():
            raise _Stopped
        ended = process.poll() is not None
        while select.select([pipe], [], [], 0 if ended else 0.1)[0]:
            piece = pipe.read(65536)
            text += piece
            if not piece:
                ended = True
                break
        lines = text.split(b"\n")[:-1]
        if ended or (lines and not lines[-1].startswith(b'{"doing"')):
            if process.poll() is None and ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            return [json.loads(line) for line in lines], False
        if time.monotonic() > deadline:
            return [json.loads(line) for line in lines], True


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def survey(question: str, *, quiet: bool = False, **arguments: Any) -> dict[str, Any]:
    """Ask until there is an answer, each time without what ended the child before.

    What was left out is in the answer: a plugin as a failed one, a probe as a refusal.

    Raises:
        UsageError: the question names something that is not there.
        CommandError: there is no answer, with how the child ended.
    """
    left_out: list[tuple[tuple[str, ...], str]] = []
    while True:
        skip = [[list(doing), how] for doing, how in left_out]
        reply = ask(question, {**arguments, "skip": skip}, quiet=quiet)
        if reply.answer is not None:
            return reply.answer
        if reply.error is not None:
            raise (UsageError if reply.error["usage"] else CommandError)(reply.error["text"])
        known = [doing for doing, _ in left_out]
        if reply.doing is None or reply.doing in known or len(known) == CRASHES_TOLD:
            what = f" ({' '.join(reply.doing)})" if reply.doing else ""
            raise CommandError(
                f"the process that was asked {reply.ended}{what}. "
                + "\n".join(("Its last words:", *reply.log) if reply.log else ())
            )
        left_out.append((reply.doing, f"the process that tried it {reply.ended}"))
