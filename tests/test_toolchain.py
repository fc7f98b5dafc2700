# SPDX-License-Identifier: Apache-2.0
"""What setup.py compiles with, and what it says where something is missing or does not fit."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
sys.path.insert(0, str(CSRC))

import toolchain  # noqa: E402
from toolchain import CannotBuild, Compiler, Torch  # noqa: E402

sys.path.remove(str(CSRC))

KNOWN = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_TORCH = Torch(Path("torch"), "2.11.0+cu130", {"cuda": "13.0"})
HIP_TORCH = Torch(Path("torch"), "2.11.0+rocm6.4", {"hip": "6.4.43482"})


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def cxx(bare, monkeypatch) -> None:
    """A C++ compiler, started through a cache of objects."""
    for name in ("ccache", "g++"):
        script(bare / "bin" / name, "echo 'g++ 12.2'")
    monkeypatch.setenv("CXX", "ccache g++ -m64")


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A machine without compilers, but for what a test puts into the folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH", "TORCH_CUDA_ARCH_LIST", "CXX"):
        monkeypatch.delenv(name, raising=False)
    real = shutil.which
    monkeypatch.setattr(
        toolchain.shutil, "which",
        lambda name: None if name.startswith(("/usr/local/", "/opt/")) else real(name),
    )  # fmt: skip
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def cuda(folder: Path, version: str = "13.0", lib: str = "lib64") -> Path:
    """A toolkit whose nvcc answers what setup.py asks."""
    for name in ("include/cuda_runtime.h", f"{lib}/libcudart_static.a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    script(
        folder / "bin/nvcc",
        f"""case "$1" in
        --version) echo "Cuda compilation tools, release {version}, V{version}.88";;
        --dryrun) echo '#$ TOP={folder}/bin/..' >&2;;
        --list-gpu-code) echo "{" ".join(KNOWN)}";;
        esac""",
    )
    return folder


# -------------------------------------------------------------------------------------- torch


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed("version.py's text") is the torch that is found."""

    def installed(text: str) -> Path:
        folder = tmp_path / "torch"
        (folder / "include/ATen").mkdir(parents=True)
        (folder / "include/ATen/ATen.h").touch()
        (folder / "version.py").write_text(text)
        spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec)
        return folder

    return installed


def test_torch_is_read_and_not_imported(installed):
    text = """
from typing import Optional
__version__ = '2.11.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
"""
    folder = installed(text)
    assert toolchain.find_torch() == Torch(folder, "2.11.0+cu130", {"cuda": "13.0"})


def test_a_torch_with_the_old_abi_is_refused(installed):
    installed("__version__ = '2.6.0'\ncuda = None\n")
    with pytest.raises(CannotBuild, match=r"^torch is 2\.6\.0, older than 2\.7$"):
        toolchain.find_torch()


# ------------------------------------------------------------------------------------ compilers


