# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from vllm_fl.testing import timing
from vllm_fl.testing.timing import Timing, fastest, time_together


def spent(seconds: float):
    """A function that takes that long, working."""

    def function() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return function


def test_the_time_of_a_call_is_told_in_microseconds_whatever_its_size() -> None:
    times = time_together({"fast": spent(5e-5), "slow": spent(5e-4)}, "cpu", rounds=5)
    assert 45 < times["fast"].host < 450
    assert 450 < times["slow"].host < 5000
    assert times["fast"].device == times["fast"].host
    assert times["fast"].how == "wall"
    assert fastest(times) == "fast"


def test_functions_take_turns_in_both_directions(monkeypatch) -> None:
    monkeypatch.setattr(timing, "_calls", lambda function, kind: 1)
    told: list[str] = []
    time_together({n: lambda n=n: told.append(n) for n in "abc"}, "cpu", rounds=3)
    assert "".join(told) == "cba" + "abc" + "cba"


@pytest.mark.parametrize(
    ("quartiles", "expected"),
    [
        ({"a": (9, 11), "b": (19, 21)}, "a"),
        ({"a": (9, 15), "b": (14, 21)}, None),
        ({"a": (9, 11), "b": (11, 21)}, None),
        ({"a": (9, 11), "b": (12, 13), "c": (10, 90)}, None),
        ({"a": (9, 11)}, "a"),
        ({}, None),
    ],
)
def test_only_what_is_beyond_the_spread_is_the_fastest(quartiles, expected) -> None:
    times = {n: Timing(1, sum(q) / 2, q, "wall") for n, q in quartiles.items()}
    assert fastest(times) == expected


def test_the_spread_is_the_distance_of_the_quartiles() -> None:
    found = timing._timing([(n * 1e-6, n * 1e-6) for n in (8, 9, 10, 11, 12)], "wall")
    assert found.device == pytest.approx(10)
    assert found.quartiles == pytest.approx((9, 11))
    assert found.spread == pytest.approx(0.2)


# ----------------------------------------------------------------------- a device's module


class Device:
    """torch.<device> whose clock is moved by hand: each call works for 3 us, which the host does
    not wait for, and each launch outside of a graph leaves a gap of 4 us."""

    def __init__(self, *, graphs: bool) -> None:
        self.now, self.capturing, self.broken = 0.0, 0, False
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * 1e3

        class Graph:
            calls = 0

            def replay(self) -> None:
                device.now += 3e-6 * self.calls

            def __enter__(self) -> None:
                device.capturing = 1

            def __exit__(self, *_: object) -> None:
                self.calls, device.capturing = device.capturing - 1, 0

        self.Event = Event
        if graphs:
            self.CUDAGraph, self.graph = Graph, lambda graph: graph

    def synchronize(self) -> None:
        pass

    def call(self) -> None:
        if self.capturing:
            if self.broken:
                raise RuntimeError("not permitted when stream is capturing")
            self.capturing += 1
        else:
            self.now += 7e-6


@pytest.mark.parametrize(
    ("graphs", "broken", "how", "device_us"),
    [(True, False, "graph", 3), (True, True, "events", 7), (False, False, "events", 7)],
)
def test_a_device_is_timed_by_replays_of_a_graph_or_by_events(
    monkeypatch, graphs, broken, how, device_us
) -> None:
    device = Device(graphs=graphs)
    device.broken = broken
    monkeypatch.setattr(torch, "chip", device, raising=False)
    found = time_together({"a": device.call}, "chip:1", rounds=3)["a"]
    assert found.how == how
    assert found.device == pytest.approx(device_us)
    assert 0 < found.host < 1000


def test_a_sample_on_a_device_does_not_fill_its_queue(monkeypatch) -> None:
    calls: list[int] = []
    module = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "chip", module, raising=False)
    assert timing._calls(lambda: calls.append(1), "chip") == timing.MOST_CALLS


def test_a_sample_is_as_long_as_the_device_works_and_not_as_short_as_its_launches(
    monkeypatch,
) -> None:
    queue: list[int] = []

    def synchronize() -> None:
        time.sleep(2e-3 * len(queue))
        queue.clear()

    monkeypatch.setattr(torch, "chip", SimpleNamespace(synchronize=synchronize), raising=False)
    assert 4 <= timing._calls(lambda: queue.append(1), "chip") <= 10
