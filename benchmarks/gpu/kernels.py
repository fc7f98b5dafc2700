# SPDX-License-Identifier: Apache-2.0
"""Our kernels beside vLLM's, FlagGems' and Inductor's: GPU time of a call in a CUDA graph.

    PYTHONPATH=$HOME/site python benchmarks/gpu/kernels.py OUT [--quick] [--seconds 115]

writes OUT.json and OUT.md, again every few seconds. Every implementation is bound by its id,
through the registry and with its guards, as vLLM's layers bind it; one that is not there, or that
refuses the arguments, is left out with its reason. Each number is the median of 3 rounds in which
the implementations take turns, together with a kernel that does nothing and a copy that moves as
many bytes. Arguments and outputs rotate through more memory than the L2 cache holds, up to 20 sets.
Every result is compared with the contract's reference before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from about import about, write_json
from clock import Call, Clock, CpuClock, GpuClock, host_us
from kernel_points import COMPILED, FUSED, Point, points, separate, twin
from kernel_tables import EXTRA, markdown, summary

from vllm_fl.dispatch import SelectionPolicy, get_default_manager, policy_context
from vllm_fl.dispatch.errors import DispatchError

ROUNDS = 3
L2 = 150 << 20
"""Three times the L2 cache of an H200: what a rotation goes through."""
LARGE = 8 << 20
ROUND_US = 2000.0
DISTANCE = 0.02
"""||found - reference|| / ||reference|| that a right kernel stays below: two bfloat16 results that
are each rounded twice are 0.004 apart; a wrong row or a missed block is far above."""
HOST_TOKENS = 32
SAVE_SECONDS = 5.0
INDUCTOR = "torch.compile"


class Refused(Exception):
    """Why an implementation takes no part; the text is the reason."""


def roles(device: str) -> dict[str, str]:
    """Column to implementation."""
    vendor = "cuda" if device == "cuda" else "cpu"
    return {
        "ours": f"vendor.{vendor}.fl",
        "vllm": f"vendor.{vendor}",
        "flaggems": "default.flaggems",
    }


# ------------------------------------------------------------------------------------------ binding


def bound(op: str, impl_id: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """An op's function by one implementation: with its guards, and nothing behind them.

    Raises:
        Refused: it is not registered, not available, or refuses these arguments.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    impls = manager.registry.snapshot().impls_by_op.get(op, ())
    if not any(impl.impl_id == impl_id for impl in impls):
        raise Refused(f"not registered for {op}")
    signature = manager.registry.get_signature(op)
    facts = dict(signature.facts_of(*args)) if signature and signature.facts else None
    order = ((op, (f"impl:{impl_id}",)),)
    with policy_context(SelectionPolicy(strict=True, per_op_order=order)):
        try:
            binding = manager.bind_op(op, donate=True, facts=facts)
        except DispatchError as error:
            losers = manager.decide(op, facts=facts).losers
            why = next((loser.reason for loser in losers if loser.impl_id == impl_id), str(error))
            raise Refused(why) from None
    assert binding.decision.winner_id == impl_id
    return binding.fn


def candidate(column: str, point: Point, args: tuple[Any, ...]) -> Callable[..., Any]:
    """What a column of a point's row calls with the arguments.

    Raises:
        Refused: it takes no part.
    """
    ids = roles(args_device(args))
    if column in ids:
        return bound(point.op, ids[column], args)
    if column.endswith(", separate"):
        impl_id = ids[column.partition(",")[0]]
        qkv, q_heads, k_heads, _, head, eps, q_weight, k_weight, angles, neox, at = args
        q, k = (qkv.new_empty(qkv.shape[0], n * head) for n in (q_heads, k_heads))
        norms = [
            bound("rms_norm", impl_id, (x.unflatten(-1, (-1, head)), weight, eps))
            for x, weight in ((q, q_weight), (k, k_weight))
        ]
        rope = bound("rotary_embedding", impl_id, (at, q, k, head, angles, neox))
        return functools.partial(separate, *norms, rope)
    assert column == INDUCTOR
    return compiled(point)


def args_device(args: tuple[Any, ...]) -> str:
    """Where the tensors are."""
    return next(a.device.type for a in args if isinstance(a, torch.Tensor))


def reference_of(point: Point) -> Callable[..., Any]:
    """The contract's reference, or the separate ones of a fusion, as a model has them.

    Raises:
        Refused: there is no contract yet.
    """
    from vllm_fl.ops import CONTRACTS

    by_name = {contract.name: contract for contract in CONTRACTS}
    if point.op == FUSED:
        norm = by_name["rms_norm"].reference
        return functools.partial(separate, norm, norm, by_name["rotary_embedding"].reference)
    if point.op not in by_name:
        raise Refused(f"no contract of {point.op}")
    return by_name[point.op].reference


_COMPILED: dict[str, Callable[..., Any]] = {}


