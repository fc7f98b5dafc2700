# SPDX-License-Identifier: Apache-2.0
"""How long functions take, side by side: interleaved, so that what the machine does in the
meantime meets all of them, and with the spread, so that noise is not taken for a difference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "fastest", "time_together"]

ROUNDS = 15
SAMPLE_S = 0.02
"""A sample is as many calls as take about that long: 1 % of it is 200 us, far above the clock's
resolution and a scheduler's hiccup is seen as spread."""

MOST_CALLS = 200
"""Calls of a sample on a device, where they are queued: launching blocks when the queue is full
(1024 on CUDA), and would be taken for host time."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one function, in microseconds per call.

    Attributes:
        host: the median of the time until the call returns.
        device: the median of the time that the device works; on the CPU that is `host`.
        quartiles: of `device`: a quarter of the samples is below the first, one above the second.
        how: how `device` was measured: "wall", "graph" (replays of one graph, no gaps) or
            "events" (gaps between launches included).
    """

    host: float
    device: float
    quartiles: tuple[float, float]
    how: str

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a part of the median."""
        return (self.quartiles[1] - self.quartiles[0]) / self.device


def fastest(timings: Mapping[str, Timing]) -> str | None:
    """The name with the smallest device time, or None where another one's middle half of samples
    overlaps with its own: then they cannot be told apart."""
    if not timings:
        return None
    first, *others = sorted(timings, key=lambda name: timings[name].device)
    end = timings[first].quartiles[1]
    return None if any(timings[name].quartiles[0] <= end for name in others) else first


def time_together(
    functions: Mapping[str, Callable[[], Any]], device: str, *, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Time functions without arguments, turn by turn.

    Args:
        functions: name to function; each is called some times before anything is measured.
        device: where their tensors are, as torch names it.
        rounds: samples of each.
    """
    kind = device.partition(":")[0]
    samplers = {name: _sampler(function, kind) for name, function in functions.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for index in range(rounds):
        order = list(samplers) if index % 2 else list(reversed(samplers))
        for name in order:
            samples[name].append(samplers[name][0]())
    return {name: _timing(samples[name], samplers[name][1]) for name in functions}


def _timing(samples: list[tuple[float, float]], how: str) -> Timing:
    host, device = ([1e6 * sample[i] for sample in samples] for i in (0, 1))
    low, middle, high = statistics.quantiles(device, n=4, method="inclusive")
    return Timing(statistics.median(host), middle, (low, high), how)


Sampler = Callable[[], tuple[float, float]]
"""Takes one sample: seconds per call, of the host and of the device."""


def _sampler(function: Callable[[], Any], kind: str) -> tuple[Sampler, str]:
    calls = _calls(function, kind)
    if kind == "cpu":

        def sample() -> tuple[float, float]:
            seconds = _clock(function, calls)
            return seconds, seconds

        return sample, "wall"
    module: Any = getattr(torch, kind)
    graph = _graph(function, calls, module)

    def sample_device() -> tuple[float, float]:
        module.synchronize()
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host = _clock(function, calls)
        end.record()
        if graph is not None:
            module.synchronize()
            begin.record()
            graph.replay()
            end.record()
        module.synchronize()
        return host, begin.elapsed_time(end) / 1e3 / calls

    return sample_device, "events" if graph is None else "graph"


def _calls(function: Callable[[], Any], kind: str) -> int:
    """Calls of a sample. The first ones compile, tune and fill caches."""
    wait = getattr(torch, kind).synchronize if kind != "cpu" else lambda: None
    for _ in range(3):
        function()
    wait()
    calls = 1
    while (seconds := _clock(function, calls, wait)) * calls < SAMPLE_S / 4:
        calls *= 2
    wanted = max(1, round(SAMPLE_S / seconds))
    return wanted if kind == "cpu" else min(wanted, MOST_CALLS)


def _clock(
    function: Callable[[], Any], calls: int, wait: Callable[[], Any] = lambda: None
) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls


def _graph(function: Callable[[], Any], calls: int, module: Any) -> Any:
    """A graph of the calls, replayed once; None where the device or the function has none."""
    if not hasattr(module, "CUDAGraph"):
        return None
    graph = module.CUDAGraph()
    try:
        with module.graph(graph):
            for _ in range(calls):
                function()
        graph.replay()
        module.synchronize()
    except RuntimeError:  # it synchronizes, or allocates elsewhere
        module.synchronize()
        return None
    return graph
