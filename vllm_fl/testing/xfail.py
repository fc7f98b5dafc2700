# SPDX-License-Identifier: Apache-2.0
"""Files of tests that are known to fail, a reason for each. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ExpectedFailure", "XfailError", "check_all_used", "read_xfails", "reason_for"]


class XfailError(ValueError):
    """A line of an xfail file is wrong; the text names file and line."""


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One line.

    Attributes:
        pattern: "op/implementation/dtype/case", in which * stands for anything.
        reason: why the test fails.
        where: file and line.
    """

    pattern: str
    reason: str
    where: str

    def matches(self, name: str) -> bool:
        """Whether it is about the test of that name."""
        parts = map(re.escape, self.pattern.split("*"))
        return re.fullmatch(".*".join(parts), name) is not None


def read_xfails(path: Path) -> list[ExpectedFailure]:
    """Read a file. Empty lines, and those that begin with #, are not about a test.

    Raises:
        XfailError: the file cannot be read, or a line has no reason.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise XfailError(f"cannot read the xfail file {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if not pattern:
            continue
        where = f"{path}:{number}"
        if not reason:
            raise XfailError(
                f"{where}: '{pattern}' has no reason; write: op/implementation/dtype/case  # reason"
            )
        found.append(ExpectedFailure(pattern, reason, where))
    return found


def reason_for(name: str, expected: Iterable[ExpectedFailure]) -> str | None:
    """The reason of the first line that is about a test, or None."""
    return next((line.reason for line in expected if line.matches(name)), None)


def check_all_used(names: Iterable[str], expected: Iterable[ExpectedFailure]) -> None:
    """Refuse a line that is about no test: what it was written for has another name now.

    Raises:
        XfailError: naming the line.
    """
    known = list(names)
    for line in expected:
        if not any(map(line.matches, known)):
            raise XfailError(f"{line.where}: no test is called '{line.pattern}'; remove the line")
