# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch import OpRegistry, SelectionPolicy, with_preference
from vllm_fl.dispatch.fingerprint import fingerprint
from vllm_fl.dispatch.types import DeviceFacts, Origin

from .helpers import CPU, make_impl, make_manager, run_python, scale

ACME = Origin("entry_point", "acme", "vllm-plugin-acme", "1.0")


def of(*impls: Any, policy: Any = None, device: DeviceFacts = CPU, extra: Any = (),
       origin: Origin = ACME) -> str:  # fmt: skip
    """The fingerprint of a registry with these implementations."""
    registry = OpRegistry()
    with registry.batch(origin):
        registry.register_many(impls or [make_impl("vendor.acme"), make_impl("reference.torch")])
    return fingerprint(registry.snapshot(), policy or SelectionPolicy(), device, extra=extra)


BASE = of()


def test_a_fingerprint_is_64_hex_digits_and_the_same_for_the_same() -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", BASE)
    assert of() == BASE
    assert of(make_impl("reference.torch"), make_impl("vendor.acme")) == BASE


@pytest.mark.parametrize(
    "other",
    [
        lambda: of(policy=SelectionPolicy(prefer="reference")),
        lambda: of(policy=SelectionPolicy(strict=True)),
        lambda: of(policy=SelectionPolicy(deny_vendors=frozenset({"acme"}))),
        lambda: of(policy=SelectionPolicy(per_op_order=(("scale", ("native",)),))),
        lambda: of(policy=SelectionPolicy(per_op_order=(("other", ("native",)),))),
        lambda: of(device=DeviceFacts("cpu", "cpu", arch="avx512")),
        lambda: of(device=DeviceFacts("cuda", "cuda")),
        lambda: of(extra=["a patched function"]),
        lambda: of(origin=Origin("entry_point", "acme", "vllm-plugin-acme", "1.1")),
        lambda: of(make_impl("vendor.acme")),
        lambda: of(*map(make_impl, ("vendor.acme", "reference.torch", "default.flaggems"))),
        lambda: of(make_impl("vendor.acme", priority=110), make_impl("reference.torch")),
        lambda: of(make_impl("vendor.acme", mutates=("x",)), make_impl("reference.torch")),
        lambda: of(make_impl("vendor.acme", batch_invariant=True), make_impl("reference.torch")),
        lambda: of(make_impl("vendor.acme", lambda x, factor=2: x), make_impl("reference.torch")),
        lambda: of(make_impl("vendor.acme", supports=lambda x, factor=2: True),
                   make_impl("reference.torch")),
    ],
)  # fmt: skip
def test_it_changes_with_whatever_decides_which_code_runs(other: Callable[[], str]) -> None:
    assert other() != BASE


def test_it_does_not_change_with_what_does_not_decide() -> None:
    assert of(device=DeviceFacts("cpu", "cpu", name="a CPU by another name")) == BASE
    named = SelectionPolicy(per_op_order={"scale": ["native"], "a": ["vendor"]})
    again = SelectionPolicy(per_op_order={"a": ["vendor"], "scale": ["native"]})
    assert of(policy=named) == of(policy=again)
    assert of(extra=["b", "a"]) == of(extra=["a", "b"])


@pytest.mark.parametrize(
    "wrap",
    [
        "f",
        "functools.partial(f)",
        "functools.wraps(f)(lambda *a, **k: f(*a, **k))",
        "Kernels().method",
        "Kernels()",
    ],
)
def test_it_changes_with_the_source_of_an_implementation_however_it_is_wrapped(
    plugin_path: Path, wrap: str
) -> None:
    seen = []
    for number in range(2):
        (plugin_path / f"acme_source_{number}.py").write_text(
            "import functools\n"
            f"def f(x, factor=2):\n    return x * {number}\n"
            "class Kernels:\n"
            "    def method(self, x, factor=2):\n        return x\n"
            "    def __call__(self, x, factor=2):\n        return x\n"
            f"fn = {wrap}\n"
        )
        importlib.invalidate_caches()
        module = importlib.import_module(f"acme_source_{number}")
        seen.append(of(make_impl("vendor.acme", module.fn), make_impl("reference.torch")))
    assert seen[0] != seen[1]


def test_a_built_in_function_has_no_source_and_is_no_problem() -> None:
    assert of(make_impl("vendor.acme", max)) == of(make_impl("vendor.acme", max))
    assert of(make_impl("vendor.acme", functools.partial(max))) == of(make_impl("vendor.acme", max))


CHILD = """
import json, sys
from vllm_fl.dispatch import *
from vllm_fl.dispatch import discovery
discovery.BUILTIN_MODULES = ("vllm_fl.backends.vendor.devices",)
manager = OpManager(
    config=load_config({"VLLM_FL_DENY_VENDORS": "cuda,rocm,xpu", "VLLM_FL_LOG_LEVEL": "ERROR"}),
    device=DeviceFacts("cpu", "cpu"),
)
def scale(x): ...
for name in sys.argv[1:]:
    manager.registry.register_impl(OpImpl("scale", name, "vendor", scale, "acme"))
print(json.dumps(manager.fingerprint()))
"""


def test_it_is_the_same_in_every_process_whatever_the_hash_seed_and_the_order() -> None:
    names = ("vendor.acme", "vendor.acme.fast", "vendor.acme.old")
    seen = [
        run_python(CHILD, *order, env={"PYTHONHASHSEED": seed})
        for seed, order in (("0", names), ("1", names), ("4242", reversed(names)))
    ]
    assert seen[0] == seen[1] == seen[2]


def test_a_manager_takes_its_own_policy_or_that_of_the_context() -> None:
    manager = make_manager(make_impl("vendor.acme"), make_impl("reference.torch"))
    base = manager.fingerprint()
    assert manager.fingerprint(extra=("more",)) != base
    with with_preference("reference"):
        assert manager.fingerprint() != base
    assert manager.fingerprint() == base


def test_after_the_freeze_it_stays_what_it_was() -> None:
    manager = make_manager(make_impl("vendor.acme", scale))
    manager.freeze()
    before = manager.fingerprint()
    manager.registry.register_impl(make_impl("default.flaggems"))
    assert manager.fingerprint() == before
    manager.thaw()
    assert manager.fingerprint() != before
