# SPDX-License-Identifier: Apache-2.0
"""Time of a call on a GPU, from replays of a CUDA graph; on a CPU (a dry run), of a loop."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Clock", "CpuClock", "GpuClock", "host_us"]

Call = Callable[[int], Any]
"""Takes the number of the set of arguments that it is to use."""


class Clock:
    """Records calls, and times what was recorded."""

    device: str

    def record(self, call: Call, calls: int, sets: int) -> Callable[[], None]:
        """A function that does `calls` calls, over the sets of arguments in turn."""
        raise NotImplementedError

    def once(self, replay: Callable[[], None], repeats: int) -> float:
        """Microseconds of `repeats` replays."""
        raise NotImplementedError

    def empty(self) -> Call:
        """A call of a kernel that does nothing."""
        raise NotImplementedError

    def repeats(self, replay: Callable[[], None], target: float) -> int:
        """How many replays take about so many microseconds."""
        self.once(replay, 1)
        return max(1, min(400, math.ceil(target / max(self.once(replay, 1), 0.1))))


class GpuClock(Clock):
    """One graph of all calls. What a call returns is kept until its set's next turn, so that the
    outputs go through memory as the arguments do."""

    device = "cuda"

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # A pool that no graph uses any more cannot be used again, so one graph stays.
        self.anchor = self.record(self.empty(), 1, 1)

    def record(self, call: Call, calls: int, sets: int) -> Callable[[], None]:
        # On a side stream, as capture wants its warm-up; the third call may be the first that
        # takes the way of all later ones (a launch plan).
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for i in range(3):
                call(i % sets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = [None] * sets
        # torch.cuda.graph() would collect garbage and empty the cache first: a tenth of a second,
        # more than a thousand times.
        gc.disable()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    for i in range(calls):
                        kept[i % sets] = call(i % sets)
                except BaseException:
                    with contextlib.suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            gc.enable()
        return graph.replay  # the outputs' memory is the pool's; only the time is looked at

    def once(self, replay: Callable[[], None], repeats: int) -> float:
        torch.cuda._sleep(50_000)  # the host gets ahead of the GPU
        self.start.record()
        for _ in range(repeats):
            replay()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3

    def empty(self) -> Call:
        import triton

        @triton.jit
        def nothing(x):
            pass

        something = torch.zeros(1, device=self.device)
        return lambda _: nothing[(1,)](something)


class CpuClock(Clock):
    """A loop."""

    device = "cpu"

    def record(self, call: Call, calls: int, sets: int) -> Callable[[], None]:
        def replay() -> None:
            for i in range(calls):
                call(i % sets)

        replay()
        return replay

    def once(self, replay: Callable[[], None], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            replay()
        return (time.perf_counter() - start) * 1e6

    def empty(self) -> Call:
        return lambda _: None


def host_us(call: Callable[[], Any], device: str, calls: int = 300, means: int = 5) -> float:
    """Microseconds that a call takes the CPU, outside of graphs: the least of some means. The
    device is waited for between them, so that no launch queue fills."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(20):
        call()
    wait()
    best = math.inf
    for _ in range(means):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        wait()
    return best * 1e6