def compiled(point: Point) -> Callable[..., Any]:
    """Inductor's version of the reference, one for all numbers of tokens."""
    if point.op not in _COMPILED:
        _COMPILED[point.op] = torch.compile(reference_of(point))
    return _COMPILED[point.op]


def columns_of(point: Point) -> tuple[str, ...]:
    """Who takes part."""
    names = ["ours", "vllm", "flaggems"]
    if point.op == FUSED:
        names += ["ours, separate", "vllm, separate", "flaggems, separate"]
    # The reference of a cache copies the cache, which says nothing about anybody's compiler.
    fusible = point.group == point.op and point.op != "reshape_and_cache_flash"
    if fusible and point.dtype == "bfloat16" and (point.size, point.tokens) in COMPILED:
        names.append(INDUCTOR)
    return tuple(names)


# ---------------------------------------------------------------------------------------- measuring


def sets_of(moved: int, calls: int) -> int:
    """How many sets of arguments rotate: the least divisor of the calls that leaves the cache."""
    divisors = [n for n in (2, 4, 5, 10, 20) if calls % n == 0]
    return next((n for n in divisors if n * moved >= L2), divisors[-1])


def distance(found: Any, expected: Any) -> float:
    """The largest relative distance of an output; infinite where one is not finite."""
    pairs = zip(flat(found), flat(expected), strict=True)
    worst = 0.0
    for a, b in pairs:
        error = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def flat(outputs: Any) -> list[torch.Tensor]:
    """Outputs as a list."""
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that a call may write."""
    return tuple(twin(a) if isinstance(a, torch.Tensor) else a for a in args)


def check(point: Point, call: Callable[..., Any], args: tuple[Any, ...], expected: Any) -> None:
    """Raise Refused where a result is not right."""
    found = call(*copies(args))
    if point.op == FUSED and isinstance(expected, tuple) and not isinstance(found, tuple):
        expected = torch.cat(expected, dim=-1)  # written into the projection
    error = distance(found, expected)
    if not error < DISTANCE:
        raise Refused(f"WRONG: its distance from the reference is {error:.3g}")


def copy_of(moved: int, sets: int, device: str) -> Call:
    """A copy that reads and writes so many bytes in all."""
    pairs = [
        [
            torch.randint(0, 127, (max(1, moved // 2),), dtype=torch.int8, device=device)
            for _ in "ab"
        ]
        for _ in range(sets)
    ]
    return lambda i: pairs[i][0].copy_(pairs[i][1])


class Bench:
    """One run: its clock, its columns, and when it has to end."""

    def __init__(self, clock: Clock, deadline: float, round_us: float = ROUND_US) -> None:
        self.clock, self.deadline, self.round_us = clock, deadline, round_us
        self.empties: dict[int, Callable[[], None]] = {}

    def row(self, point: Point, inductor: bool) -> dict[str, Any]:
        """Measure a point. With `inductor`, torch.compile alone takes part, beside `ours`."""
        calls = 100 if point.moved < LARGE else 20
        sets = sets_of(point.moved, calls)
        row: dict[str, Any] = {
            "group": point.group, "op": point.op, "dtype": point.dtype, "size": point.size,
            "tokens": point.tokens, "moved": point.moved, "calls": calls, "sets": sets,
            "us": {}, "rounds": {}, "why": {}, "host_us": {},
        }  # fmt: skip
        with torch.device(self.clock.device):
            arguments = [point.make() for _ in range(sets)]
        pristine = copies(arguments[0])  # what is timed writes its arguments
        try:
            expected = reference_of(point)(*copies(pristine))
        except Refused as error:
            row["why"]["ours"] = str(error)
            return row
        columns = [c for c in columns_of(point) if c != INDUCTOR]
        replays: dict[str, Callable[[], None]] = {}
        for column in [INDUCTOR, "ours"] if inductor else columns:
            try:
                call = candidate(column, point, arguments[0])
                if column == INDUCTOR:
                    mark_tokens(point, arguments)
                check(point, call, pristine, expected)
                replays[column] = self.clock.record(over(call, arguments), calls, sets)
                if point.tokens == HOST_TOKENS and not inductor and point.size in (4096, "32/8"):
                    row["host_us"][column] = host_us(
                        functools.partial(call, *arguments[0]), self.clock.device
                    )
            except Refused as error:
                row["why"][column] = str(error)
            except Exception as error:
                row["why"][column] = f"{type(error).__name__}: {str(error)[:200]}"
                if "CUDA error" in str(error) or "AcceleratorError" in type(error).__name__:
                    row["lost"] = column
                    return row
        del expected, pristine
        if replays:
            self._rounds(row, replays, copy_of(point.moved, sets, self.clock.device))
        return row

    def _rounds(
        self, row: dict[str, Any], replays: dict[str, Callable[[], None]], copy: Call
    ) -> None:
        calls, sets = row["calls"], row["sets"]
        if calls not in self.empties:
            self.empties[calls] = self.clock.record(self.clock.empty(), calls, 1)
        replays = {
            "empty": self.empties[calls], "copy": self.clock.record(copy, calls, sets), **replays
        }  # fmt: skip
        repeats = {c: self.clock.repeats(replay, self.round_us) for c, replay in replays.items()}
        rounds: dict[str, list[float]] = {column: [] for column in replays}
        for _ in range(ROUNDS):
            for column, replay in replays.items():
                us = self.clock.once(replay, repeats[column])
                rounds[column].append(us / (repeats[column] * calls))
        row["rounds"] = {c: [round(x, 4) for x in found] for c, found in rounds.items()}
        row["us"] = {c: round(statistics.median(found), 4) for c, found in rounds.items()}


def over(call: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> Call:
    """Calls with a set of arguments by its number."""
    return lambda i: call(*arguments[i])


def mark_tokens(point: Point, arguments: list[tuple[Any, ...]]) -> None:
    """Let the compiler know what vLLM lets it know: the number of tokens varies."""
    for args in arguments:
        for a in args:
            if isinstance(a, torch.Tensor) and a.dim() and a.shape[0] == point.tokens:
                torch._dynamo.maybe_mark_dynamic(a, 0)


# --------------------------------------------------------------------------------------------- main


def work(chosen: list[Point]) -> Iterator[tuple[Point, bool]]:
    """The points, and whether it is torch.compile's turn at them; what may be left out, last."""
    first = [p for p in chosen if p.dtype == "bfloat16" and p.group not in EXTRA]
    yield from ((point, False) for point in first)
    yield from ((point, True) for point in first if INDUCTOR in columns_of(point))
    yield from ((point, False) for point in chosen if point not in first)


