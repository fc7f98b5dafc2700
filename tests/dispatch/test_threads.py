# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_fl.dispatch import (
    OpManager,
    OpRegistry,
    call_op,
    get_default_manager,
    load_config,
    reset_default_manager,
    with_preference,
)
from vllm_fl.dispatch.types import Origin

from .helpers import make_impl, make_manager, returning

THREADS = 8
ROUNDS = 60


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads take turns every 10 us instead of 5 ms, so that short races are met."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Run work(0), work(1), ... at the same time; return their results or raise their error."""
    results: list[Any] = [None] * threads
    errors: list[BaseException] = []
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        start.wait(30)
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def test_registrations_of_many_threads_are_all_kept() -> None:
    registry = OpRegistry()

    def work(number: int) -> None:
        for i in range(ROUNDS):
            registry.register_impl(make_impl(f"vendor.t{number}.i{i}"))

    together(work)
    assert len(registry.get_implementations("scale")) == THREADS * ROUNDS
    assert registry.generation == THREADS * ROUNDS


def test_of_many_threads_that_register_the_same_id_one_succeeds() -> None:
    registry = OpRegistry()

    def work(number: int) -> int:
        won = 0
        for i in range(ROUNDS):
            try:
                registry.register_impl(make_impl(f"vendor.acme.i{i}"))
            except ValueError:
                continue
            won += 1
        return won

    assert sum(together(work)) == ROUNDS


def test_batches_of_different_threads_do_not_mix() -> None:
    registry = OpRegistry()

    def work(number: int) -> None:
        for i in range(ROUNDS):
            try:
                with registry.batch(Origin("module", f"m{number}")):
                    registry.register_impl(make_impl(f"vendor.t{number}.i{i}"))
                    if i % 2:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass

    together(work)
    kept = registry.get_implementations("scale")
    assert len(kept) == THREADS * ROUNDS // 2
    assert all(f"vendor.{i.origin.name.replace('m', 't')}." in i.impl_id for i in kept if i.origin)


def test_threads_that_register_and_resolve_at_once_never_see_less_than_was_there() -> None:
    manager = make_manager(make_impl("reference.torch", returning(0), priority=0))

    def work(number: int) -> list[int]:
        seen = []
        for i in range(1, ROUNDS):
            if number % 2:
                priority = i * THREADS + number
                manager.registry.register_impl(
                    make_impl(f"vendor.t{number}.i{i}", returning(priority), priority=priority)
                )
                # Registering has returned, so this thread sees its own or something better.
                for got in (manager.call("scale", 1), manager.resolve("scale")(1)):
                    assert got >= priority
            else:
                seen.append(manager.call("scale", 1))
        return seen

    for seen in together(work):
        assert seen == sorted(seen)
    assert manager.call("scale", 1) == (ROUNDS - 1) * THREADS + THREADS - 1


def test_a_removed_implementation_is_not_called_after_its_removal_returned() -> None:
    manager = make_manager(make_impl("reference.torch", returning("torch")))
    errors: list[str] = []

    def work(number: int) -> None:
        for i in range(ROUNDS):
            impl_id = f"vendor.t{number}.i{i}"
            if number % 2:
                manager.registry.register_impl(make_impl(impl_id, returning(impl_id)))
                manager.registry.unregister("scale", impl_id)
                if manager.call("scale", 1) == impl_id:
                    errors.append(impl_id)
            else:
                manager.call("scale", 1)

    together(work)
    assert errors == []
    assert manager.call("scale", 1) == "torch"


def test_four_threads_call_the_same_op_and_get_their_own_answers() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=lambda x, factor=2: x % 2 == 0 or "odd"),
        make_impl("reference.torch"),
    )

    def work(number: int) -> list[int]:
        return [manager.call("scale", x, factor=number) for x in range(500)]

    for number, got in enumerate(together(work, 4)):
        assert got == [x * number for x in range(500)]


def test_a_context_of_one_thread_does_not_leak_into_others_at_full_speed() -> None:
    manager = make_manager(
        make_impl("vendor.acme", returning("vendor")),
        make_impl("reference.torch", returning("reference")),
    )

    def work(number: int) -> set[str]:
        kind = ("vendor", "reference")[number % 2]
        seen = set()
        for _ in range(ROUNDS):
            with with_preference(kind):
                seen.add(manager.call("scale", 1))
        return seen

    assert together(work) == [{"vendor"}, {"reference"}] * (THREADS // 2)


def test_threads_that_meet_at_the_first_use_run_discovery_once(write_module: Any) -> None:
    write_module(
        "acme_once",
        "import time\nruns = []\n"
        "def register(registry):\n    runs.append(1)\n    time.sleep(0.05)\n",
    )
    manager = make_manager(
        make_impl("vendor.acme", returning("acme")),
        config=load_config({"VLLM_FL_PLUGIN_MODULES": "acme_once"}),
    )
    assert together(lambda number: manager.call("scale", 1)) == ["acme"] * THREADS
    import acme_once

    assert acme_once.runs == [1]
    assert len(manager.get_discovered_plugins()) == 1


def test_threads_that_meet_share_one_default_manager() -> None:
    managers: list[OpManager] = together(lambda number: get_default_manager())
    assert len({id(manager) for manager in managers}) == 1


def test_resetting_while_others_call_breaks_no_call() -> None:
    def fresh() -> OpManager:
        manager = get_default_manager()
        if not manager.registry.get_implementations("scale"):
            with contextlib.suppress(ValueError):  # another thread was faster
                manager.registry.register_impl(make_impl("vendor.acme", returning("acme")))
        return manager

    def work(number: int) -> None:
        for _ in range(ROUNDS // 4):
            if number == 0:
                reset_default_manager()
            else:
                assert fresh().call("scale", 1) == "acme"

    together(work)
    fresh()
    assert call_op("scale", 1) == "acme"


def test_freezing_and_thawing_while_others_call_breaks_no_call() -> None:
    manager = make_manager(make_impl("vendor.acme", returning("acme")))

    def work(number: int) -> None:
        for i in range(ROUNDS):
            if number == 0:
                manager.freeze()
            elif number == 1:
                manager.thaw()
            elif number == 2:
                manager.registry.register_impl(make_impl(f"vendor.z{i}", returning("z")))
            else:
                assert manager.call("scale", 1) == "acme"

    together(work)