def test_without_any_cxx_compiler_the_first_that_was_looked_for_is_named(bare, monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_config_var", lambda name: "odd++ -pthread")
    with pytest.raises(CannotBuild, match=r"^there is no C\+\+ compiler \(odd\+\+\)$"):
        toolchain.find_cxx()


def test_where_pythons_own_compiler_is_not_here_the_usual_ones_are_taken(bare, monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_config_var", lambda name: "odd++ -pthread")
    script(bare / "bin/g++", "echo 'g++ 12.2'; echo more")
    assert toolchain.find_cxx() == Compiler(("g++",), "g++ 12.2")


def test_cxx_is_taken_at_its_word(bare, monkeypatch):
    script(bare / "bin/g++", "echo 'g++ 12.2'")
    monkeypatch.setenv("CXX", "clang++ -m64")
    with pytest.raises(CannotBuild, match=r"^there is no C\+\+ compiler \(clang\+\+\)$"):
        toolchain.find_cxx()


@pytest.mark.parametrize("how", ("CUDA_HOME", "CUDA_PATH", "PATH"))
def test_nvcc_is_found_with_its_headers_and_its_static_runtime(bare, cxx, monkeypatch, how):
    folder = cuda(bare / "cuda-13.0")
    if how == "PATH":  # as a script that calls it, which lies elsewhere
        script(bare / "bin/nvcc", f'exec {folder}/bin/nvcc "$@"')
    else:
        monkeypatch.setenv(how, str(folder))
    found = toolchain.find_nvcc(CUDA_TORCH)
    assert found.command[1:] == ("-ccbin", "g++")
    assert found.name == "nvcc 13.0"
    assert found.architectures == ("sm_80", "sm_90", "sm_100", "compute_100")
    assert (found.include, found.library) == (folder / "include", folder / "lib64")


NOT_FOUND = " was not found in the toolkit of the compiler that is used"


def refused(torch: Torch = CUDA_TORCH) -> str:
    with pytest.raises(CannotBuild) as caught:
        toolchain.find_nvcc(torch)
    return str(caught.value)


def test_without_a_cxx_compiler_there_is_no_cuda_either(bare):
    assert refused().startswith("there is no C++ compiler (")


def test_a_torch_without_cuda_says_nothing_of_nvccs_version(bare, cxx, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(cuda(bare / "cuda", "12.8")))
    cpu = Torch(Path("torch"), "2.13.0+cpu", {})
    assert toolchain.find_nvcc(cpu).name == "nvcc 12.8"


def test_why_cuda_cannot_be_built_is_told(bare, cxx, monkeypatch):
    assert refused() == "nvcc was not found (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)"
    folder = cuda(bare / "cuda", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    assert refused() == (
        "nvcc is 12.8, and torch 2.11.0+cu130 is built with 13.0: the first numbers must be equal"
    )
    cuda(folder)
    (folder / "lib64/libcudart_static.a").unlink()
    assert refused() == "libcudart_static.a" + NOT_FOUND
    (folder / "include/cuda_runtime.h").unlink()
    assert refused() == "cuda_runtime.h" + NOT_FOUND
    script(folder / "bin/nvcc", "echo no")
    assert refused() == "nvcc does not tell its version"


def test_hipcc_is_found_with_its_headers_and_its_runtime(bare, cxx, monkeypatch):
    with pytest.raises(CannotBuild, match=r"^hipcc was not found "):
        toolchain.find_hipcc(HIP_TORCH)
    script(bare / "rocm/bin/hipcc", "echo 'HIP version: 6.4.43482-0f2d60242'")
    for name in ("include/hip/hip_runtime.h", "lib/libamdhip64.so"):
        (bare / "rocm" / name).parent.mkdir(parents=True)
        (bare / "rocm" / name).touch()
    monkeypatch.setenv("ROCM_PATH", str(bare / "rocm"))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942;gfx950")
    found = toolchain.find_hipcc(HIP_TORCH)
    assert (found.name, found.architectures) == ("hipcc 6.4", ("gfx942", "gfx950"))
    assert found.include == bare / "rocm/include"
    # Debian's packages have it beside the libraries of everything else.
    library = bare / "rocm/lib/libamdhip64.so"
    elsewhere = library.parent / str(sysconfig.get_config_var("MULTIARCH"))
    elsewhere.mkdir()
    library.rename(elsewhere / library.name)
    assert toolchain.find_hipcc(HIP_TORCH).library == elsewhere


# ------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("asked", "expected"),
    (
        ("", ("sm_80", "sm_90", "sm_100", "compute_100")),
        ("9.0", ("sm_90",)),
        ("8.0 9.0a+PTX", ("sm_80", "sm_90a", "compute_90a")),
        ("8.0;8.0, 12.0;", ("sm_80", "sm_120")),
    ),
)
def test_what_nvcc_compiles_for_is_what_was_asked(asked, expected):
    assert toolchain.cuda_architectures(asked, KNOWN) == expected


def test_an_older_nvcc_compiles_for_the_architectures_that_it_has():
    found = toolchain.cuda_architectures("", ("sm_80", "sm_90"))
    assert found == ("sm_80", "sm_90", "compute_90")


@pytest.mark.parametrize(
    ("asked", "says"),
    (
        ("7.0;8.0", "nvcc has no sm_70: it compiles for sm_75 to sm_120 "),
        ("Hopper", "TORCH_CUDA_ARCH_LIST must hold numbers such as 8.0;9.0+PTX, found 'Hopper'"),
    ),
)
def test_an_architecture_that_cannot_be_had_is_told(asked, says):
    with pytest.raises(CannotBuild) as caught:
        toolchain.cuda_architectures(asked, KNOWN)
    assert str(caught.value).startswith(says)


# ----------------------------------------------------------------------------------- compiling


def test_the_first_error_of_a_compiler_is_the_reason(tmp_path, capfd):
    error = "csrc/cpu/a.cpp:1: error: no: /opt/torch/include/c10/b.h:3"
    cc = script(tmp_path / "cc", f"echo 'a.cpp: In function f'; echo '{error}'; exit 1")
    expected = r"^compiling failed: csrc/cpu/a\.cpp:1: error: no: b\.h:3$"
    with pytest.raises(CannotBuild, match=expected):
        toolchain.run([str(cc)], tmp_path)
    assert "In function f" in capfd.readouterr().err  # and the log has the rest


def test_a_compiler_that_says_nothing_is_told_by_its_code(tmp_path):
    cc = script(tmp_path / "cc", "exit 3")
    with pytest.raises(CannotBuild, match=r"^compiling failed: cc returned 3$"):
        toolchain.run([str(cc)], tmp_path)


def test_a_compiler_runs_in_the_folder_it_is_told(tmp_path):
    assert toolchain.run(["/bin/pwd"], tmp_path) == os.fspath(tmp_path)
