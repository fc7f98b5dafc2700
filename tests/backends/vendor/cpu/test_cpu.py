# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backends.helpers import cpu_manager, randn
from vllm_fl.backends.vendor.cpu import register_ops
from vllm_fl.backends.vendor.cpu.cpu import backend
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import DeviceFacts

NO_EXTENSION = "this vLLM has no compiled extension (_C*.so)"
IMPLS = {impl.op_name: impl for impl in register_ops.backend.implementations}


def find_vllm_in(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let a look for vLLM find an installation in that folder, or none."""
    spec = None
    if folder is not None:
        spec = importlib.machinery.ModuleSpec("vllm", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "vllm" else found(name)
    )


def test_it_is_available_with_any_build_of_the_extension(monkeypatch, tmp_path):
    (tmp_path / "_C_AVX2.abi3.so").touch()
    find_vllm_in(monkeypatch, tmp_path)
    assert backend.is_available() is True


def test_a_vllm_without_an_extension_is_the_reason_not_to_be_available(monkeypatch, tmp_path):
    find_vllm_in(monkeypatch, tmp_path)
    assert backend.is_available() == NO_EXTENSION


def test_without_vllm_the_requirement_is_the_reason(monkeypatch):
    find_vllm_in(monkeypatch, None)
    assert backend.is_available() == NO_EXTENSION
    decision = cpu_manager().decide("rms_norm")
    [loser] = [x for x in decision.losers if x.impl_id == "vendor.cpu"]
    assert (loser.code, loser.reason) == ("requires", "requires vllm, not installed")


def test_another_device_than_the_cpu_is_the_reason_not_to_use_it():
    manager = OpManager(config=Config(), device=DeviceFacts("cuda", "cuda"))
    decision = manager.decide("rms_norm")
    reasons = {x.impl_id: (x.code, x.reason) for x in decision.losers}
    assert reasons["vendor.cpu"] == ("device", "runs on cpu, this device is cuda")


@pytest.mark.usefixtures("vllms_kernels_first")
def test_a_missing_kernel_is_named_and_only_what_calls_it_is_served_by_another(
    monkeypatch, kernels
):
    part = IMPLS["silu_and_mul"].backend
    monkeypatch.setattr(part, "kernels", ("_C.silu_and_mul", "_C.no_such_kernel", "_C.nor_this"))
    says = r"^vLLM's extension has no _C\.no_such_kernel, _C\.nor_this$"
    with pytest.raises(RuntimeError, match=says):
        part.load()
    manager = cpu_manager()
    x = randn((3, 64), torch.float32)
    manager.call("silu_and_mul", x)
    decision = manager.explain("silu_and_mul", x)
    assert decision.winner_id == "reference.torch"
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert "vLLM's extension has no _C.no_such_kernel" in reasons["vendor.cpu"]
    manager.call("gelu_and_mul", x)
    assert manager.explain("gelu_and_mul", x).winner_id == "vendor.cpu"


def test_an_extension_for_another_device_is_not_taken_for_the_cpus(monkeypatch, kernels):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: False)
    says = r"^vLLM's extension was not built for CPU: _C\.silu_and_mul$"
    with pytest.raises(RuntimeError, match=says):
        IMPLS["silu_and_mul"].backend.load()


def test_the_kernels_that_a_function_names_exist_and_are_those_that_it_calls(kernels):
    for impl in IMPLS.values():
        named = set(impl.backend.kernels)
        called = set(re.findall(r"torch\.ops\.(_C\.\w+)", inspect.getsource(impl.fn)))
        assert named == called, impl.op_name
        assert all(hasattr(kernels, name.removeprefix("_C.")) for name in named), impl.op_name
    assert len(IMPLS) >= 8


def test_registering_imports_neither_vllm_nor_its_extension():
    code = (
        "import sys\n"
        "from vllm_fl.dispatch import OpRegistry\n"
        "from vllm_fl.backends.vendor.cpu import register_ops\n"
        "register_ops.register_builtins(OpRegistry())\n"
        "register_ops.backend.is_available()\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'vllm'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
