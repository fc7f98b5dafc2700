# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from .helpers import ROOT, run_python

HEAVY = ("torch", "vllm", "triton", "flag_gems", "torch_npu", "numpy", "yaml")

LIST = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(*modules: str) -> list[str]:
    """What a fresh interpreter has in sys.modules after importing these."""
    names: list[str] = run_python(LIST, *modules)
    assert set(modules) <= set(names)
    return names


def heavy(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} & set(HEAVY)


def test_importing_the_core_imports_neither_torch_nor_vllm_nor_any_backend() -> None:
    names = imported_by("vllm_fl.dispatch")
    assert heavy(names) == set()
    ours = {name.split(".")[1] for name in names if name.startswith("vllm_fl.")}
    assert ours == {"dispatch"}


def test_importing_every_module_of_the_core_stays_as_light() -> None:
    folder = ROOT / "vllm_fl" / "dispatch"
    modules = [f"vllm_fl.dispatch.{file.stem}" for file in folder.glob("[a-z]*.py")]
    assert len(modules) > 10
    assert heavy(imported_by(*modules)) == set()


def test_importing_the_contracts_imports_neither_vllm_nor_any_backend() -> None:
    pytest.importorskip("torch")
    names = imported_by("vllm_fl.ops")
    assert heavy(names) & {"vllm", "flag_gems", "torch_npu", "yaml"} == set()
    ours = {name.split(".")[1] for name in names if name.startswith("vllm_fl.")}
    assert ours == {"dispatch", "ops"}


@pytest.mark.parametrize("module", ["vllm_fl", "vllm_fl.types", "vllm_fl.backends"])
def test_what_a_vendors_package_imports_is_light(module: str) -> None:
    assert heavy(imported_by(module)) == set()


USE = """
import json, sys
from vllm_fl.dispatch import *
from vllm_fl.dispatch import discovery
discovery.BUILTIN_MODULES = ("vllm_fl.backends.vendor.devices",)
manager = OpManager(config=load_config({"VLLM_FL_LOG_LEVEL": "ERROR"}))
manager.registry.declare(OpSignature.parse("scale(x)"))
def scale(x): return x
manager.registry.register_impl(
    OpImpl("scale", "vendor.cpu", "vendor", scale, "cpu", available=lambda: True)
)
assert manager.call("scale", 1) == 1
manager.explain("scale", 1).to_dict()
manager.freeze()
manager.fingerprint()
print(json.dumps(sorted(sys.modules)))
"""


def test_using_the_dispatcher_on_plain_values_imports_no_torch() -> None:
    assert heavy(run_python(USE)) == set()
