# SPDX-License-Identifier: Apache-2.0
"""setup.py builds what can be built, and says what it did not; `vllm_fl.native` reads that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_fl import native
from vllm_fl.backends.vendor.devices import read_torch_marks
from vllm_fl.native import NativeBuild, native_build, native_refusal

ROOT = Path(__file__).parents[1]


def build(
    folder: Path, command: str = "build_py", *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Build into a folder; for the Python part no compiler is run."""
    command = [sys.executable, "setup.py", "-q", command, "--build-lib", str(folder), *options]
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def record(tmp_path, monkeypatch):
    """record(cuda={...}, torch=...) puts another record in the place of the installation's, and
    lets the modules be there."""

    def record(torch: str | None = None, there: bool = True, **devices: dict[str, object]) -> None:
        path = tmp_path / "record.json"
        nothing = {"compiler": None, "architectures": [], "reason": None}
        made = {name: nothing | changes for name, changes in devices.items()}
        path.write_text(json.dumps({"asked": "auto", "torch": torch, "devices": made}))
        build = native_build(path)
        monkeypatch.setattr(native, "native_build", lambda: build)
        monkeypatch.setattr(
            native.importlib.util, "find_spec", lambda name: object() if there else None
        )

    return record


@pytest.mark.parametrize(
    ("environ", "reason"),
    (
        ({"VLLM_FL_DEVICE": "none"}, "VLLM_FL_DEVICE=none"),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler (no-such-compiler)"),
    ),
    ids=("none", "no compiler"),
)
def test_without_native_code_the_package_is_built_and_says_why(tmp_path, environ, reason):
    done = build(tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    assert f"installing as pure Python, without native kernels: {reason}" in done.stderr
    assert (tmp_path / "vllm_fl/__init__.py").is_file()
    found = native_build(tmp_path / "vllm_fl/_native.json")
    assert found.built == ()
    assert found.devices["cpu"].reason == reason
    assert found.devices["cuda"].reason and found.devices["hip"].reason


@pytest.mark.parametrize(
    ("environ", "says"),
    (
        (
            {"VLLM_FL_DEVICE": "cpu", "CXX": "no-such-compiler"},
            "VLLM_FL_DEVICE=cpu cannot be built: there is no C++ compiler",
        ),
        (
            {"VLLM_FL_DEVICE": "cuda", "CXX": "no-such-compiler"},
            "VLLM_FL_DEVICE=cuda cannot be built: there is no C++ compiler",
        ),
        (
            {"VLLM_FL_DEVICE": "abacus"},
            "must be one of auto, cpu, cuda, hip, none, found 'abacus'",
        ),
    ),
    ids=("cpu", "cuda", "unknown"),
)
def test_what_is_asked_for_by_name_and_cannot_be_built_is_an_error(tmp_path, environ, says):
    done = build(tmp_path, **environ)
    assert done.returncode != 0
    assert says in done.stderr


def test_what_torch_is_not_built_for_is_left_out_by_default(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    found = native_build(tmp_path / "vllm_fl/_native.json")
    spec = native.importlib.util.find_spec("torch")
    marks = read_torch_marks(Path(spec.origin).parent)
    for device, name in (("cuda", "CUDA"), ("hip", "HIP")):
        reason = found.devices[device].reason
        without = f"torch {metadata.version('torch')} is built without {name}"
        assert reason == without or device in marks


# ----------------------------------------------------------------- compilers that only say so

COMPILER = """#!/bin/sh
case "$1" in
--version) echo "{version}"; exit;;
--list-gpu-code) echo sm_80 sm_90 sm_100; exit;;
--dryrun) exit;;
esac
for word; do [ "$before" = -o ] && out=$word; before=$word; done
case "$*" in *{fails}*) echo "$0: error: no"; exit 1;; esac
echo "$@" >>{folder}/calls
: >"$out"
"""


@pytest.fixture
def compile(tmp_path, monkeypatch):
    """compile(fails="part of a command", ...) builds all with a torch for CUDA and tools that
    write empty files, and returns the process, what it made, its record and the commands."""
    torch = tmp_path / "site/torch"
    for file in ("include/ATen/ATen.h", "version.py", "__init__.py"):
        (torch / file).parent.mkdir(parents=True, exist_ok=True)
        (torch / file).touch()
    (torch / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    toolkit = tmp_path / "cuda"
    for file in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (toolkit / file).parent.mkdir(parents=True)
        (toolkit / file).touch()

    def compile(fails: str = "no-such-file", **environ: str):
        versions = {"g++": "g++ 12.2", "nvcc": "Cuda compilation tools, release 13.0, V13.0.88"}
        for name, version in versions.items():
            tool = toolkit / "bin" / name
            tool.parent.mkdir(exist_ok=True)
            tool.write_text(COMPILER.format(version=version, fails=fails, folder=tmp_path))
            tool.chmod(0o755)
        out = tmp_path / "out"
        given = {"CXX": str(toolkit / "bin/g++"), "CUDA_HOME": str(toolkit)}
        given |= {"PYTHONPATH": str(torch.parent), "TORCH_CUDA_ARCH_LIST": ""}
        done = build(out, "build", "--build-temp", str(tmp_path / "temp"), **{**given, **environ})
        made = sorted(path.name.partition(".")[0] for path in (out / "vllm_fl").glob("_C*"))
        calls = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        return done, made, native_build(out / "vllm_fl/_native.json"), calls

    return compile


def test_with_a_torch_for_cuda_and_nvcc_both_modules_are_built_by_default(compile):
    done, made, record, calls = compile()
    assert done.returncode == 0, done.stderr
    assert made == ["_C", "_C_cuda"]
    assert (record.built, record.torch) == (("cpu", "cuda"), "2.11.0+cu130")
    assert record.devices["cuda"].compiler == "nvcc 13.0"
    assert record.devices["cuda"].architectures == ("sm_80", "sm_90", "sm_100", "compute_100")
    (gated,) = [call for call in calls if " csrc/cuda/gated.cu " in call]
    codes = [word.rpartition("code=")[2] for word in gated.split() if "-gencode" in word]
    assert codes == ["sm_80", "sm_90", "sm_100", "compute_100"]
    assert "-isystem" not in gated  # torch's headers would take minutes


def test_where_nvcc_fails_the_kernels_for_the_cpu_are_built_and_what_it_said_is_kept(compile):
    compile()  # and what an earlier build left is removed
    done, made, record, _ = compile(fails="rotary.cu")
    assert done.returncode == 0, done.stderr
    assert made == ["_C"]
    assert record.built == ("cpu",)
    reason = record.devices["cuda"].reason
    assert reason == "compiling failed: nvcc: error: no"
    assert f"installing without kernels for cuda: {reason}" in done.stderr


def test_where_nvcc_fails_and_cuda_was_asked_for_by_name_it_is_an_error(compile):
    done, made, _, _ = compile(fails="rotary.cu", VLLM_FL_DEVICE="cuda")
    assert done.returncode != 0
    assert "VLLM_FL_DEVICE=cuda cannot be built: compiling failed: " in done.stderr
    assert "_C_cuda" not in made


def test_what_benchmarks_tune_with_is_compiled_only_where_it_is_asked_for(compile):
    _, _, _, calls = compile(VLLM_FL_TUNE="1")
    tuned = {word for call in calls if "-DVLLM_FL_TUNE" in call for word in call.split()}
    assert {"csrc/cuda/bindings.cpp", "csrc/cuda/gated.cu"} <= tuned
    assert "csrc/cpu/ops.cpp" not in tuned
    assert not [call for call in compile()[3] if "-DVLLM_FL_TUNE" in call]


def test_where_nothing_was_written_nothing_is_claimed(tmp_path):
    found = native_build(tmp_path / "absent.json")
    assert found == NativeBuild(problem="it was not built by setup.py")
    assert (found.built, found.devices) == ((), {})


@pytest.mark.parametrize(("text", "error"), (("{", "JSONDecodeError"), ("{}", "KeyError")))
def test_a_broken_record_is_told(tmp_path, text, error):
    path = tmp_path / "_native.json"
    path.write_text(text)
    problem = native_build(path).problem
    assert problem is not None and problem.startswith(f"_native.json cannot be read ({error}")


def test_native_code_for_another_torch_is_refused(record, monkeypatch):
    monkeypatch.setattr(native.metadata, "version", lambda name: "2.13.0+cpu")
    record("2.13.0+cu130", cpu={})
    assert native_refusal("cpu") is None  # the same release, built for another device
    record("2.12.0", cpu={}, cuda={})
    assert native_refusal("cpu") == (
        "vllm_fl's CPU kernels were built for torch 2.12.0, and this is 2.13.0+cpu; "
        f"{native.how_to_build('cpu')}"
    )
    refusal = native_refusal("cuda")
    assert refusal is not None and refusal.startswith("vllm_fl's CUDA kernels were built for")


@pytest.mark.parametrize("there", (True, False), ids=("stale file", "no file"))
def test_why_there_are_no_kernels_and_how_to_build_them_is_told_for_each_device(record, there):
    record(
        "2.13.0",
        there,
        cpu={"reason": "there is no C++ compiler (c++)"},
        cuda={"reason": "nvcc was not found"},
    )
    assert native_refusal("cpu") == (
        "vllm_fl was built without CPU kernels: there is no C++ compiler (c++); install a C++ "
        "compiler and torch, then VLLM_FL_DEVICE=cpu pip install --no-build-isolation --no-deps "
        "--force-reinstall vllm_fl from its source (docs/native-kernels.md)"
    )
    refusal = native_refusal("cuda")
    assert refusal is not None
    assert "built without CUDA kernels: nvcc was not found; install nvcc and a C++" in refusal
    assert "VLLM_FL_DEVICE=cuda pip install" in refusal


def test_a_module_that_was_built_and_is_gone_is_told(record):
    record("2.13.0", there=False, cpu={})
    refusal = native_refusal("cpu")
    assert refusal is not None and "without CPU kernels: vllm_fl._C is gone; " in refusal


def test_what_was_built_by_other_means_than_setup_is_tried(monkeypatch):
    monkeypatch.setattr(native, "native_build", lambda: NativeBuild(problem="no record"))
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: object())
    assert native_refusal("cuda") is None


# ------------------------------------------------------------------------------ architectures


class Gpu:
    """torch of a process that has initialised a GPU, or has not."""

    def __init__(self, arch: str, initialised: bool = True) -> None:
        self.cuda, self.arch, self.is_initialized = self, arch, lambda: initialised
        self.version = SimpleNamespace(hip="6.4" if arch.startswith("gfx") else None)

    def get_device_capability(self) -> tuple[int, int]:
        return int(self.arch[3:-1]), int(self.arch[-1])

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(gcnArchName=f"{self.arch}:sramecc+:xnack-")


BUILT = ("sm_80", "sm_90", "sm_100", "compute_100")
RUNS = (
    (BUILT, "sm_80", True), (BUILT, "sm_89", True), (BUILT, "sm_90", True),
    (BUILT, "sm_103", True), (BUILT, "sm_120", True), (BUILT, "sm_75", False),
    (("sm_80",), "sm_90", False), (("sm_89",), "sm_80", False), (("sm_90a",), "sm_90", True),
    (("sm_100a",), "sm_103", False), (("sm_100f",), "sm_103", True),
    (("compute_80",), "sm_120", True), (("compute_90a",), "sm_100", False),
    (("gfx90a", "gfx942"), "gfx942", True), (("gfx90a",), "gfx1100", False),
)  # fmt: skip


@pytest.mark.parametrize(("built", "gpu", "runs"), RUNS)
def test_kernels_are_refused_on_a_gpu_that_they_have_no_code_for(
    record, monkeypatch, built, gpu, runs
):
    device = "hip" if gpu.startswith("gfx") else "cuda"
    record(None, **{device: {"architectures": built}})
    monkeypatch.setitem(sys.modules, "torch", Gpu(gpu))
    assert (native_refusal(device) is None) == runs


def test_the_refusal_says_what_there_is_and_how_to_build_for_this_gpu(record, monkeypatch):
    record(None, cuda={"architectures": BUILT})
    monkeypatch.setitem(sys.modules, "torch", Gpu("sm_75"))
    assert native_refusal("cuda") == (
        "vllm_fl's CUDA kernels are for sm_80, sm_90, sm_100, compute_100, and this GPU is sm_75; "
        f"set TORCH_CUDA_ARCH_LIST=7.5, and {native.how_to_build('cuda')}"
    )


def test_where_cuda_is_not_initialised_the_gpu_is_not_asked(record, monkeypatch):
    record(None, cuda={"architectures": BUILT})
    monkeypatch.setitem(sys.modules, "torch", Gpu("sm_75", initialised=False))
    assert native_refusal("cuda") is None


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_a_backend_without_its_extension_is_unavailable_and_its_guards_say_so(monkeypatch, device):
    """Guards are asked, too, for a device that is only assumed."""
    pytest.importorskip("torch")
    from vllm_fl.backends.vendor import native_kernels
    from vllm_fl.backends.vendor.cpu import fl as cpu
    from vllm_fl.backends.vendor.cuda import fl as cuda

    backend = {"cpu": cpu, "cuda": cuda}[device]
    for module in (backend, native_kernels):
        monkeypatch.setattr(module, "native_refusal", lambda device: f"no {device}")
    monkeypatch.setitem(sys.modules, native.MODULES[device], None)
    kernels = native_kernels.NativeKernels(lambda: device)
    assert backend.backend.is_available() == f"no {device}"
    assert kernels.supports_rms_norm(None) == f"no {device}"
    with pytest.raises(ImportError):
        kernels.rms_norm(None)
