# SPDX-License-Identifier: Apache-2.0
"""`pip install .` on machines that have more and less to compile with, and what runs then."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.installation import (
    ROOT,
    Installation,
    builders_paths,
    kernels,
    notes_on_kernels,
    paths_in,
)

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

SECONDS = 240
"""That a build for the CPU may take on two cores."""
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "vllm_fl")
TOOLS = ("g++", "as", "ld")
"""g++, and what it runs."""

needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")


def tree(folder: Path) -> Path:
    """The sources alone: pip builds in the tree."""
    folder.mkdir()
    built = shutil.ignore_patterns("*.so", "_native.json", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=built)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def path_of(folder: Path, *tools: str) -> dict[str, str]:
    """An environment in which only these tools are found."""
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return {"PATH": str(folder), "CXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}


def test_without_a_compiler_it_installs_as_pure_python_and_doctor_says_so(tmp_path) -> None:
    installation = Installation(tmp_path)
    log = installation.install(tree(tmp_path / "tree"), path_of(tmp_path / "bin"))
    assert "installing as pure Python, without native kernels: there is no C++ compiler (" in log
    assert installation.modules == []
    data = installation.cli("doctor")
    assert set(kernels(data).values()) == {"missing"}
    (note,) = notes_on_kernels(data)
    assert note.startswith("vllm_fl was built without CPU kernels: there is no C++ compiler (")
    assert (data["verdict"]["problems"], data["error"]) == (0, None)


@pytest.fixture(scope="module")
def with_cxx(tmp_path_factory) -> tuple[Installation, float]:
    """Installed with g++ and nothing else, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("with_cxx")
    installation = Installation(folder)
    start = time.monotonic()
    installation.install(tree(folder / "tree"), path_of(folder / "bin", *TOOLS))
    return installation, time.monotonic() - start


@needs_cxx
def test_with_a_cxx_compiler_alone_it_has_kernels_for_the_cpu_and_doctor_says_so(with_cxx) -> None:
    installation, seconds = with_cxx
    data = installation.cli("doctor")
    found = kernels(data)
    assert (found.pop("cpu"), set(found.values())) == ("works", {"missing"})
    assert notes_on_kernels(data) == []
    assert (data["verdict"]["problems"], data["error"]) == (0, None)
    assert seconds < SECONDS, f"{seconds:.0f} s"


@needs_cxx
def test_no_path_of_the_builder_is_in_what_was_installed(with_cxx) -> None:
    installation, _ = with_cxx
    paths = [*builders_paths(), f"{installation.folder}/"]
    (module,) = installation.modules
    record = module.with_name("_native.json")
    assert paths_in(module.read_bytes(), paths) == []
    assert paths_in(record.read_bytes(), paths) == []


@needs_cxx
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_a_cpu_without_avx512_is_served_and_every_contract_is_kept(with_cxx, capability) -> None:
    """By the kernels of a lesser CPU, which torch is told that this is."""
    installation, _ = with_cxx
    lesser = {"ATEN_CPU_CAPABILITY": capability.lower(), "OMP_NUM_THREADS": "1"}
    states = {
        e["device"]: e["state"] for e in installation.cli("doctor", **lesser)["native"]["devices"]
    }
    assert states["cpu"] == f"works, with {capability}"
    report = installation.cli("verify", "--impl", "vendor.cpu.fl", "--workers", "2", **lesser)
    counts = [
        c for op in report["ops"] for i in op["implementations"] for c in i["dtypes"].values()
    ]
    assert sum(c["passed"] for c in counts) > 100
    assert sum(c["failed"] for c in counts) == 0


@needs_cxx
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_a_cpu_without_avx512_serves_a_model_as_stock_vllm_does(
    engine, with_cxx, capability
) -> None:
    installation, _ = with_cxx
    lesser = {"ATEN_CPU_CAPABILITY": capability.lower()}
    # vLLM compiles its count of the tokens that are likelier, for which torch 2.13 writes code
    # that no CPU without AVX2 can be compiled for.
    plain = {"logprobs": False}
    # Before whatever PYTHONPATH this process has.
    ours = lesser | {"PYTHONPATH": str(installation.packages)}
    reply = engine("tiny", ours, python=installation.python, **plain)
    served = {row["op"]: row["impl_id"] for row in reply["routes"][0]["ops"]}
    assert {served[op] for op in ("rms_norm", "rotary_embedding", "silu_and_mul")} == {
        "vendor.cpu.fl"
    }
    stock = engine("tiny", lesser | {"VLLM_PLUGINS": ""}, **plain)
    assert reply["tokens"] == stock["tokens"]


# --------------------------------------------------------------------------------------- CUDA


@needs_cxx
@needs_nvcc
def test_with_nvcc_it_has_kernels_for_cuda_too_and_doctor_says_so(tmp_path) -> None:
    """By name, as here torch is built without CUDA; that does not keep the module from loading."""
    installation = Installation(tmp_path)
    asked = {"VLLM_FL_DEVICE": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0+PTX"}
    log = installation.install(tree(tmp_path / "tree"), asked)
    assert re.search(r"built native kernels for cuda with nvcc [\d.]+, sm_90, compute_90 and", log)
    data = installation.cli("doctor")
    assert kernels(data) == {"cpu": "works", "cuda": "works", "hip": "missing"}
    assert notes_on_kernels(data) == []
    _, module = installation.modules
    assert paths_in(module.read_bytes(), [*builders_paths(), f"{tmp_path}/", "tmpxft"]) == []
    assert " PyInit__C_cuda\n" in said("nm", "-D", "--defined-only", module)
    # The runtime is inside, and stays there: torch may bring another.
    assert " cuda" not in said("nm", "-D", "--defined-only", module)
    assert "libcudart" not in said("readelf", "-d", module)


def said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
