# SPDX-License-Identifier: Apache-2.0
"""Builds the native kernels, vllm_fl._C and vllm_fl._C_cuda, where torch and the compilers are
there; else the package is pure Python. Everything else is in pyproject.toml.

VLLM_FL_DEVICE says what to build: auto (the default: what can be built here, without error if
that is nothing), cpu, cuda or hip (each of the two with cpu; an error if it cannot be built), or
none. VLLM_FL_TUNE=1 also compiles what benchmarks choose the constants of the CUDA kernels with.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc"))

from toolchain import (  # noqa: E402
    CannotBuild,
    Compiler,
    Torch,
    find_cxx,
    find_hipcc,
    find_nvcc,
    find_torch,
    run,
)

RECORD = "vllm_fl/_native.json"
X86 = platform.machine() in ("x86_64", "AMD64")

EXTENSIONS = {"cpu": "vllm_fl._C", "cuda": "vllm_fl._C_cuda", "hip": "vllm_fl._C_cuda"}
"""PyTorch calls the chips of both makers cuda, and so do we."""

BY_NAME = {"cpu": ("cpu",), "cuda": ("cpu", "cuda"), "hip": ("cpu", "hip"), "none": ()}
"""VLLM_FL_DEVICE to the devices that must be built then."""

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


def sources(device: str) -> list[str]:
    """What an extension is made of, as paths in the tree."""
    if device == "cpu":
        return ["csrc/torch_bindings.cpp", "csrc/cpu/ops.cpp", "csrc/cpu/bound.cpp", *KERNEL_FLAGS]
    # torch's headers take longest, so what includes them begins first.
    found = (*sorted(ROOT.glob("csrc/cuda/*.cpp")), *sorted(ROOT.glob("csrc/cuda/*.cu")))
    return [path.relative_to(ROOT).as_posix() for path in found]


def say(text: str) -> None:
    """Into the build's log."""
    print(f"vllm_fl: {text}", file=sys.stderr, flush=True)


class Plan:
    """What to build, with what, and why not more; `record` is what `vllm_fl.native` reads.

    Raises:
        SystemExit: what was asked for by name cannot be built.
    """

    def __init__(self) -> None:
        self.asked = os.environ.get("VLLM_FL_DEVICE") or "auto"
        if self.asked not in ("auto", *BY_NAME):
            names = ", ".join(("auto", *BY_NAME))
            raise SystemExit(
                f"vllm_fl: VLLM_FL_DEVICE must be one of {names}, found {self.asked!r}"
            )
        self.torch: Torch | None = None
        self.compilers: dict[str, Compiler] = {}
        self.reasons: dict[str, str] = {}
        for device in ("cpu", "cuda", "hip"):
            try:
                self.compilers[device] = self._compiler(device)
            except CannotBuild as why:
                self.give_up(device, str(why))

    def _compiler(self, device: str) -> Compiler:
        if device not in BY_NAME.get(self.asked, (device,)):
            raise CannotBuild(f"VLLM_FL_DEVICE={self.asked}")
        if sys.platform != "linux":
            raise CannotBuild(f"the platform is {sys.platform}, not linux")
        self.torch = find_torch()
        if self.asked == "auto" and device not in ("cpu", *self.torch.toolkits):
            raise CannotBuild(f"torch {self.torch.version} is built without {device.upper()}")
        if device == "cpu":
            names = [Path(file).stem.removeprefix("kernels_").upper() for file in KERNEL_FLAGS]
            return replace(find_cxx(), architectures=tuple(names))
        return find_nvcc(self.torch) if device == "cuda" else find_hipcc(self.torch)

    def give_up(self, device: str, reason: str) -> None:
        """Go on without the kernels for a device, unless it was asked for by name."""
        self.compilers.pop(device, None)
        self.reasons[device] = reason
        if device in BY_NAME.get(self.asked, ()):
            raise SystemExit(f"vllm_fl: VLLM_FL_DEVICE={self.asked} cannot be built: {reason}")
        if device == "cpu":
            say(f"installing as pure Python, without native kernels: {reason}")
        elif self.torch is not None and device in self.torch.toolkits:
            say(f"installing without kernels for {device}: {reason}")

    @property
    def record(self) -> dict[str, object]:
        devices = {}
        for device in EXTENSIONS:
            built = self.compilers.get(device)
            devices[device] = {
                "compiler": built and built.name,
                "architectures": list(built.architectures) if built else [],
                "reason": self.reasons.get(device),
            }
        torch = self.torch.version if self.torch and self.compilers else None
        return {"asked": self.asked, "torch": torch, "devices": devices}


plan = Plan()


def write_record(command: build_py | build_ext) -> None:
    """Beside the package that is being built, or in the tree where that is installed. What an
    earlier build left there, and this one does not make, is removed: it is not this source."""
    build = command.get_finalized_command("build_py")
    in_tree = build.editable_mode or getattr(command, "inplace", False)
    base = ROOT if in_tree else Path(build.build_lib)
    path = base / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan.record, indent=2) + "\n", encoding="utf-8")
    built = {EXTENSIONS[device] for device in plan.compilers}
    for name in {*EXTENSIONS.values()} - built:
        file = name.replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX")
        (base / file).unlink(missing_ok=True)


class BuildPython(build_py):
    """Also leaves the record."""

    def run(self) -> None:
        super().run()
        write_record(self)


