# SPDX-License-Identifier: Apache-2.0
"""Runs cases in child processes: a crash or a hang is a failed case, and the next one runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from types import TracebackType

import torch

from ..dispatch.errors import DispatchError
from ..dispatch.types import OpImpl, Rejected
from ..ops.contract import OpContract
from .cases import COMPILE, cases_of, dtype_name, dtype_of
from .child import Child, Job, start, warm_up
from .contracts import contract_of
from .report import CaseResult, Kind, Report, Skip
from .target import Target, device_facts

__all__ = ["TIMEOUT", "Runner", "check_implementation", "jobs_of"]

TIMEOUT = 60.0
"""Seconds that a case may take. The slowest here takes 2, on 2 cores shared with other work."""

_LOADING = 300.0
"""Seconds more for the first case of a backend, which imports its kernels, and for torch.compile,
which imports the compiler: 10 to 20 on 2 busy cores."""

_POLL = 0.2


@dataclass(slots=True)
class _Running:
    """A job that a child is at."""

    index: int
    job: Job
    deadline: float
    note: str


class Runner:
    """Child processes for a set of targets; they are kept from one `run` to the next.

    Args:
        targets: what jobs refer to, by index.
        device: where the tensors are, as torch names it.
        start_method: "fork" or "spawn"; None takes fork on the CPU and spawn elsewhere.
        timeout: seconds that a case may take.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        device: str = "cpu",
        start_method: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.targets = targets
        self.device = device
        self.timeout = timeout
        self._method = start_method or ("fork" if device == "cpu" else "spawn")
        self._idle: list[Child] = []
        self._busy: dict[Child, _Running] = {}

    def run(
        self,
        jobs: Iterable[Job],
        *,
        workers: int = 1,
        on_result: Callable[[CaseResult], None] | None = None,
    ) -> list[CaseResult]:
        """Run jobs, and return their results in the order of the jobs.

        Args:
            workers: child processes at a time.
            on_result: called with each result as it comes.

        Raises:
            DispatchError: an implementation cannot be brought into a new process.
            RuntimeError: the kit itself failed.
        """
        waiting = deque((index, job, "") for index, job in enumerate(jobs))
        if self._method == "fork":
            warm_up(False)
            if any(job.case == COMPILE for _, job, _ in waiting):
                warm_up(True)
        results: dict[int, CaseResult] = {}

        def done(running: _Running, result: CaseResult) -> None:
            if running.note:
                problem = (Kind.CRASH, running.note)
                result = replace(result, problems=(*result.problems, problem), reason=None)
            results[running.index] = result
            if on_result is not None:
                on_result(result)

        while waiting or self._busy:
            while waiting and len(self._busy) < workers:
                self._give(*waiting.popleft())
            wait([child.connection for child in self._busy], timeout=_POLL)
            for child, running in list(self._busy.items()):
                answer = self._look(child, running)
                if isinstance(answer, CaseResult):
                    done(running, answer)
                elif answer is not None:
                    waiting.appendleft(answer)
        return [results[index] for index in sorted(results)]

    def _look(self, child: Child, running: _Running) -> CaseResult | tuple[int, Job, str] | None:
        """The result of the case that a child is at, the case again, or None: not yet."""
        alive = child.process.is_alive()  # asked first: what it sent before it died counts
        if child.connection.poll():
            try:
                result = child.receive()
            except EOFError:
                return self._died(child, running)
            self._idle.append(child)
            del self._busy[child]
            return result
        if not alive:
            return self._died(child, running)
        if time.monotonic() > running.deadline:
            self._drop(child)
            text = f"no answer within {self.timeout:g} s; its process was ended"
            return self._failed(running.job, Kind.HANG, text)
        return None

    def _give(self, index: int, job: Job, note: str) -> None:
        # A case that runs once more after a crash runs in a process of its own.
        child = None
        while child is None:
            fresh = bool(note) or not self._idle
            child = start(self.targets, self.device, self._method) if fresh else self._idle.pop()
            allowed = self.timeout
            known = {self.targets[j.target].impl.impl_id for j in child.jobs}
            backend = self.targets[job.target].impl.backend
            if backend is not None and self.targets[job.target].impl.impl_id not in known:
                allowed += _LOADING
            if job.case == COMPILE or (fresh and self._method == "spawn"):
                allowed += _LOADING
            try:
                child.send(job)
            except OSError:  # it died while it had nothing to do
                child.close()
                child = None
        self._busy[child] = _Running(index, job, time.monotonic() + allowed, note)

    def _died(self, child: Child, running: _Running) -> CaseResult | tuple[int, Job, str]:
        """The result of a case whose process died, or the case again, to run alone."""
        how = child.epitaph()
        earlier = [job for job in child.jobs[:-1] if job.target == running.job.target]
        self._drop(child)
        if running.note or not child.jobs[:-1]:
            running.note = ""
            return self._failed(running.job, Kind.CRASH, f"the process {how}")
        names = ", ".join(f"'{job.case}' ({job.dtype})" for job in earlier[-3:])
        before = f" It ran before: {names}." if names else ""
        note = (
            f"the process {how}, though not when the case runs alone: an earlier case may have "
            f"damaged its memory.{before}"
        )
        return running.index, running.job, note

    def _failed(self, job: Job, kind: Kind, text: str) -> CaseResult:
        impl = self.targets[job.target].impl
        return CaseResult(
            impl.op_name,
            impl.impl_id,
            job.dtype,
            job.case,
            ((kind, text),),
            device=self.device,
        )

    def _drop(self, child: Child) -> None:
        self._busy.pop(child, None)
        child.close()

    def close(self) -> None:
        """End the child processes."""
        for child in [*self._idle, *self._busy]:
            child.close()
        self._idle.clear()
        self._busy.clear()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def jobs_of(
    index: int,
    target: Target,
    *,
    dtypes: Sequence[torch.dtype | str] | None = None,
    cases: Sequence[str] | None = None,
    compile: bool = True,
) -> list[Job]:
    """The jobs of a target.

    Args:
        index: the target's among the runner's.
        dtypes: None for all of the contract's; those that it does not have give no jobs.
        cases: None for all; names that a dtype does not have give no jobs.
        compile: with the case that compiles the torch op.
    """
    contract = target.contract
    wanted = (
        None if dtypes is None else {d if isinstance(d, str) else dtype_name(d) for d in dtypes}
    )
    jobs = []
    for dtype in contract.tolerances:
        name = dtype_name(dtype)
        if wanted is not None and name not in wanted:
            continue
        names = [*cases_of(contract, dtype), *([COMPILE] if compile else [])]
        jobs += [Job(index, name, case) for case in names if cases is None or case in cases]
    return jobs


