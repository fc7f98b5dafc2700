# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_fl.dispatch import (
    OpManager,
    SignatureMismatchError,
    call_op,
    default,
    discovery,
    get_default_manager,
    load_config,
    with_preference,
)
from vllm_fl.dispatch.log import logger

from .helpers import CHILD_LIMIT_S, SCALE, in_child, make_impl, make_manager, returning

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

PLUGIN = """
import os, threading
from vllm_fl.dispatch import OpImpl, BackendImplKind, OpSignature

PARENT = os.getpid()
runs = []
half_way, go_on = threading.Event(), threading.Event()
go_on.set()

def scale(x, factor=2):
    return os.getpid()

def impl(vendor, op="scale"):
    return OpImpl(op, f"vendor.{vendor}", BackendImplKind.VENDOR, scale, vendor, 100)

def register_builtins(registry):
    runs.append(os.getpid())
    registry.declare(OpSignature.parse("scale(x, factor=2)"))
    registry.register_impl(impl("acme"))
    if os.getpid() == PARENT:
        half_way.set()
        go_on.wait(60)
    registry.register_impl(impl("zeta"))
"""


@pytest.fixture
def plugin(write_module: Any) -> Any:
    """A plugin that registers vendor.acme and vendor.zeta, and can be held between the two."""
    write_module("acme_forks", PLUGIN)
    import acme_forks

    return acme_forks


def with_plugin(*modules: str) -> OpManager:
    names = ",".join(("acme_forks", *modules))
    return make_manager(signatures=(), config=load_config({"VLLM_FL_PLUGIN_MODULES": names}))


def ids(manager: OpManager, op_name: str = "scale") -> list[str]:
    return [impl.impl_id for impl in manager.registry.get_implementations(op_name)]


def errors(manager: OpManager) -> list[str | None]:
    return [record.error for record in manager.get_discovered_plugins()]


class Holding:
    """A thread that holds the lock of a registry, as one that is changing it does."""

    def __init__(self, manager: OpManager) -> None:
        self.holds, self.let_go = threading.Event(), threading.Event()
        self.parent = os.getpid()
        manager.registry.on_change(self.wait)
        self.thread = threading.Thread(
            target=lambda: manager.registry.register_impl(make_impl("vendor.slow"))
        )

    def wait(self) -> None:
        if threading.current_thread() is self.thread and os.getpid() == self.parent:
            self.holds.set()
            self.let_go.wait(60)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.holds.wait(CHILD_LIMIT_S)

    def __exit__(self, *error: Any) -> None:
        self.let_go.set()
        self.thread.join()


@pytest.fixture
def half_way(plugin: Any) -> Iterator[OpManager]:
    """A manager whose lock is held by a thread that is half-way through discovery."""
    manager = with_plugin()
    plugin.go_on.clear()
    thread = threading.Thread(target=manager.ensure_initialized)
    thread.start()
    assert plugin.half_way.wait(CHILD_LIMIT_S)
    yield manager
    plugin.go_on.set()
    thread.join()
    assert {"vendor.acme", "vendor.zeta"} <= set(ids(manager))


# ---------------------------------------------------------------------- what a child keeps


def test_a_child_keeps_declarations_and_hand_made_registrations() -> None:
    manager = make_manager(make_impl("vendor.hand", returning("by hand")))
    assert manager.call("scale", 1) == "by hand"

    def work() -> list[Any]:
        try:
            manager.registry.register_impl(make_impl("vendor.bad", lambda y: y))
        except SignatureMismatchError as error:
            refused = "expected" in str(error) or "does not fit" in str(error)
        return [manager.call("scale", 1), ids(manager), refused]

    assert in_child(work) == ["by hand", ["vendor.hand"], True]


def test_a_child_runs_discovery_again_for_what_came_from_plugins(plugin: Any) -> None:
    manager = with_plugin()
    manager.registry.register_impl(make_impl("vendor.hand", op_name="shift"))
    assert manager.call("scale", 1) == os.getpid()

    def work() -> list[Any]:
        before = len(plugin.runs)
        ran_here = manager.call("scale", 1) == os.getpid()
        return [before, ran_here, len(plugin.runs), errors(manager), ids(manager),
                ids(manager, "shift")]  # fmt: skip

    assert in_child(work) == [
        1, True, 2, [None], ["vendor.acme", "vendor.zeta"], ["vendor.hand"],
    ]  # fmt: skip
    assert plugin.runs == [os.getpid()]


def test_a_child_of_a_manager_that_was_never_used_works(plugin: Any) -> None:
    manager = with_plugin()
    assert in_child(lambda: [errors(manager), ids(manager)]) == [
        [None], ["vendor.acme", "vendor.zeta"],
    ]  # fmt: skip


def test_a_child_drops_availability_and_asks_the_probe_again() -> None:
    asked: list[int] = []

    def probe() -> bool | str:
        asked.append(os.getpid())
        return len(asked) == 1 or "taken by the parent"

    manager = make_manager(
        make_impl("vendor.acme", returning("acme"), available=probe),
        make_impl("reference.torch", returning("torch")),
    )
    assert manager.call("scale", 1) == "acme"
    assert in_child(lambda: [manager.call("scale", 1), len(asked)]) == ["torch", 2]
    assert manager.call("scale", 1) == "acme"
    assert asked == [os.getpid()]


def test_a_child_of_a_frozen_parent_is_thawed() -> None:
    manager = make_manager(make_impl("vendor.acme", returning("acme")))
    manager.call("scale", 1)
    manager.freeze()
    manager.registry.register_impl(make_impl("default.flaggems", returning("late")))

    def work() -> list[Any]:
        seen = [manager.frozen, manager.call("scale", 1)]
        return [*seen, manager.registry.unregister("scale", "vendor.acme")]

    assert in_child(work) == [False, "late", True]
    assert manager.frozen
    assert manager.call("scale", 1) == "acme"


