# SPDX-License-Identifier: Apache-2.0
"""What setup.py compiles with: torch, and the compilers of C++, CUDA and HIP.

torch is never imported: its headers and libraries are found beside the interpreter, so that
pip's isolated builds find the torch that the kernels will run with.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 7)
"""Before it, PyTorch's wheels had the C++ ABI of GCC 4."""

CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"
"""Where TORCH_CUDA_ARCH_LIST says nothing. Each chip since Ampere runs one of them: 8.6 and 8.9 the
first, 10.3 the last, and those of other generations what their driver makes of its PTX."""
HIP_ARCHITECTURES = "gfx90a;gfx942"
"""Where PYTORCH_ROCM_ARCH says nothing: MI200 and MI300."""


class CannotBuild(Exception):
    """Why there will be no kernels for a device. It goes into the package: without a path of this
    machine."""


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch.

    Attributes:
        folder: the package's.
        version: e.g. "2.11.0+cu130".
        toolkits: "cuda" or "hip" to the version of the toolkit that it was built with.
    """

    folder: Path
    version: str
    toolkits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler, and of a toolkit also where its headers and libraries are.

    Attributes:
        command: runs it.
        name: as it names itself.
        architectures: those it compiles for, e.g. "sm_90", "compute_90" (PTX) or "gfx942".
        include: the folder of the toolkit's headers.
        library: the folder of its runtime's library.
    """

    command: tuple[str, ...]
    name: str
    architectures: tuple[str, ...] = ()
    include: Path | None = None
    library: Path | None = None

    def takes(self, flag: str, text: str = "") -> bool:
        """Whether it compiles C++ with a flag.

        Args:
            text: what the program begins with.
        """
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "flag.cpp")
            source.write_text(f"{text}int main() {{}}\n", encoding="utf-8")
            command = [*self.command, flag, "-c", str(source), "-o", str(source.with_suffix(".o"))]
            return subprocess.run(command, capture_output=True).returncode == 0


