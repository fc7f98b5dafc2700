# SPDX-License-Identifier: Apache-2.0
"""Python functions that a graph's large frame calls need no memory mapped for each call."""

from __future__ import annotations

import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.vllm_plugin import plugin
from vllm_fl.vllm_plugin.stack import roomy

CALLS = 200
FRAMES = range(64, 4096, 64)
"""Slots of 8 bytes, in a frame like those that Inductor generates: wherever this test runs, one of
them ends shortly before the end of a chunk, of 16 KiB or 32."""


def operator(depth: int) -> int:
    """Stands for an operator written in Python, with functions of its own."""
    return operator(depth - 1) if depth else 0


def graph_of(slots: int) -> Callable[[], None]:
    """Stands for what Inductor generates: a large frame that calls many operators."""

    def graph() -> None:
        for _ in range(CALLS):
            operator(20)

    graph.__code__ = graph.__code__.replace(co_stacksize=slots)
    return graph


def faults(fn: Callable[[], Any]) -> int:
    """Page faults of one call, after one that touches what stays."""
    fn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fn()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_frame_that_fills_its_chunk_costs_page_faults_a_call_and_room_below_it_none() -> None:
    unlucky = [slots for slots in FRAMES if faults(graph_of(slots)) >= CALLS]
    assert unlucky, "this Python keeps its chunks: vllm_plugin/stack.py is not needed for it"
    assert all(faults(roomy(graph_of(slots))) < CALLS / 4 for slots in FRAMES)


def test_arguments_results_and_exceptions_pass_through() -> None:
    def add(a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    room = roomy(add)
    assert (room.__name__, room.__doc__) == ("add", "Adds.")
    assert room(1, b=2) == 3
    with pytest.raises(TypeError, match="add"):
        room(1, 2, 3)


@pytest.mark.parametrize(
    ("compiled", "dispatched", "expected"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_worker_whose_graphs_call_python_gets_room(
    compiled: bool, dispatched: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.vllm_plugin.layers import serve

    served = SimpleNamespace(entry=object() if dispatched else None)
    monkeypatch.setattr(serve, "records", [SimpleNamespace(ops=(served,))])
    worker = SimpleNamespace(execute_model=lambda step: step)
    plugin._make_room(worker, compiled)
    assert worker.execute_model(7) == 7
    assert (worker.execute_model.__code__.co_stacksize > 2**16) is expected
    plugin._make_room(SimpleNamespace(), compiled)  # not all that is called a worker runs a model


def test_a_worker_that_loads_a_second_model_gets_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.vllm_plugin.layers import serve

    served = SimpleNamespace(entry=object())
    monkeypatch.setattr(serve, "records", [SimpleNamespace(ops=(served,))])
    worker = SimpleNamespace(execute_model=lambda step: step)
    plugin._make_room(worker, True)
    first = worker.execute_model
    plugin._make_room(worker, True)
    assert worker.execute_model is first