def test_a_child_keeps_the_policy_context_it_was_forked_in() -> None:
    manager = make_manager(
        make_impl("vendor.acme", returning("acme")),
        make_impl("reference.torch", returning("torch")),
    )
    with with_preference("reference"):
        assert in_child(lambda: manager.call("scale", 1)) == "torch"


def test_the_default_manager_of_a_child_is_that_of_its_parent() -> None:
    get_default_manager().registry.register_impl(make_impl("vendor.hand", returning("by hand")))
    assert in_child(lambda: call_op("scale", 1)) == "by hand"


def test_a_child_of_a_child_works_too(plugin: Any) -> None:
    manager = with_plugin()
    manager.ensure_initialized()

    def child() -> Any:
        inner = [errors(manager), len(plugin.runs)]
        return [inner, in_child(lambda: [errors(manager), len(plugin.runs), ids(manager)])]

    assert in_child(child) == [
        [[None], 2], [[None], 3, ["vendor.acme", "vendor.zeta"]],
    ]  # fmt: skip


# ------------------------------------------------------------------- locks and half states


def test_a_fork_while_another_thread_changes_the_registry_does_not_deadlock() -> None:
    manager = make_manager(make_impl("vendor.acme", returning("acme")))
    manager.ensure_initialized()

    def work() -> list[Any]:
        manager.registry.register_impl(make_impl("default.flaggems", returning("child")))
        return [manager.call("scale", 1), ids(manager)]

    with Holding(manager):
        assert in_child(work) == ["child", ["default.flaggems", "vendor.acme", "vendor.slow"]]


def test_a_fork_while_another_thread_is_half_way_through_discovery(
    half_way: OpManager, plugin: Any
) -> None:
    assert ids(half_way) == ["vendor.acme"]
    assert in_child(lambda: [errors(half_way), ids(half_way)]) == [
        [None], ["vendor.acme", "vendor.zeta"],
    ]  # fmt: skip


def test_a_fork_while_another_thread_holds_every_lock(half_way: OpManager) -> None:
    other = get_default_manager()
    other.registry.register_impl(make_impl("vendor.hand", returning("by hand")))
    with Holding(other), default._default.lock:
        assert in_child(
            lambda: [call_op("scale", 1), get_default_manager() is other, errors(half_way)]
        ) == ["by hand", True, [None]]


def test_a_fork_while_another_thread_makes_the_default_manager_does_not_deadlock() -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with default._default.lock:
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(CHILD_LIMIT_S)
    try:
        assert in_child(lambda: get_default_manager().registry.list_operators()) == []
    finally:
        let_go.set()
        thread.join()


def test_a_fork_from_a_thread_works() -> None:
    manager = make_manager(make_impl("vendor.acme", returning("acme")))
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(in_child(lambda: manager.call("scale", 1)))
    )
    thread.start()
    thread.join()
    assert answers == ["acme"]


# -------------------------------------------------------- forks that Python does not hear of


def raw_fork() -> int:
    """fork(2) itself: no handler of os.register_at_fork runs. The GIL is kept over the call."""
    return int(ctypes.PyDLL(None).fork())


def test_a_raw_fork_is_noticed_by_the_process_id(plugin: Any) -> None:
    manager = with_plugin()
    manager.registry.register_impl(make_impl("vendor.hand", op_name="shift"))
    manager.freeze()

    def work() -> list[Any]:
        fn = manager.resolve("scale")
        return [
            fn(1) == os.getpid(), len(plugin.runs), errors(manager), manager.frozen,
            ids(manager), ids(manager, "shift"),
        ]  # fmt: skip

    assert in_child(work, fork=raw_fork) == [
        True, 2, [None], False, ["vendor.acme", "vendor.zeta"], ["vendor.hand"],
    ]  # fmt: skip


def test_a_raw_fork_while_other_threads_hold_every_lock(half_way: OpManager) -> None:
    with Holding(half_way):
        assert in_child(lambda: [errors(half_way), ids(half_way)], fork=raw_fork) == [
            [None], ["vendor.acme", "vendor.slow", "vendor.zeta"],
        ]  # fmt: skip


# ---------------------------------------------------------------------------------- spawn


def _spawned(connection: Any) -> None:
    discovery.BUILTIN_MODULES = ()
    manager = get_default_manager()
    manager.registry.declare(SCALE)
    records = [[record.name, record.error] for record in manager.get_discovered_plugins()]
    connection.send([records, ids(manager), call_op("scale", 1) == os.getpid()])


def test_a_spawned_process_starts_afresh_and_discovers_for_itself(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_forks")
    manager = get_default_manager()
    manager.registry.register_impl(make_impl("vendor.hand"))
    manager.freeze()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_spawned, args=(there,))
    process.start()
    there.close()
    try:
        assert here.poll(CHILD_LIMIT_S * 3)
        answer = here.recv()
    finally:
        process.kill()
        process.join()
        here.close()
        process.close()
    assert answer == [[["acme_forks", None]], ["vendor.acme", "vendor.zeta"], True]


def test_a_child_does_not_repeat_what_its_parent_said_of_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    manager = make_manager(make_impl("vendor.hand"))

    def said() -> list[str]:
        lines.clear()
        manager.ensure_initialized()
        return list(lines)

    def said_with_more() -> list[str]:
        manager.registry.register_impl(make_impl("vendor.more", op_name="shift"))
        return said()

    (line,) = said()
    assert "1 ops, served by vendor.hand 1; " in line
    assert in_child(said) == []
    more = line.replace("1 ops", "2 ops").replace("vendor.hand 1", "vendor.hand 1, vendor.more 1")
    assert in_child(said_with_more) == [more]
