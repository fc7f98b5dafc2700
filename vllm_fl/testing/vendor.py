# SPDX-License-Identifier: Apache-2.0
"""The conformance tests of one vendor, as the pytest plugin runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..dispatch import get_default_manager
from .child import Job
from .matrix import select
from .report import CaseResult, Status
from .runner import Runner
from .xfail import check_all_used, read_xfails, reason_for

__all__ = ["VendorCase", "VendorSuite"]


class VendorSuite:
    """Every case of a vendor's implementations; child processes live as long as it does.

    Args:
        vendor: the vendor's name.
        device: where the tensors are, as torch names it; None takes the vendor's device.
        xfails: files of tests that are known to fail.

    Raises:
        UnknownNameError: nobody of that name has registered an implementation.
        XfailError: a line of an xfail file has no reason, or is about no test.
    """

    def __init__(self, vendor: str, device: str | None, xfails: Sequence[Path] = ()) -> None:
        manager = get_default_manager()
        manager.ensure_initialized()
        if device is None:
            device = _device_of(vendor, manager.device.device_type)
        selection = select(manager, vendor=vendor, device=device)
        self._runner = Runner(selection.targets, device=device)
        self.cases = [
            VendorCase(f"{skip.op}/{skip.impl_id}", None, skip.reason, self)
            for skip in selection.left_out
        ]
        for job in selection.jobs:
            impl = selection.targets[job.target].impl
            name = f"{impl.op_name}/{impl.impl_id}/{job.dtype}/{job.case}"
            self.cases.append(VendorCase(name, job, None, self))
        expected = [line for path in xfails for line in read_xfails(path)]
        check_all_used([case.name for case in self.cases], expected)
        self._reasons = {case.name: reason_for(case.name, expected) for case in self.cases}

    def parameters(self) -> list[object]:
        """What pytest parametrizes a test with."""
        return [
            pytest.param(
                case,
                id=case.name,
                marks=()
                if (reason := self._reasons[case.name]) is None
                else pytest.mark.xfail(reason=reason, strict=True),
            )
            for case in self.cases
        ]

    def run(self, job: Job) -> CaseResult:
        """Run one case in a child process."""
        return self._runner.run([job])[0]

    def close(self) -> None:
        """End the child processes."""
        self._runner.close()


@dataclass(frozen=True, slots=True)
class VendorCase:
    """One test: `check()` passes, fails or skips.

    Attributes:
        name: "op/implementation/dtype/case".
    """

    name: str
    _job: Job | None
    _left_out: str | None
    _suite: VendorSuite

    def check(self) -> None:
        """Run the case; fail with what differed, skip with the reason."""
        __tracebackhide__ = True
        if self._job is None:
            pytest.skip(self._left_out or "")
        result = self._suite.run(self._job)
        if result.status is Status.SKIPPED:
            pytest.skip(result.reason or "")
        if result.failures:
            lines = [f"{failure.kind}: {failure.what}" for failure in result.failures]
            pytest.fail("\n".join([*lines, f"alone: {result.failures[0].rerun}"]), pytrace=False)


def _device_of(vendor: str, here: str) -> str:
    """The vendor's device type: that of its registered backends, or this machine's."""
    snapshot = get_default_manager().registry.snapshot()
    for impls in snapshot.impls_by_op.values():
        for impl in impls:
            types = impl.backend.device_types if impl.backend is not None else None
            if impl.vendor == vendor and types and here not in types:
                return types[0]
    return here
