# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl verify`: holds every implementation to its op's contract."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..dispatch.default import get_default_manager
from .arguments import positive
from .errors import CommandError, UsageError
from .output import answer_stream, print_table

if TYPE_CHECKING:
    from ..testing import CaseResult, Report, Selection

__all__ = ["add_parser", "check_device", "render", "verify"]

_MOST_WORKERS = 4
_SHOWN = 20
"""Failures that are printed in full; --json has them all."""


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="hold every implementation to its op's contract",
        description="Runs every registered implementation, in every dtype, on every case of its "
        "op's contract, in child processes, and says what differs. What a guard refuses is "
        "skipped, with the reason, and must reach the next implementation.",
    )
    for name, what in (
        ("op", "only this op"),
        ("impl", "only this implementation, by its id"),
        ("dtype", "only this dtype, e.g. bfloat16"),
        ("case", "only this case, by its name"),
    ):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar=name.upper(),
            help=f"{what}; may be repeated",
        )
    parser.add_argument("--device", help="where the tensors are (default: this machine's device)")
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help=f"child processes at a time (default: one for each core, at most {_MOST_WORKERS}; "
        "1 on a device)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML to a file too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, and return 1 if something failed or nothing ran."""
    with answer_stream() as stream:
        start = time.monotonic()
        report = verify(
            device=arguments.device,
            ops=arguments.op,
            impls=arguments.impl,
            dtypes=arguments.dtype,
            cases=arguments.case,
            workers=arguments.workers,
        )
        data = {**report.to_dict(), "seconds": round(time.monotonic() - start, 1)}
        if arguments.junit is not None:
            _write(arguments.junit, report.to_junit())
        if arguments.json:
            print(json.dumps(data, indent=2, ensure_ascii=False), file=stream)
        else:
            render(data, stream)
    return 0 if report.passed else 1


def verify(
    *,
    device: str | None = None,
    ops: list[str] | None = None,
    impls: list[str] | None = None,
    dtypes: list[str] | None = None,
    cases: list[str] | None = None,
    workers: int | None = None,
) -> Report:
    """Check what is registered; None and an empty list mean all.

    Raises:
        UsageError: a name that there is not, or a device that torch does not see.
    """
    from ..testing import UnknownNameError, check_matrix, select

    manager = get_default_manager()
    check_device(device)
    try:
        selection = select(
            manager,
            device=device,
            ops=ops or (),
            impls=impls or (),
            dtypes=dtypes or (),
            cases=cases or (),
        )
    except UnknownNameError as error:
        raise UsageError(str(error)) from error
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        workers = min(cores, _MOST_WORKERS) if selection.device == "cpu" else 1
    return check_matrix(selection, workers=workers, on_result=_Progress(selection))


def check_device(device: str | None) -> None:
    """Raise UsageError for a device that torch does not know or see."""
    if device is None or device == "cpu":
        return
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"unknown device '{device}': {str(error).splitlines()[0]}") from None
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise UsageError(f"torch {torch.__version__} sees no {kind} device here; valid: cpu")


class _Progress:
    """Says on stderr when an op is done."""

    def __init__(self, selection: Selection) -> None:
        names = [selection.targets[job.target].contract.name for job in selection.jobs]
        self._left = Counter(names)
        self._ops = len(self._left)
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in self._left}

    def __call__(self, result: CaseResult) -> None:
        counts = self._counts[result.op]
        counts[result.status] += 1
        self._left[result.op] -= 1
        if self._left[result.op]:
            return
        del self._left[result.op]
        done = self._ops - len(self._left)
        ran = counts["passed"] + counts["failed"]
        print(
            f"[{done}/{self._ops}] {result.op}: {ran} cases, {counts['failed']} failed, "
            f"{counts['skipped']} skipped",
            file=sys.stderr,
            flush=True,
        )


def render(data: dict[str, Any], stream: TextIO) -> None:
    """The report for people."""
    rows = []
    for op in data["ops"]:
        for impl in op["implementations"]:
            counts = Counter[str]()
            for found in impl["dtypes"].values():
                counts.update(found)
            dtypes = ", ".join(impl["dtypes"])
            numbers = (counts["passed"], counts["failed"], counts["skipped"])
            rows.append((op["op"], impl["impl"], dtypes, *numbers))
    if rows:
        columns = ("operator", "implementation", "dtypes", "passed", "failed", "skipped")
        print_table(stream, columns, rows)
    _print_skipped(data["skipped"], stream)
    failures = data["failures"]
    for failure in failures[:_SHOWN]:
        where = f"{failure['op']} by {failure['impl']}, {failure['dtype']}, '{failure['case']}'"
        print(f"FAILED {where}: {failure['kind']}: {failure['what']}", file=stream)
        print(f"  alone: {failure['rerun']}", file=stream)
    if len(failures) > _SHOWN:
        print(f"... and {len(failures) - _SHOWN} more: --json lists them all.", file=stream)
    ran = f"{data['cases']} cases of {len(data['ops'])} ops in {data['seconds']} s"
    print(f"{ran}: {data['failed']} failed, {len(data['skipped'])} not run.", file=stream)
    if not data["cases"]:
        print("Nothing ran, so nothing is shown to be right.", file=stream)


def _print_skipped(skipped: list[dict[str, Any]], stream: TextIO) -> None:
    counts = Counter((s["op"], s.get("impl", ""), s["reason"]) for s in skipped)
    if counts:
        print("Not run, and why:", file=stream)
        rows = [(op, impl, count, reason) for (op, impl, reason), count in counts.items()]
        print_table(stream, ("operator", "implementation", "cases", "reason"), rows)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
