# SPDX-License-Identifier: Apache-2.0
"""`pip install .` on machines that have more and less to compile with, and what runs then."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


@pytest.fixture
def cuda_torch(tmp_path) -> dict[str, str]:
    """An environment in which torch says that it is built with this machine's CUDA; its headers
    are those of any build, but for one that CMake writes."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    for name in ("include", "lib"):
        (folder / name).symlink_to(Path(spec.origin).with_name(name))
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = said.partition("release ")[2].partition(",")[0]
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(f"__version__ = '2.13.0+cuda'\ncuda = '{release}'\n")
    return {
        "PYTHONPATH": str(folder.parent),
        "CXX": "g++ -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
        "TORCH_CUDA_ARCH_LIST": "9.0+PTX",
    }


@needs_cxx
@needs_nvcc
def test_with_nvcc_the_kernels_for_cuda_are_compiled_beside_those_for_the_cpu(
    tmp_path, cuda_torch
) -> None:
    """They cannot be loaded here, where torch is built without CUDA."""
    installation = Installation(tmp_path)
    sources = tree(tmp_path / "tree")
    command = [installation.python, sources / "setup.py", "-q", "build"]
    out = tmp_path / "out"
    build: list[Any] = [*command, "--build-lib", out, "--build-temp", tmp_path / "temp"]
    code = f"import os, sys; os.chdir({str(sources)!r}); os.execv(sys.argv[1], sys.argv[1:])"
    log = installation.run([sys.executable, "-c", code, *build], cuda_torch).stderr
    assert "built native kernels for cuda with nvcc " in log
    module = out / "vllm_fl" / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert paths_in(module.read_bytes(), [*builders_paths(), f"{tmp_path}/", "tmpxft"]) == []
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True
    ).stdout
    assert " PyInit__C_cuda\n" in symbols
    assert " cuda" not in symbols  # the runtime is inside, and stays there
    needed = subprocess.run(
        ["readelf", "-d", module], capture_output=True, text=True, check=True
    ).stdout
    assert "libcudart" not in needed