class BuildKernels(build_ext):
    """Compiles each file with its own flags, as many at once as there are cores, and goes on where
    that fails."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = len(EXTENSIONS)

    def run(self) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as self.pool:
            super().run()
        write_record(self)

    def build_extension(self, ext: Extension) -> None:
        device = next(d for d in plan.compilers if EXTENSIONS[d] == ext.name)
        compiler = plan.compilers[device]
        try:
            self._build(device, ext)
        except Exception as error:  # whatever a compiler can do
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = [other for other in self.extensions if other is not ext]
            plan.give_up(device, str(error) or type(error).__name__)
        else:
            text = ", ".join((compiler.name, *compiler.architectures))
            say(f"built native kernels for {device} with {text} and torch {plan.torch.version}")

    def _build(self, device: str, ext: Extension) -> None:
        work = Path(self.build_temp).resolve() / device
        work.mkdir(parents=True, exist_ok=True)
        commands = _Commands(device)

        def compile_one(source: str) -> str:
            target = str(work / f"{source.replace('/', '.')}.o")
            start = time.monotonic()
            said = run([*commands.compile(source), source, "-o", target], ROOT)
            say(f"compiled {source} in {time.monotonic() - start:.0f} s{said and ':'}")
            if said:
                say(said)
            return target

        objects = list(self.pool.map(compile_one, ext.sources))
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        run([*commands.link(), *objects, *commands.libraries(), "-o", str(out)], ROOT)


class _Commands:
    """The command lines for one device. They run in the tree and name sources by their paths in
    it; with the maps, no path of this machine stays in a binary, where headers would leave theirs
    in the texts of errors."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.torch = plan.torch.folder
        self.compiler = plan.compilers[device]
        self.cxx = plan.compilers["cpu"] if "cpu" in plan.compilers else find_cxx()
        python = Path(sysconfig.get_path("include"))
        hidden = {self.torch: "torch", python: "python"}
        includes = [self.torch / "include", self.torch / "include/torch/csrc/api/include", python]
        self.defines = ["-DNDEBUG"]
        if device == "cpu":
            self.defines += ["-DVLLM_FL_X86"] if X86 else []
        else:
            hidden[self.compiler.include.parent] = device
            if self.compiler.include != Path("/usr/include"):  # else it hides the compiler's own
                includes.append(self.compiler.include)
            if os.environ.get("VLLM_FL_TUNE") == "1":
                self.defines.append("-DVLLM_FL_TUNE")
            if device == "hip":
                self.defines += ["-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1"]
        self.includes = [f"-isystem{path}" for path in includes]
        # GCC names a system header by its real path where that is shorter.
        real = {path.resolve() for path in includes}
        hidden |= {path: "include" for path in real if not any(map(path.is_relative_to, hidden))}
        self.maps = [f"-ffile-prefix-map={path}={name}" for path, name in hidden.items()]
        newest = "-std=c++20" if self.cxx.takes("-std=c++20") else "-std=c++17"
        self.flags = [newest, "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
        # torch's threads come from whichever OpenMP library it brought along. Only compiled for
        # it and not linked, ours are the same: its functions are found through libtorch_cpu.
        threads = self.cxx.takes("-fopenmp", "#include <omp.h>\n")
        self.threads = ["-fopenmp"] if threads else []

    def compile(self, source: str) -> list[str]:
        """All but the source and the object."""
        if source.endswith(".cu"):
            return self._nvcc() if self.device == "cuda" else self._hipcc()
        command = [*self.cxx.command, *self.flags, *self.maps, *self.defines, "-Icsrc"]
        command += ["-fno-math-errno", "-fno-trapping-math"]
        own = KERNEL_FLAGS.get(source)
        if own is None:
            return [*command, *self.threads, *self.includes, "-O2", "-c"]
        # No vector crosses a call; and GCC 12 warns of its own AVX-512 header.
        return [*command, *own, "-O3", "-Wno-psabi", "-Wno-maybe-uninitialized", "-c"]

    def _nvcc(self) -> list[str]:
        host = ("-fPIC", "-fvisibility=hidden", *self.maps)
        command = [*self.compiler.command, "-std=c++17", "-O3", "-Icsrc", *self.defines]
        command += [f"-Xcompiler={flag}" for flag in host]
        for name in self.compiler.architectures:
            virtual = name.replace("sm_", "compute_")
            command.append(f"-gencode=arch={virtual},code={name}")
        threads = -(-(os.cpu_count() or 1) // len(sources("cuda")))  # of architectures
        return [*command, f"--threads={threads}", "-c"]

    def _hipcc(self) -> list[str]:
        command = [*self.compiler.command, "-std=c++17", "-O3", "-Icsrc", *self.defines]
        command += [f"--offload-arch={name}" for name in self.compiler.architectures]
        return [*command, "-fPIC", "-fvisibility=hidden", *self.maps, "-x", "hip", "-c"]

    def link(self) -> list[str]:
        """All but the objects and the libraries. What a static library exports stays inside."""
        return [*self.cxx.command, "-shared", "-s", "-Wl,--exclude-libs,ALL"]

    def libraries(self) -> list[str]:
        """torch's for any device, and the toolkit's runtime, which is static where there is a
        static one: torch may bring another release of it."""
        torch = [f"-L{self.torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        return [*torch, *self._runtime()]

    def _runtime(self) -> list[str]:
        if self.device == "cpu":
            return []
        folder = f"-L{self.compiler.library}"
        if self.device == "hip":
            return [folder, "-lamdhip64"]
        return [folder, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


setup(
    ext_modules=[Extension(EXTENSIONS[device], sources(device)) for device in plan.compilers],
    cmdclass={"build_py": BuildPython, "build_ext": BuildKernels},
)
