# SPDX-License-Identifier: Apache-2.0
"""Which launch configuration is best for each of our GPU kernels: every choice of
csrc/cuda/tuning.h beside the shipped one, vLLM's kernel, an empty kernel and a copy of the bytes.

    VLLM_FL_TUNE=1 VLLM_FL_DEVICE=cuda python setup.py build_ext --inplace
    python benchmarks/gpu/tune.py OUT.json [--seconds 100] [--op NAME ...]

Prints one line for each point, and what to take; OUT.json has every number. No choice changes a bit
of a result.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from about import about, write_json
from clock import Clock, CpuClock, GpuClock
from kernel_points import Point, points, twin

Choices = tuple[tuple[str, int], ...]
"""Choice to value, of those that differ from the shipped configuration."""

HIDDEN = (1024, 2048, 4096, 5120, 7168)
TOKENS = (1, 32, 512, 2048, 8192, 32768)
L2 = 150 << 20
ROUND_US = 400.0
ROUNDS = 3
SMALL = 32
MANY = 2048
"""Tokens up to which a call is all latency, and from which on it is all bandwidth."""


def product(**values: tuple[int, ...]) -> list[Choices]:
    """All combinations."""
    return [tuple(zip(values, found, strict=True)) for found in itertools.product(*values.values())]


def candidates(point: Point) -> list[Choices]:
    """What to try at a point."""
    found: list[Choices] = [(), (("dependent", 0),)]
    if point.group in ("rms_norm", "fused_add_rms_norm"):
        found += product(norm_warp=(0,), norm_vectors=(1, 2, 4))
        if point.size == 1024:
            found += product(norm_warp=(1,))
    elif point.group == "rms_norm of heads":
        found += product(norm_warp_rows=(4, 8, 16))
    elif point.group == "silu_and_mul":
        found += product(gated_threads=(64, 128, 256, 512))
    elif point.group == "rotary_embedding":
        found += product(rotary_threads=(32, 64, 128, 256, 512))
    elif point.group == "fused_qk_norm_rope":
        found += product(fused_threads=(64, 96, 128, 192, 256))
    elif point.group == "reshape_and_cache_flash":
        found += product(cache_threads=(64, 128, 256), cache_sides=(1, 2))
    return found


def chosen_points(groups: list[str]) -> Iterator[Point]:
    """Those that are measured: bfloat16, the sizes and tokens above."""
    for point in points():
        sized = point.size in HIDDEN or point.size in ("32/8", "16/8")
        wanted = point.group in groups if groups else True
        known = wanted and sized and point.dtype == "bfloat16" and point.tokens in TOKENS
        if known and candidates(point)[2:]:
            yield point


class Bench:
    """Measures a point."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nothing = clock.record(clock.empty(), 20, 1)

    def measure(self, point: Point) -> dict[str, Any]:
        """Candidate to microseconds of a call."""
        sets = max(1, min(20, math.ceil(L2 / point.moved)))
        calls = max(sets, 20 if point.moved < L2 else 4)
        with torch.device(self.clock.device):
            args = point.make()
        copies = [args, *(_twins(args) for _ in range(sets - 1))]
        recorded: dict[str, Callable[[], None]] = {}
        for choices in candidates(point):
            with tuned(choices):
                kernel = own(point, args)
                call = lambda i, kernel=kernel: kernel(*copies[i])  # noqa: E731
                recorded[label(choices)] = self.clock.record(call, calls, sets)
        vllm = vllms(point, args)
        if vllm is not None:
            recorded["vllm"] = self.clock.record(lambda i: vllm(*copies[i]), calls, sets)
        half = max(1, point.moved // 4)
        source = torch.zeros(sets, half, dtype=torch.int16, device=self.clock.device)
        target = torch.empty_like(source)
        recorded["copy"] = self.clock.record(lambda i: target[i].copy_(source[i]), calls, sets)
        recorded["empty"] = self.nothing
        count = {"empty": 20}
        times: dict[str, list[float]] = defaultdict(list)
        repeats = {k: self.clock.repeats(replay, ROUND_US) for k, replay in recorded.items()}
        for _ in range(ROUNDS):
            for name, replay in recorded.items():
                taken = self.clock.once(replay, repeats[name])
                times[name].append(taken / repeats[name] / count.get(name, calls))
        return {name: statistics.median(found) for name, found in times.items()}


def _twins(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(twin(a) if isinstance(a, torch.Tensor) else a for a in args)


def label(choices: Choices) -> str:
    """A candidate's name."""
    return " ".join(f"{name}={value}" for name, value in choices) or "shipped"


@contextmanager
def tuned(choices: Choices) -> Iterator[None]:
    """While inside, launches are made with these choices."""
    for name, value in choices:
        tune(name, value)
    try:
        yield
    finally:
        for name, _ in choices:
            tune(name, -1)


def tune(name: str, value: int) -> None:
    """Replace a choice; -1: the shipped one."""
    from vllm_fl.backends.vendor.cuda.fl import kernels

    if torch.cuda.is_available():  # else this is a dry run, on the CPU's kernels
        kernels.tune(name, value)


def own(point: Point, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Our kernel's function, after its guard has accepted the arguments."""
    import vllm_fl.backends.vendor.cpu.register_ops
    import vllm_fl.backends.vendor.cuda.register_ops  # noqa: F401
    from vllm_fl.backends.vendor.cpu import fl as cpu_fl
    from vllm_fl.backends.vendor.cuda import fl

    backend = fl.backend if torch.cuda.is_available() else cpu_fl.backend
    impl = next(i for i in backend.implementations if i.op_name == point.op)
    verdict = impl.supports is None or impl.supports(*args)
    if verdict is not True:
        raise RuntimeError(f"{impl.impl_id} refuses: {verdict}")
    return impl.fn


def vllms(point: Point, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """vLLM's kernel, where it is here and takes the arguments."""
    from vllm_fl.backends.vendor.cuda import cuda, register_ops  # noqa: F401

    impl = next((i for i in cuda.backend.implementations if i.op_name == point.op), None)
    if impl is None or not torch.cuda.is_available() or cuda.backend.is_available() is not True:
        return None
    cuda.backend.load()
    accepted = impl.supports is None or impl.supports(*args) is True
    return impl.fn if accepted else None


# ------------------------------------------------------------------------------------- what it says


def line(point: Point, found: dict[str, float]) -> str:
    """One point: the shipped configuration, the best one, and the others."""
    own_times = {k: v for k, v in found.items() if k not in ("vllm", "copy", "empty")}
    plain = {k: v for k, v in own_times.items() if "dependent" not in k}
    best = min(plain, key=plain.__getitem__)
    shipped = found["shipped"]
    vllm = found.get("vllm")
    return (
        f"{point.group:24}{point.size!s:>6}{point.tokens:>6} shipped {shipped:8.2f} "
        f"alone {found['dependent=0']:8.2f} vllm {vllm or math.nan:8.2f} "
        f"({shipped / (vllm or math.nan):.2f}) copy {found['copy']:8.2f} "
        f"({found['copy'] / shipped:.2f}) empty {found['empty']:.2f} | best {plain[best]:8.2f} "
        f"({plain[best] / shipped:.3f}) {best}"
    )


def advice(rows: list[tuple[Point, dict[str, float]]]) -> list[str]:
    """For each group the candidates by their mean time relative to the shipped configuration: at
    few, some and many tokens; norms by hidden size."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point, found in rows:
        few, many = point.tokens <= SMALL, point.tokens >= MANY
        span = "few" if few else "many" if many else "some"
        group = point.group
        if group in ("rms_norm", "fused_add_rms_norm"):
            group += f" {point.size}"
        for name, taken in found.items():
            if name not in ("vllm", "copy", "empty", "shipped"):
                ratios[group, span][name].append(taken / found["shipped"])
    lines = []
    for (group, span), names in ratios.items():
        means = {n: math.exp(statistics.fmean(map(math.log, r))) for n, r in names.items()}
        three = sorted(means, key=means.__getitem__)[:3]
        said = "; ".join(f"{means[name]:.3f} {name}" for name in three)
        lines.append(f"{group}, {span} tokens: {said}")
    return lines


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found.add_argument("out", type=Path)
    found.add_argument("--seconds", type=float, default=100.0)
    found.add_argument("--op", nargs="*", default=[], help="tables; all without it")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, write, print."""
    arguments = parser().parse_args(argv)
    until = time.monotonic() + arguments.seconds
    rows: list[tuple[Point, dict[str, float]]] = []
    report: dict[str, Any] = {"about": about(arguments.device), "rows": [], "errors": []}
    with torch.inference_mode():
        bench = Bench(GpuClock() if arguments.device == "cuda" else CpuClock())
        for point in chosen_points(arguments.op):
            where = {"group": point.group, "size": point.size, "tokens": point.tokens}
            if time.monotonic() > until:
                report["errors"].append({**where, "error": "out of time"})
                continue
            try:
                found = bench.measure(point)
            except Exception as error:
                report["errors"].append({**where, "error": f"{type(error).__name__}: {error}"})
                print(*where.values(), report["errors"][-1]["error"], flush=True)
                continue
            rows.append((point, found))
            report["rows"].append({**where, "moved": point.moved, "us": found})
            print(line(point, found), flush=True)
    write_json(arguments.out, report)
    print(f"{len(report['errors'])} points without a number", *advice(rows), sep="\n")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