def select(arguments: argparse.Namespace) -> list[Point]:
    """The points that the command names."""
    wanted = {
        "group": arguments.groups, "dtype": arguments.dtypes, "tokens": arguments.tokens,
        "size": arguments.sizes,
    }  # fmt: skip
    return [
        point
        for point in points(arguments.quick)
        if all(not given or str(getattr(point, name)) in given for name, given in wanted.items())
    ]


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found.add_argument("out", type=Path, help="OUT.json and OUT.md are written")
    found.add_argument(
        "--quick", action="store_true", help="fewer sizes, one dtype, without torch.compile"
    )
    found.add_argument("--no-compile", action="store_true", help="without torch.compile")
    found.add_argument("--seconds", type=float, help="in all (default: 115, with --quick 38)")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run")
    for name in ("groups", "dtypes", "tokens", "sizes"):
        found.add_argument(f"--{name}", nargs="*", help="only these")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, write, print. Returns 1 where the GPU was lost or a kernel is wrong."""
    arguments = parser().parse_args(argv)
    start = time.monotonic()
    seconds = arguments.seconds or (38 if arguments.quick else 115)
    torch.manual_seed(0)
    with torch.inference_mode():
        clock = GpuClock() if arguments.device == "cuda" else CpuClock()
        bench = Bench(clock, start + seconds - 3, ROUND_US if arguments.device == "cuda" else 0)
        report: dict[str, Any] = {"about": about(arguments.device), "rows": [], "left_out": []}
        report["done"] = False
        report["columns"] = roles(arguments.device)
        saved = start
        for point, inductor in work(select(arguments)):
            if inductor and (arguments.no_compile or arguments.quick):
                continue
            if time.monotonic() > bench.deadline:
                what = f"{point.group} {point.dtype} {point.size} {point.tokens}"
                report["left_out"].append(what + (f" {INDUCTOR}" if inductor else ""))
                continue
            if time.monotonic() > saved + SAVE_SECONDS:
                save(report, arguments.out, start)
                saved = time.monotonic()
            merge(report["rows"], bench.row(point, inductor))
            if "lost" in report["rows"][-1]:
                break
    report["done"] = True
    save(report, arguments.out, start)
    print(summary(report))
    wrong = [why for row in report["rows"] for why in row["why"].values() if "WRONG" in why]
    return 1 if wrong or any("lost" in row for row in report["rows"]) else 0


def merge(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row. One of torch.compile gives its ratio to `ours` of its own rounds to the row of
    the point, whose other columns were measured before."""
    key = ("group", "dtype", "size", "tokens")
    earlier = next((r for r in rows if all(r[k] == row[k] for k in key)), None)
    if earlier is None:
        rows.append(row)
        return
    earlier["why"] |= {c: why for c, why in row["why"].items() if c == INDUCTOR}
    if INDUCTOR in row["us"]:
        earlier["us"][INDUCTOR] = row["us"][INDUCTOR]
        earlier["rounds"][INDUCTOR] = row["rounds"][INDUCTOR]
    if "lost" in row:
        rows.append(row)


def save(report: dict[str, Any], out: Path, start: float) -> None:
    """Write what there is."""
    report["seconds"] = round(time.monotonic() - start, 1)
    write_json(out.with_suffix(".json"), report)
    out.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    sys.exit(main())
