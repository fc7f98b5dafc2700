# SPDX-License-Identifier: Apache-2.0
"""What the conformance kit found: as objects, as data, as JUnit XML. Imports no torch."""

from __future__ import annotations

import enum
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

__all__ = ["CaseResult", "Failure", "Kind", "Report", "Skip", "Status"]


class Kind(enum.StrEnum):
    """What sort of promise a failure breaks."""

    VALUES = "values"
    SHAPE = "shape"
    DTYPE = "dtype"
    LAYOUT = "layout"
    OUTPUTS = "outputs"
    UNDECLARED_WRITE = "undeclared write"
    MISSING_WRITE = "missing write"
    ALIAS = "alias"
    DETERMINISM = "determinism"
    UNINITIALIZED = "uninitialized memory"
    BATCH = "batch invariance"
    COMPILE = "compile"
    GUARD = "guard"
    DISPATCH = "dispatch"
    RAISED = "raised"
    CRASH = "crash"
    HANG = "hang"
    CONTRACT = "contract"


class Status(enum.StrEnum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Failure:
    """One promise that was not kept.

    Attributes:
        op, impl_id, dtype, case: where; dtype by name, e.g. "bfloat16".
        kind: what sort of promise.
        what: what differed, for people.
        device: where the tensors were, as torch names it.
    """

    op: str
    impl_id: str
    dtype: str
    case: str
    kind: Kind
    what: str
    device: str = "cpu"

    @property
    def rerun(self) -> str:
        """The command that runs this case alone, if the implementation is registered."""
        words = ["vllm-fl", "verify", "--op", self.op, "--impl", self.impl_id]
        words += ["--dtype", self.dtype, "--case", self.case]
        return shlex.join([*words, *([] if self.device == "cpu" else ["--device", self.device])])

    def __str__(self) -> str:
        where = f"{self.op} by {self.impl_id}, {self.dtype}, case '{self.case}'"
        return f"{where}: {self.kind}: {self.what}"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one (op, implementation, dtype, case).

    Attributes:
        problems: (kind, what differed) of a failed case.
        reason: why a skipped case did not run.
        seconds: how long it took.
        device: where the tensors were, as torch names it.
    """

    op: str
    impl_id: str
    dtype: str
    case: str
    problems: tuple[tuple[Kind, str], ...] = ()
    reason: str | None = None
    seconds: float = 0.0
    device: str = "cpu"

    @property
    def status(self) -> Status:
        """Passed, failed or skipped."""
        if self.problems:
            return Status.FAILED
        return Status.PASSED if self.reason is None else Status.SKIPPED

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The problems, each with where it is."""
        return tuple(
            Failure(self.op, self.impl_id, self.dtype, self.case, kind, what, self.device)
            for kind, what in self.problems
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """What was not run, and why. A skip is never a pass.

    Attributes:
        impl_id, dtype, case: None where all of them are meant.
    """

    op: str
    impl_id: str | None
    dtype: str | None
    case: str | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; what is None is left out."""
        found = {name: getattr(self, name) for name in self.__slots__}
        found["impl"] = found.pop("impl_id")
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What the kit found.

    Attributes:
        results: one for each case, in order.
        left_out: ops and implementations of which no case could be tried, with the reason.
    """

    results: tuple[CaseResult, ...] = ()
    left_out: tuple[Skip, ...] = ()
    _by_status: Counter[Status] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_status", Counter(r.status for r in self.results))

    @property
    def passed(self) -> bool:
        """Whether nothing failed and at least one case ran."""
        return not self._by_status[Status.FAILED] and self._by_status[Status.PASSED] > 0

    @property
    def cases(self) -> int:
        """How many cases ran, well or not."""
        return self._by_status[Status.PASSED] + self._by_status[Status.FAILED]

    @property
    def failed(self) -> int:
        """How many cases failed."""
        return self._by_status[Status.FAILED]

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every promise that was not kept."""
        return tuple(failure for result in self.results for failure in result.failures)

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """Everything that did not run, each with its reason."""
        cases = (
            Skip(r.op, r.impl_id, r.dtype, r.case, r.reason or "")
            for r in self.results
            if r.status is Status.SKIPPED
        )
        return (*self.left_out, *cases)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: {"cases", "failed", "skipped", "failures", "ops"}."""
        return {
            "cases": self.cases,
            "failed": self.failed,
            "skipped": [skip.to_dict() for skip in self.skipped],
            "failures": [
                {
                    "op": f.op,
                    "impl": f.impl_id,
                    "dtype": f.dtype,
                    "case": f.case,
                    "kind": f.kind.value,
                    "what": f.what,
                    "rerun": f.rerun,
                }
                for f in self.failures
            ],
            "ops": self._ops(),
        }

    def _ops(self) -> list[dict[str, Any]]:
        table: dict[str, dict[str, dict[str, Counter[Status]]]] = {}
        for r in self.results:
            dtypes = table.setdefault(r.op, {}).setdefault(r.impl_id, {})
            dtypes.setdefault(r.dtype, Counter())[r.status] += 1
        return [
            {
                "op": op,
                "cases": sum(_ran(c) for dtypes in impls.values() for c in dtypes.values()),
                "implementations": [
                    {
                        "impl": impl_id,
                        "dtypes": {
                            dtype: {status.value: count[status] for status in Status}
                            for dtype, count in dtypes.items()
                        },
                    }
                    for impl_id, dtypes in impls.items()
                ],
            }
            for op, impls in table.items()
        ]

    def to_junit(self) -> str:
        """JUnit XML: a suite for each op, a test case for each case."""
        root = ElementTree.Element("testsuites", name="vllm_fl conformance")
        suites: dict[str, ElementTree.Element] = {}
        for r in self.results:
            if r.op not in suites:
                suites[r.op] = ElementTree.SubElement(root, "testsuite", name=r.op)
            case = ElementTree.SubElement(
                suites[r.op],
                "testcase",
                classname=f"{r.op}.{r.impl_id}",
                name=f"{r.dtype}: {r.case}",
                time=f"{r.seconds:.3f}",
            )
            if r.status is Status.FAILED:
                kinds = ", ".join(dict.fromkeys(kind.value for kind, _ in r.problems))
                failure = ElementTree.SubElement(case, "failure", type=kinds, message=kinds)
                failure.text = _xml_text("\n".join(map(str, r.failures)))
            elif r.status is Status.SKIPPED:
                ElementTree.SubElement(case, "skipped", message=_xml_text(r.reason or ""))
        for skip in self.left_out:
            if skip.op not in suites:
                suites[skip.op] = ElementTree.SubElement(root, "testsuite", name=skip.op)
            case = ElementTree.SubElement(
                suites[skip.op],
                "testcase",
                classname=f"{skip.op}.{skip.impl_id or 'none'}",
                name="all",
            )
            ElementTree.SubElement(case, "skipped", message=_xml_text(skip.reason))
        for suite in suites.values():
            suite.set("tests", str(len(suite)))
            suite.set("failures", str(len(suite.findall("testcase/failure"))))
            suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

    def __repr__(self) -> str:
        """What `assert report.passed, report` shows."""
        lines = [f"{self.cases} cases, {self.failed} failed, {len(self.skipped)} skipped"]
        lines += [f"  {failure}" for failure in self.failures]
        if not self.cases:
            lines += [f"  not run: {skip.reason}" for skip in self.skipped]
        return "\n".join(lines)


def _ran(count: Counter[Status]) -> int:
    return count[Status.PASSED] + count[Status.FAILED]


def _xml_text(text: str) -> str:
    """Without the control characters that XML has no way to hold."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")
