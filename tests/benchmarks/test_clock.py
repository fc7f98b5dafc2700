# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/clock.py, with CUDA's graphs and events replaced by what notes their use."""

from __future__ import annotations

import contextlib
import gc
import importlib

import pytest
import torch


class Recorder:
    """A stream, a graph and an event in one, which notes what happens."""

    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        pass

    def capture_begin(self, pool, capture_error_mode):
        self.log.append(f"begin in pool {pool}, gc {gc.isenabled()}")

    def capture_end(self):
        self.log.append("end")

    def replay(self):
        self.log.append("replay")

    def record(self):
        self.log.append("event")

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.25


@pytest.fixture
def clock(monkeypatch):
    log = []
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: Recorder(log))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Recorder(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    module = importlib.import_module("clock")
    monkeypatch.setattr(module.GpuClock, "empty", lambda self: lambda i: None)
    found = module.GpuClock()
    log.clear()
    found.log = log
    return found


def test_calls_are_captured_over_the_sets_in_turn_after_three_that_warm_up(clock):
    clock.record(lambda i: clock.log.append(i), calls=4, sets=2)
    assert clock.log == [0, 1, 0, "begin in pool 7, gc False", 0, 1, 0, 1, "end"]
    assert gc.isenabled()


def test_a_call_that_raises_ends_the_capture(clock):
    calls = iter([0, 0, 0])

    def call(i):
        next(calls)

    with pytest.raises(StopIteration):
        clock.record(call, calls=2, sets=1)
    assert clock.log[-1] == "end" and gc.isenabled()


def test_replays_lie_between_two_events_behind_a_pause_for_the_host(clock):
    replay = clock.record(lambda i: None, calls=1, sets=1)
    clock.log.clear()
    assert clock.once(replay, 2) == 250.0
    assert clock.log == ["sleep", "event", "replay", "replay", "event"]
    assert clock.repeats(replay, 2000.0) == 8