def find_torch() -> Torch:
    """The torch beside this interpreter.

    Raises:
        CannotBuild: there is none, it lacks its headers, or it is too old.
    """
    folders = [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        folders.insert(0, Path(spec.origin).parent)
    for folder in folders:
        version = folder / "version.py"
        if not version.is_file() or not (folder / "include/ATen/ATen.h").is_file():
            continue
        values = _strings(version.read_text(encoding="utf-8"))
        number = values.get("__version__")
        if number is None:
            continue
        if tuple(int(part) for part in re.findall(r"\d+", number)[:2]) < OLDEST_TORCH:
            raise CannotBuild(f"torch is {number}, older than 2.7")
        return Torch(folder, number, {k: values[k] for k in ("cuda", "hip") if values.get(k)})
    raise CannotBuild("torch, with its headers, is not installed beside this interpreter")


def _strings(text: str) -> dict[str, str]:
    """The names to which a module assigns a string."""
    found = {}
    for name, value in re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*(['\"].*)$", text, re.MULTILINE):
        try:
            found[name] = str(ast.literal_eval(value.strip()))
        except (ValueError, SyntaxError):
            continue  # it is computed
    return found


def find_cxx() -> Compiler:
    """The C++ compiler: CXX, or the first that is there of Python's own and the usual ones.

    Raises:
        CannotBuild: there is none, or Python's headers are not there.
    """
    asked = os.environ.get("CXX")
    usual = (sysconfig.get_config_var("CXX") or "c++", "c++", "g++", "clang++")
    commands = [tuple(text.split()) for text in ([asked] if asked else usual)]
    command = next((c for c in commands if shutil.which(c[0])), None)
    if command is None:
        raise CannotBuild(f"there is no C++ compiler ({Path(commands[0][0]).name})")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotBuild("Python's headers are not installed (Python.h)")
    return Compiler(command, _output(*command, "--version").partition("\n")[0].strip())


def find_nvcc(torch: Torch) -> Compiler:
    """CUDA's compiler, of the same major version as torch's CUDA, if torch has one.

    Raises:
        CannotBuild: the toolkit is missing or does not fit, or there is no C++ compiler.
    """
    cxx = find_cxx()
    nvcc = _tool("nvcc", ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda")
    version = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    if version is None:
        raise CannotBuild("nvcc does not tell its version")
    _same_major(torch, "cuda", f"nvcc is {version[1]}", version[1])
    # The nvcc that was found may be a script or a link, so nvcc itself is asked where it is.
    top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.M)
    root = Path(top[1]) if top is not None else Path(nvcc).parents[1]
    inside = ("", f"targets/{os.uname().machine}-linux/")
    include = _first(root, (f"{d}include" for d in inside), "cuda_runtime.h")
    places = (f"{d}{name}" for d in inside for name in ("lib64", "lib"))
    library = _first(root, places, "libcudart_static.a")
    known = set(_output(nvcc, "--list-gpu-code").split())
    # nvcc looks for a host compiler of its own; a launcher such as ccache is none.
    host = next(w for w in cxx.command if Path(w).name not in ("ccache", "sccache", "distcc"))
    return Compiler(
        command=(nvcc, "-ccbin", host),
        name=f"nvcc {version[1]}",
        architectures=cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), known),
        include=include,
        library=library,
    )


def cuda_architectures(asked: str, known: Iterable[str]) -> tuple[str, ...]:
    """What nvcc compiles for: sm_90 for 9.0, and compute_90, which is PTX, for 9.0+PTX as well.

    Args:
        asked: numbers as in TORCH_CUDA_ARCH_LIST, or nothing.
        known: what nvcc has: sm_90 and so on.

    Raises:
        CannotBuild: something was asked for that is no number or that this nvcc does not have.
    """
    known = set(known)
    if not asked.strip():
        asked = CUDA_ARCHITECTURES if "sm_100" in known else "8.0;9.0+PTX"
    found: dict[str, None] = {}
    for text in re.split(r"[;,\s]+", asked.strip(";, \t")):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", text)
        if match is None:
            raise CannotBuild(
                f"TORCH_CUDA_ARCH_LIST must hold numbers such as 8.0;9.0+PTX, found {text!r}"
            )
        number = match[1] + match[2]
        if known and f"sm_{number}" not in known:
            numbers = sorted(int(re.sub(r"\D", "", name)) for name in known)
            raise CannotBuild(
                f"nvcc has no sm_{number}: it compiles for sm_{numbers[0]} to sm_{numbers[-1]} "
                f"(TORCH_CUDA_ARCH_LIST: {asked})"
            )
        found[f"sm_{number}{match[3]}"] = None
        if match[4]:
            found[f"compute_{number}{match[3]}"] = None
    return tuple(found)


def find_hipcc(torch: Torch) -> Compiler:
    """HIP's compiler, of the same major version as torch's HIP, if torch has one.

    Raises:
        CannotBuild: as `find_nvcc`.
    """
    find_cxx()  # compiles the bindings
    hipcc = _tool("hipcc", ("ROCM_HOME", "ROCM_PATH"), "/opt/rocm")
    version = re.search(r"HIP version: (\d+\.\d+)", _output(hipcc, "--version"))
    if version is None:
        raise CannotBuild("hipcc does not tell its version")
    _same_major(torch, "hip", f"hipcc is {version[1]}", version[1])
    root = Path(hipcc).resolve().parents[1]
    multiarch = sysconfig.get_config_var("MULTIARCH")  # where Debian's packages keep libraries
    asked = os.environ.get("PYTORCH_ROCM_ARCH", "").strip() or HIP_ARCHITECTURES
    return Compiler(
        command=(hipcc,),
        name=f"hipcc {version[1]}",
        architectures=tuple(re.split(r"[;,\s]+", asked)),
        include=_first(root, ("include",), "hip/hip_runtime.h"),
        library=_first(root, ("lib", "lib64", f"lib/{multiarch}"), "libamdhip64.so"),
    )


def _same_major(torch: Torch, toolkit: str, found: str, version: str) -> None:
    wanted = torch.toolkits.get(toolkit, version)
    if version.partition(".")[0] != wanted.partition(".")[0]:
        raise CannotBuild(
            f"{found}, and torch {torch.version} is built with {wanted}: the first numbers must "
            "be equal"
        )


def _tool(name: str, variables: tuple[str, ...], usual: str) -> str:
    """A toolkit's compiler: where a variable says, then on PATH, then in the usual place."""
    said = [folder for variable in variables if (folder := os.environ.get(variable))]
    candidates = [f"{folder}/bin/{name}" for folder in said]
    for candidate in (*candidates, name, f"{usual}/bin/{name}"):
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise CannotBuild(f"{name} was not found ({', '.join(variables)}, PATH, {usual})")


def _first(root: Path, places: Iterable[str], name: str) -> Path:
    """The first of some folders of a toolkit that has a file."""
    for place in places:
        if (root / place / name).exists():
            return (root / place).resolve()
    raise CannotBuild(f"{name} was not found in the toolkit of the compiler that is used")


def _output(*command: str) -> str:
    """What a tool says, on whichever stream."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CannotBuild(f"{Path(command[0]).name} cannot be run: {error.strerror}") from error
    return done.stdout + done.stderr


def run(command: list[str], folder: Path) -> str:
    """Run a compiler in a folder, and return what it said.

    Raises:
        CannotBuild: it failed, with its first error.
    """
    # In English, so that the first error can be found; and nvcc writes files of its own to TMPDIR.
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, file=sys.stderr, flush=True)
        errors = [line for line in done.stdout.splitlines() if "error" in line.lower()]
        why = errors[0] if errors else f"{Path(command[0]).name} returned {done.returncode}"
        # Of what lies elsewhere than in the tree, the name alone.
        raise CannotBuild("compiling failed: " + re.sub(r"(?<![\w.])/\S*/", "", why))
    return done.stdout.strip()
