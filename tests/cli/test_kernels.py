# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.native import NATIVE
from vllm_fl import native
from vllm_fl.cli import kernels, probes
from vllm_fl.cli.child import Reply
from vllm_fl.native import DeviceBuild, NativeBuild, Refusal

UNFIT = Refusal("unfit", "for another GPU", "build it for this one")
BUILD = NativeBuild(
    "auto",
    "2.11.0+cu130",
    {
        "cpu": DeviceBuild("g++ 12", ("DEFAULT", "AVX2")),
        "cuda": DeviceBuild("nvcc 13.0", ("sm_90",)),
        "hip": DeviceBuild(reason="torch 2.11.0+cu130 is built without ROCm"),
    },
)


@pytest.fixture
def told(monkeypatch):
    """told(cpu=answer or Reply, ...) is what the children say of an installation for CUDA."""

    def told(**answers: Any) -> dict[str, dict[str, Any]]:
        def ask(question: str, arguments: dict[str, Any], *, quiet: bool) -> Reply:
            assert (question, quiet) == ("kernels", True)
            answer = answers[arguments["device"]]
            if isinstance(answer, Reply):
                return answer
            return Reply({"refusal": None, "uses": "", **answer}, None, None, None, (), 0.1)

        monkeypatch.setattr(kernels, "ask", ask)
        monkeypatch.setattr(kernels, "native_build", lambda: BUILD)
        monkeypatch.setattr(native, "native_build", lambda: BUILD)
        monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(native.metadata, "version", lambda name: "2.11.0")
        found = kernels.native_kernels()
        assert (found["asked"], found["torch"], found["problem"]) == ("auto", BUILD.torch, None)
        return {entry["device"]: entry for entry in found["devices"]}

    return told


def test_what_loads_is_told_with_what_it_uses_and_what_was_not_built_with_the_reason(told) -> None:
    found = told(cpu={"uses": "with AVX2"}, cuda={"uses": "on sm_90"})
    assert found["cpu"] == {
        "device": "cpu",
        "state": "works, with AVX2",
        "code": "works",
        "advice": "",
        "compiler": "g++ 12",
        "architectures": ["DEFAULT", "AVX2"],
    }
    assert found["cuda"]["state"] == "works, on sm_90"
    assert (found["hip"]["code"], found["hip"]["compiler"]) == ("missing", None)
    assert found["hip"]["state"].endswith(": torch 2.11.0+cu130 is built without ROCm")
    assert "VLLM_FL_DEVICE=hip pip install" in found["hip"]["advice"]


def test_what_crashes_or_does_not_fit_is_told(told) -> None:
    crashed = Reply(None, None, "was killed by SIGSEGV", None, (), 0.1)
    refused = {"code": "unfit", "why": UNFIT.why, "advice": UNFIT.advice}
    found = told(cpu=crashed, cuda={"refusal": refused})
    assert (found["cpu"]["code"], found["cpu"]["state"]) == (
        "broken",
        "vllm_fl._C cannot be loaded: was killed by SIGSEGV",
    )
    cuda = found["cuda"]
    assert (cuda["code"], cuda["state"], cuda["advice"]) == ("unfit", UNFIT.why, UNFIT.advice)


def test_what_raises_is_told(told) -> None:
    error = {"text": "ImportError: libc10_cuda.so: no such file", "usage": False}
    found = told(cpu={}, cuda=Reply(None, error, None, None, (), 0.1))
    assert found["cuda"]["state"] == f"vllm_fl._C_cuda cannot be loaded: {error['text']}"


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_the_child_loads_them_and_tells_the_instruction_set() -> None:
    answer = probes.QUESTIONS["kernels"](lambda *doing: None, device="cpu")
    assert answer["refusal"] is None
    assert answer["uses"] in ("with DEFAULT", "with AVX2", "with AVX512")


@pytest.mark.parametrize(("available", "uses"), ((True, "on sm_90"), (False, "on no GPU")))
def test_the_child_initialises_the_gpu_to_know_whether_there_is_code_for_it(
    monkeypatch, available: bool, uses: str
) -> None:
    done: list[str] = []
    cuda = SimpleNamespace(
        is_available=lambda: available,
        init=lambda: done.append("init"),
        is_initialized=lambda: bool(done),
        get_device_capability=lambda: (9, 0),
    )
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    monkeypatch.setitem(probes.sys.modules, "torch", torch)
    monkeypatch.setitem(probes.sys.modules, "vllm_fl._C_cuda", SimpleNamespace())
    monkeypatch.setattr(probes, "find_refusal", lambda device: UNFIT if done else None)
    answer = probes.QUESTIONS["kernels"](lambda *doing: None, device="cuda")
    assert answer["uses"].startswith(uses)
    assert answer["refusal"] == (
        {"code": "unfit", "why": UNFIT.why, "advice": UNFIT.advice} if available else None
    )
