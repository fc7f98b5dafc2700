# SPDX-License-Identifier: Apache-2.0
"""Short ways to say what the tests of the core say often."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import Config, OpImpl, OpManager, OpRegistry, OpSignature, SelectionPolicy
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, DeviceFacts

ROOT = Path(__file__).resolve().parents[2]
CPU = DeviceFacts("cpu", "cpu")
SCALE = OpSignature.parse("scale(x, factor=2)")
CHILD_LIMIT_S = 20
"""A child that has not answered by then hangs; on one busy core the slowest takes 1 s."""

_KINDS = {
    "default": (BackendImplKind.DEFAULT, BackendPriority.DEFAULT),
    "vendor": (BackendImplKind.VENDOR, BackendPriority.VENDOR),
    "reference": (BackendImplKind.REFERENCE, BackendPriority.REFERENCE),
}


def scale(x: Any, factor: Any = 2) -> Any:
    """An implementation of SCALE."""
    return x * factor


def make_impl(impl_id: str, fn: Callable[..., Any] = scale, **fields: Any) -> OpImpl:
    """An implementation of `scale`; kind, vendor and priority follow from its id."""
    head, _, tail = impl_id.partition(".")
    kind, priority = _KINDS[head]
    fields.setdefault("op_name", "scale")
    fields.setdefault("priority", priority)
    if head == "vendor":
        fields.setdefault("vendor", tail.partition(".")[0])
    return OpImpl(impl_id=impl_id, kind=kind, fn=fn, **fields)


def returning(answer: Any) -> Callable[..., Any]:
    """An implementation of SCALE whose result tells that it ran."""

    def fn(x: Any, factor: Any = 2) -> Any:
        return answer

    return fn


def make_manager(
    *impls: OpImpl,
    signatures: Iterable[OpSignature] = (SCALE,),
    device: DeviceFacts = CPU,
    config: Config | None = None,
    **policy: Any,
) -> OpManager:
    """A manager of its own, with these declarations and implementations registered by hand."""
    registry = OpRegistry()
    for signature in signatures:
        registry.declare(signature)
    registry.register_many(impls)
    config = config or Config(policy=SelectionPolicy(**policy))
    return OpManager(registry, config=config, device=device)


def codes(decision: Any) -> dict[str, str]:
    """impl_id to code, for each loser of a decision."""
    return {loser.impl_id: loser.code for loser in decision.losers}


def reasons(decision: Any) -> dict[str, str]:
    """impl_id to reason, for each loser of a decision."""
    return {loser.impl_id: loser.reason for loser in decision.losers}


class Buffer:
    """As much of a tensor as the dispatcher touches: it can be written, cloned and described."""

    dtype = "torch.float32"

    def __init__(self, value: int) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return (2, 8)

    def stride(self) -> tuple[int, ...]:
        return (8, 1)

    def clone(self) -> Buffer:
        return Buffer(self.value)


def run_python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Run code in a fresh interpreter and return what it printed, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_child(work: Callable[[], Any], *, fork: Callable[[], int] = os.fork) -> Any:
    """Fork, do the work in the child, and return its JSON-ready result.

    Fails if the child raises, dies, or does not answer in time.
    """
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in processes with threads, which is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(CHILD_LIMIT_S)
            os.close(readable)
            try:
                answer = {"result": work()}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(writable, json.dumps(answer).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    try:
        text = _read_all(readable)
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)  # it has answered, or it hangs
        os.waitpid(pid, 0)
    assert text, "the child hung or died without an answer"
    answer = json.loads(text)
    assert "error" not in answer, answer["error"]
    return answer["result"]


def _read_all(fd: int) -> bytes:
    text, end = b"", time.monotonic() + CHILD_LIMIT_S
    while (left := end - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        piece = os.read(fd, 65536)
        if not piece:
            break
        text += piece
    return text
