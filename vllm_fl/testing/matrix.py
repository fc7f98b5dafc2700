# SPDX-License-Identifier: Apache-2.0
"""The conformance matrix: every registered implementation, every dtype, every case."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..dispatch.errors import DispatchError, did_you_mean
from ..dispatch.manager import OpManager
from ..dispatch.types import OpImpl, Rejected
from .cases import COMPILE, cases_of, dtype_name, dtype_of
from .child import Job
from .contracts import contract_of
from .report import CaseResult, Report, Skip
from .runner import TIMEOUT, Runner, jobs_of
from .target import Target, device_facts

__all__ = ["Selection", "UnknownNameError", "check_matrix", "select"]


class UnknownNameError(DispatchError, LookupError):
    """An op, implementation, dtype, case or vendor that there is not; names those that there
    are."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be checked.

    Attributes:
        device: where the tensors are, as torch names it.
        targets: implementations with their contracts.
        jobs: the cases, each of one target.
        left_out: what cannot be checked, with the reason.
    """

    device: str
    targets: tuple[Target, ...]
    jobs: tuple[Job, ...]
    left_out: tuple[Skip, ...]


def select(
    manager: OpManager,
    *,
    device: str | None = None,
    ops: Sequence[str] = (),
    impls: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    cases: Sequence[str] = (),
    vendor: str | None = None,
    compile: bool = True,
) -> Selection:
    """Choose from what is registered; an empty choice means all.

    Args:
        device: as torch names it; None takes the manager's.
        ops, impls, dtypes, cases: names.
        vendor: only this vendor's implementations.
        compile: with the case that compiles the torch op.

    Raises:
        UnknownNameError: a name that there is not.
    """
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot()
    device = device or manager.device.device_type
    names = [
        *snapshot.declarations,
        *(n for n in snapshot.impls_by_op if n not in snapshot.declarations),
    ]
    _check_names("op", ops, names)
    chosen = [name for name in names if not ops or name in ops]
    registered = [impl for name in chosen for impl in snapshot.impls_by_op.get(name, ())]
    _check_names("implementation", impls, {impl.impl_id for impl in registered})
    if vendor is not None:
        _check_names("vendor", [vendor], {i.vendor for i in registered if i.vendor})
    targets: list[Target] = []
    left_out: list[Skip] = []
    for name in chosen:
        of_op = [
            impl
            for impl in snapshot.impls_by_op.get(name, ())
            if (not impls or impl.impl_id in impls) and vendor in (None, impl.vendor)
        ]
        if not of_op and not impls and vendor is None:
            left_out.append(Skip(name, None, None, None, "nobody implements it"))
        signature = snapshot.declarations.get(name)
        selector = signature is not None and signature.selector
        for impl in of_op:
            found = _target(impl, of_op, device, selector=selector)
            if isinstance(found, Skip):
                left_out.append(found)
            else:
                targets.append(found)
    _check_cases(targets, dtypes, cases)
    jobs = [
        job
        for index, target in enumerate(targets)
        for job in jobs_of(
            index, target, dtypes=dtypes or None, cases=cases or None, compile=compile
        )
    ]
    return Selection(device, tuple(targets), tuple(jobs), tuple(left_out))


def check_matrix(
    selection: Selection,
    *,
    workers: int = 1,
    timeout: float = TIMEOUT,
    start_method: str | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> Report:
    """Check a selection.

    Args:
        workers: child processes at a time.
        timeout: seconds that a case may take.
        start_method: "fork" or "spawn"; None takes fork on the CPU and spawn elsewhere.
        on_result: called with each result as it comes.
    """
    with Runner(
        selection.targets, device=selection.device, start_method=start_method, timeout=timeout
    ) as runner:
        results = runner.run(selection.jobs, workers=workers, on_result=on_result)
    return Report(tuple(results), selection.left_out)


def _target(impl: OpImpl, of_op: Iterable[OpImpl], device: str, *, selector: bool) -> Target | Skip:
    def skip(reason: str) -> Skip:
        return Skip(impl.op_name, impl.impl_id, None, None, reason)

    if selector:
        return skip("a selector: it answers with a name, there are no tensors to compare")
    contract = contract_of(impl.op_name, of_op)
    if contract is None:
        return skip("the op has no contract; put one into CONTRACTS of the module that has it")
    verdict = impl.availability(device_facts(device, impl))
    return skip(verdict.reason) if isinstance(verdict, Rejected) else Target(contract, impl)


def _check_cases(targets: Sequence[Target], dtypes: Sequence[str], cases: Sequence[str]) -> None:
    contracts = {target.contract.name: target.contract for target in targets}.values()
    known_dtypes = dict.fromkeys(dtype_name(d) for c in contracts for d in c.tolerances)
    if targets or not dtypes:
        _check_names("dtype", dtypes, known_dtypes)
    if cases and targets:
        wanted = [dtype_of(name) for name in dtypes or known_dtypes]
        known = dict.fromkeys(
            name for c in contracts for d in wanted if d in c.tolerances for name in cases_of(c, d)
        )
        _check_names("case", cases, [*known, COMPILE])


def _check_names(what: str, given: Iterable[str], valid: Collection[str]) -> None:
    for name in given:
        if name not in valid:
            raise UnknownNameError(
                f"unknown {what} '{name}'; valid: {', '.join(sorted(valid)) or 'none'}."
                f"{did_you_mean(name, valid)}"
            )
