# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher costs: nanoseconds per call, throughput with threads, time to import.

    python benchmarks/dispatch_overhead.py [--json]

Exits 1 if a limit is broken. Times are the fastest of several repeats, because whatever else the
machine does only ever adds to them; ratios are medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CALL_LIMIT_NS = 500
THREADS = 4
THREAD_RATIO_LIMIT = 0.9
IMPORT_LIMIT_MS = 60
UNWANTED = ("torch", "vllm")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the number.
        unit: of the number.
        note: what it was compared with, or was chosen.
        limit: what it must keep, for people; empty where it is told for information.
        ok: whether it does.
    """

    name: str
    value: float
    unit: str
    note: str = ""
    limit: str = ""
    ok: bool = True


# ----------------------------------------------------------------------------------- calls


def nanoseconds(fn: Callable[..., Any], *args: Any, calls: int = 5_000, rounds: int = 100) -> float:
    """Nanoseconds per call, the loop around it included: the fastest of many short rounds, some
    of which nothing interrupts even on a busy machine."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in repeat(None, calls):
            fn(*args)
        best = min(best, time.perf_counter_ns() - start)
    return best / calls


def bare(x: Any) -> Any:
    """Stands for an implementation: it costs what calling a Python function costs."""
    return x


def always(x: Any) -> bool:
    """A call guard that agrees."""
    return True


def measure_calls() -> list[Row]:
    """What binding and calling cost over the function itself."""
    from vllm_fl.dispatch import BackendImplKind, OpImpl, OpSignature, call_op, get_default_manager

    manager = get_default_manager()
    for name, guard in (("bench_plain", None), ("bench_guarded", always)):
        manager.registry.declare(OpSignature.parse(f"{name}(x)"))
        manager.registry.register_impl(
            OpImpl(name, "reference.bench", BackendImplKind.REFERENCE, bare, supports=guard)
        )
    bound = manager.bind("bench_plain")
    plain_ns = nanoseconds(bare, 1)
    bound_ns = nanoseconds(bound, 1)
    call_ns = nanoseconds(call_op, "bench_plain", 1)
    over = call_ns - plain_ns
    return [
        Row("bare function", plain_ns, "ns"),
        Row("bind, no guard", bound_ns, "ns", "the function itself", "is it", bound is bare),
        Row("call_op", call_ns, "ns"),
        Row("call_op over bare", over, "ns", "", f"<= {CALL_LIMIT_NS}", over <= CALL_LIMIT_NS),
        Row("bind, a call guard", nanoseconds(manager.bind("bench_guarded"), 1), "ns"),
        Row("call_op, a call guard", nanoseconds(call_op, "bench_guarded", 1), "ns"),
    ]


