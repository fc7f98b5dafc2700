# SPDX-License-Identifier: Apache-2.0
"""Compiles csrc/cuda for the CPU: as HIP, with a runtime (hip/hip_runtime.h) of fibers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["build", "compiler"]

HERE = Path(__file__).parent
CSRC = HERE.parents[4] / "csrc"
FLAGS = (
    *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"),
    # A GPU contracts nothing that the kernels do not ask for.
    *("-ffp-contract=off", "-DVLLM_FL_EMULATED", "-DVLLM_FL_TUNE", "-D__HIP_PLATFORM_AMD__=1"),
    # What no thread uses is not always set; and vectors cross no call.
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi", "-Wno-maybe-uninitialized"),
)


def compiler() -> list[str] | None:
    """The C++ compiler's command, or None."""
    command = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    return command if shutil.which(command[0]) else None


def build(folder: Path, *more: str) -> Path:
    """Compile and link the module into a folder.

    Args:
        more: flags, such as -fsanitize=address.

    Raises:
        RuntimeError: it cannot be compiled; with what the compiler said, warnings included.
    """
    command = compiler()
    assert command is not None
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include")
    python = sysconfig.get_path("include")
    includes = [f"-I{HERE}", f"-I{CSRC}", *(f"-isystem{path}" for path in (*headers, python))]

    def compiled(source: Path) -> str:
        target = folder / f"{source.name}.o"
        device = ["-D__HIPCC__", "-xc++"] if source.suffix == ".cu" else []
        flags = [*FLAGS, *more, *device, *includes]
        _run([*command, *flags, "-Werror", "-c", str(source), "-o", str(target)])
        return str(target)

    sources = sorted((*CSRC.glob("cuda/*.cu"), CSRC / "cuda/bindings.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    library = folder / "_C_cuda.so"
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
    _run([*command, *more, "-shared", *objects, *libraries, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout)