def check_implementation(
    impl: OpImpl,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype | str] | None = None,
    contract: OpContract | None = None,
    cases: Sequence[str] | None = None,
    compile: bool = True,
    timeout: float = TIMEOUT,
    start_method: str | None = None,
) -> Report:
    """Hold an implementation to its op's contract. It need not be registered.

    Args:
        impl: what to check.
        device: where its tensors are, as torch names it.
        dtypes: torch dtypes or their names; None for all of the contract's.
        contract: of an op of your own; None looks it up by the op's name.
        cases: names of cases; None for all.
        compile: with torch.compile of the torch op, once for each dtype.
        timeout: seconds that a case may take.
        start_method: "fork" or "spawn"; None takes fork on the CPU and spawn elsewhere.

    Returns:
        A Report. Its `passed` is true if no case failed and at least one ran: what a guard
        refuses is skipped, never passed.

    Raises:
        DispatchError: the op has no contract, or the implementation cannot be brought into a
            new process.
        ValueError: a dtype or case that the contract does not have; names those that it has.
    """
    contract = contract or contract_of(impl.op_name, [impl])
    if contract is None:
        raise DispatchError(
            f"op '{impl.op_name}' has no contract to check {impl.impl_id} against; write one and "
            "pass it as contract="
        )
    valid = [dtype_name(d) for d in contract.tolerances]
    for dtype in dtypes or ():
        name = dtype if isinstance(dtype, str) else dtype_name(dtype)
        if name not in valid:
            raise ValueError(
                f"the contract of {contract.name} has no dtype {name}; valid: {', '.join(valid)}"
            )
    known = {c for name in valid for c in (*cases_of(contract, dtype_of(name)), COMPILE)}
    for case in cases or ():
        if case not in known:
            raise ValueError(
                f"the contract of {contract.name} has no case '{case}'; valid: "
                f"{', '.join(sorted(known))}"
            )
    verdict = impl.availability(device_facts(device, impl))
    if isinstance(verdict, Rejected):
        return Report(left_out=(Skip(impl.op_name, impl.impl_id, None, None, verdict.reason),))
    target = Target(contract, impl)
    jobs = jobs_of(0, target, dtypes=dtypes, cases=cases, compile=compile)
    with Runner([target], device=device, start_method=start_method, timeout=timeout) as runner:
        return Report(tuple(runner.run(jobs)))