def measure_silu_and_mul() -> list[Row]:
    """The same on a real op, whose tensor is as small as a kernel takes."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from vllm_fl.dispatch import call_op, get_default_manager

    manager = get_default_manager()
    x = torch.randn(1, 16)
    manager.bind("silu_and_mul")  # loads the backend, or finds out that it cannot be loaded
    decision = manager.explain("silu_and_mul", x)
    if decision.winner is None:
        return []
    name = decision.winner.impl_id
    return [
        Row(f"silu_and_mul, {what}", nanoseconds(fn, *args, calls=200), "ns", name)
        for what, fn, args in (
            ("bare", decision.winner.fn, (x,)),
            ("bind", manager.bind("silu_and_mul"), (x,)),
            ("call_op", call_op, ("silu_and_mul", x)),
        )
    ]


# --------------------------------------------------------------------------------- threads


def calls_per_second(fn: Callable[..., Any], *args: Any, threads: int, calls: int) -> float:
    """Calls of all threads together per second of wall time."""
    gate = threading.Barrier(threads)
    times: list[float] = []

    def work() -> None:
        gate.wait()
        times.append(time.perf_counter())
        for _ in repeat(None, calls):
            fn(*args)
        times.append(time.perf_counter())

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return threads * calls / (max(times) - min(times))


def measure_threads(rounds: int = 11) -> list[Row]:
    """Whether threads that call_op get in each other's way more than threads that call.

    Each round measures both, so that a machine whose speed drifts does not matter, and each
    measurement lasts about 0.1 s, which is twenty turns of the interpreter lock.
    """
    from vllm_fl.dispatch import call_op

    gains: dict[str, list[float]] = {"bare": [], "call_op": []}
    for _ in range(rounds):
        for name, fn, args, calls in (
            ("bare", bare, (1,), 4_000_000),
            ("call_op", call_op, ("bench_plain", 1), 600_000),
        ):
            alone = calls_per_second(fn, *args, threads=1, calls=calls)
            together = calls_per_second(fn, *args, threads=THREADS, calls=calls // THREADS)
            gains[name].append(together / alone)
    ratio = statistics.median(c / b for b, c in zip(gains["bare"], gains["call_op"], strict=True))
    return [
        Row(f"bare, {THREADS} threads over 1", statistics.median(gains["bare"]), "x"),
        Row(f"call_op, {THREADS} threads over 1", statistics.median(gains["call_op"]), "x"),
        Row(
            "call_op over bare", ratio, "x", f"with {THREADS} threads, median of {rounds}",
            f">= {THREAD_RATIO_LIMIT}", ratio >= THREAD_RATIO_LIMIT,
        ),
    ]  # fmt: skip


# --------------------------------------------------------------------------------- imports

IMPORT = """
import json, sys, time
start = time.process_time()
import vllm_fl.dispatch
spent = time.process_time() - start
print(json.dumps([spent * 1e3, sorted(sys.modules)]))
"""


def measure_import(rounds: int = 10) -> list[Row]:
    """CPU time from a started interpreter to an imported vllm_fl.dispatch, bytecode compiled as
    an installer leaves it, and what came along."""
    times: list[float] = []
    modules: set[str] = set()
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for round_ in range(rounds + 1):
            answer = subprocess.run(
                [sys.executable, "-c", IMPORT], env=env, check=True, capture_output=True
            )
            spent, names = json.loads(answer.stdout)
            if round_ > 0:  # the first one compiles
                times.append(spent)
                modules.update(name.partition(".")[0] for name in names)
    fastest = min(times)
    unwanted = sorted(modules.intersection(UNWANTED))
    return [
        Row(
            "import vllm_fl.dispatch, fastest", fastest, "ms", f"of {rounds} processes, without "
            "the interpreter's start", f"< {IMPORT_LIMIT_MS}", fastest < IMPORT_LIMIT_MS,
        ),
        Row("import vllm_fl.dispatch, median", statistics.median(times), "ms"),
        Row(
            "imported along with it", len(unwanted), f"of {', '.join(UNWANTED)}",
            ", ".join(unwanted), "0", not unwanted,
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ main


def print_table(rows: list[Row]) -> None:
    """One line per row, columns aligned."""
    cells = [
        (row.name, f"{row.value:.3g}" if row.unit == "x" else f"{row.value:.0f}", row.unit,
         row.limit and f"{row.limit} {'ok' if row.ok else 'BROKEN'}", row.note)
        for row in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    for name, value, unit, limit, note in cells:
        print(
            f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  "
            f"{limit:<{widths[3]}}  {note}".rstrip()
        )


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("VLLM_FL_")]:
        del os.environ[name]  # measured as it comes, not as somebody configured it
    os.environ["VLLM_FL_LOG_LEVEL"] = "ERROR"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows = [*measure_import(), *measure_calls(), *measure_threads(), *measure_silu_and_mul()]
    broken = [row for row in rows if not row.ok]
    if arguments.json:
        print(json.dumps({"ok": not broken, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print_table(rows)
    for row in broken:
        print(
            f"dispatch_overhead: {row.name}: {row.value:.3g} {row.unit}, must be {row.limit}"
            f"{f' ({row.note})' if row.note else ''}",
            file=sys.stderr,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
