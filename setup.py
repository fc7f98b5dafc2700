# SPDX-License-Identifier: Apache-2.0
"""Builds vllm_fl._C, the native kernels, where a compiler and torch are there; else the package
is pure Python. Everything else is in pyproject.toml.

VLLM_FL_DEVICE says what to build: auto (the default: what can be built here, without error if
that is nothing), cpu (an error if it cannot be), or none.

torch is never imported: its headers and libraries are found beside the interpreter, so that
pip's isolated builds find the torch that the kernels will run with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
RECORD = "vllm_fl/_native.json"
DEVICES = ("auto", "cpu", "none")
X86 = platform.machine() in ("x86_64", "AMD64")
OLDEST_TORCH = (2, 7)
"""Before it, PyTorch's wheels had the C++ ABI of GCC 4."""

KERNEL_FLAGS = {
    "csrc/cpu/kernels_default.cpp": [],
    **(
        {
            "csrc/cpu/kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
            "csrc/cpu/kernels_avx512.cpp": [
                *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
                "-mprefer-vector-width=512",
            ],
        }
        if X86
        else {}
    ),
}
"""One file for each instruction set; which of them runs is chosen when the process starts."""

SOURCES = ("csrc/torch_bindings.cpp", "csrc/cpu/ops.cpp", *KERNEL_FLAGS)


class CannotBuild(Exception):
    """Why there will be no native code."""


def say(text: str) -> None:
    """Into the build's log."""
    print(f"vllm_fl: {text}", file=sys.stderr, flush=True)


def find_torch() -> tuple[Path, str]:
    """The folder of the installed torch, and its version."""
    folders = [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        folders.insert(0, Path(spec.origin).parent)
    for folder in folders:
        version = folder / "version.py"
        if not version.is_file() or not (folder / "include/ATen/ATen.h").is_file():
            continue
        found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", version.read_text(encoding="utf-8"))
        if found is None:
            continue
        number = tuple(int(part) for part in re.findall(r"\d+", found[1])[:2])
        if number < OLDEST_TORCH:
            raise CannotBuild(f"torch is {found[1]}, older than 2.7")
        return folder, found[1]
    raise CannotBuild("torch, with its headers, is not installed beside this interpreter")


def compiler_name() -> str:
    """The C++ compiler, as it names itself."""
    command = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    if shutil.which(command[0]) is None:
        raise CannotBuild(f"there is no C++ compiler ({command[0]})")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotBuild("Python's headers are not installed (Python.h)")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0].strip() or Path(command[0]).name


def plan() -> dict[str, object]:
    """What to build, as the record that `vllm_fl.native` reads.

    Raises:
        SystemExit: what was asked for cannot be built.
    """
    asked = os.environ.get("VLLM_FL_DEVICE") or "auto"
    if asked not in DEVICES:
        raise SystemExit(
            f"vllm_fl: VLLM_FL_DEVICE must be one of {', '.join(DEVICES)}, found {asked!r}"
        )
    record = {"asked": asked, "built": [], "torch": None, "compiler": None, "reason": None}
    try:
        if asked == "none":
            raise CannotBuild("VLLM_FL_DEVICE=none")
        if sys.platform != "linux":
            raise CannotBuild(f"the platform is {sys.platform}, not linux")
        record["torch"] = find_torch()[1]
        record["compiler"] = compiler_name()
        record["built"] = ["cpu"]
    except CannotBuild as why:
        give_up(record, str(why))
    return record


def give_up(record: dict[str, object], reason: str) -> None:
    """Go on without native code, unless it was asked for by name."""
    record.update(built=[], reason=reason)
    if record["asked"] not in ("auto", "none"):
        raise SystemExit(f"vllm_fl: VLLM_FL_DEVICE={record['asked']} cannot be built: {reason}")
    say(f"installing as pure Python, without native kernels: {reason}")


record = plan()


def write_record(command: build_py | build_ext) -> None:
    """Beside the package that is being built, or in the tree where that is installed."""
    build = command.get_finalized_command("build_py")
    in_tree = build.editable_mode or getattr(command, "inplace", False)
    path = (ROOT if in_tree else Path(build.build_lib)) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


class BuildPython(build_py):
    """Also leaves the record."""

    def run(self) -> None:
        super().run()
        write_record(self)


class BuildKernels(build_ext):
    """Compiles each file with its own flags, and goes on where that fails."""

    def run(self) -> None:
        super().run()
        write_record(self)

    def build_extension(self, ext: Extension) -> None:
        folder, version = find_torch()
        try:
            self._build(ext, folder)
            say(f"built native kernels for cpu with {record['compiler']} and torch {version}")
        except Exception as error:  # whatever a compiler can do
            for rest in (self.get_ext_fullpath(ext.name), self._in_tree(ext)):
                Path(rest).unlink(missing_ok=True)  # of an earlier build: not this source
            give_up(record, f"compiling failed: {error}")

    def copy_extensions_to_source(self) -> None:
        if record["built"]:
            super().copy_extensions_to_source()

    def _in_tree(self, ext: Extension) -> str:
        return str(ROOT / self.get_ext_filename(ext.name))

    def _build(self, ext: Extension, torch: Path) -> None:
        # No path of this machine stays in the binary, where torch's and Python's headers would
        # leave theirs in the texts of errors.
        hidden = {ROOT: ".", torch: "torch", Path(sysconfig.get_path("include")): "python"}
        flags = [
            *("-std=c++20" if self._takes("-std=c++20") else "-std=c++17", "-O3", "-g0", "-fPIC"),
            *("-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"),
            *(f"-ffile-prefix-map={path}={name}" for path, name in hidden.items()),
            *(["-DVLLM_FL_X86"] if X86 else []),
            "-DNDEBUG",
        ]
        includes = [f"-I{ROOT / 'csrc'}", f"-isystem{torch / 'include'}"]
        includes += [f"-isystem{torch / 'include/torch/csrc/api/include'}"]
        includes += [f"-isystem{sysconfig.get_path('include')}"]
        # torch's threads come from whichever OpenMP library it brought along. Only compiled for
        # it and not linked, ours are the same: its functions are found through libtorch_cpu.
        threads = ["-fopenmp"] if self._takes("-fopenmp", "#include <omp.h>\n") else []
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = str(work / (Path(source).stem + ".o"))
            own = KERNEL_FLAGS.get(source)
            if own is None:
                more = [*threads, *includes, "-O2"]
            else:
                # No vector crosses a call; and GCC 12 warns of its own AVX-512 header.
                more = [*own, "-Wno-psabi", "-Wno-maybe-uninitialized"]
            _run([*self._cxx(), *flags, *more, "-c", str(ROOT / source), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        _run([*self._cxx(), "-shared", "-s", *objects, *libraries, "-o", str(out)])

    def _cxx(self) -> list[str]:
        return (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()

    def _takes(self, flag: str, text: str = "") -> bool:
        """Whether the compiler takes a flag."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "flag.cpp")
            source.write_text(f"{text}int main() {{}}\n", encoding="utf-8")
            command = [*self._cxx(), flag, "-c", str(source), "-o", str(source.with_suffix(".o"))]
            return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        say(done.stdout.strip())
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line]
        why = errors[0] if errors else f"{command[0]} returned {done.returncode}"
        raise RuntimeError(why.replace(f"{ROOT}{os.sep}", ""))


extensions = [Extension("vllm_fl._C", list(SOURCES))] if record["built"] else []
setup(ext_modules=extensions, cmdclass={"build_py": BuildPython, "build_ext": BuildKernels})
