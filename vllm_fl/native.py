# SPDX-License-Identifier: Apache-2.0
"""What the installation knows of its native code, without loading any of it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = [
    "MODULES",
    "DeviceBuild",
    "NativeBuild",
    "how_to_build",
    "native_build",
    "native_refusal",
]

MODULES = {"cpu": "vllm_fl._C", "cuda": "vllm_fl._C_cuda", "hip": "vllm_fl._C_cuda"}
"""Device to the module that has its kernels."""

_NAMES = {"cpu": "CPU", "cuda": "CUDA", "hip": "HIP"}
_NEEDS = {
    "cpu": "a C++ compiler and torch",
    "cuda": "nvcc and a C++ compiler beside a torch that is built with CUDA",
    "hip": "hipcc and a C++ compiler beside a torch that is built with ROCm",
}
_RECORD = Path(__file__).with_name("_native.json")


@dataclass(frozen=True, slots=True)
class DeviceBuild:
    """What setup.py made for one device.

    Attributes:
        compiler: as it names itself, or None where nothing was made.
        architectures: of a CPU its instruction sets, e.g. ("DEFAULT", "AVX2", "AVX512"); of a GPU
            what its compiler was told, e.g. ("sm_80", "sm_90", "compute_90"), the last being PTX.
        reason: why nothing was made, or None.
    """

    compiler: str | None = None
    architectures: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """What setup.py wrote down when this installation was built.

    Attributes:
        asked: VLLM_FL_DEVICE then, "auto" by default; empty where nothing was written.
        torch: the version of torch that the kernels were compiled for, or None.
        devices: "cpu", "cuda" and "hip" to what was made; empty where nothing was written.
        problem: why nothing is known, or None.
    """

    asked: str = ""
    torch: str | None = None
    devices: Mapping[str, DeviceBuild] = field(default_factory=lambda: MappingProxyType({}))
    problem: str | None = None

    @property
    def built(self) -> tuple[str, ...]:
        """The devices that have kernels."""
        return tuple(name for name, made in self.devices.items() if made.reason is None)


def native_build(record: Path = _RECORD) -> NativeBuild:
    """What was built, and why not more.

    Args:
        record: the file that setup.py wrote.
    """
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        devices = {
            name: DeviceBuild(made["compiler"], tuple(made["architectures"]), made["reason"])
            for name, made in found["devices"].items()
        }
        return NativeBuild(found["asked"], found["torch"], MappingProxyType(devices))
    except FileNotFoundError:
        return NativeBuild(problem="it was not built by setup.py")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        return NativeBuild(problem=f"{record.name} cannot be read ({what})")


def how_to_build(device: str) -> str:
    """What to do where the kernels for a device are missing."""
    # By name: what is missing is then an error, and not a line of a log that pip does not show.
    return (
        f"install {_NEEDS[device]}, then VLLM_FL_DEVICE={device} pip install --no-build-isolation "
        "--no-deps --force-reinstall vllm_fl from its source (docs/native-kernels.md)"
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the kernels for a device cannot be used.

    Attributes:
        code: "missing", or "unfit" for another torch or another GPU.
        why: a sentence.
        advice: what to do.
    """

    code: str
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}; {self.advice}"


def native_refusal(device: str) -> str | None:
    """The text of `find_refusal`."""
    refusal = find_refusal(device)
    return None if refusal is None else str(refusal)


def find_refusal(device: str) -> Refusal | None:
    """Why the native kernels for a device cannot be used here, or None.

    Nothing is loaded and no device is touched: that the file is there, and is for the installed
    torch, is all that is asked; and where this process has initialised CUDA already, that there is
    code for its GPU.

    Args:
        device: "cpu", "cuda" or "hip".
    """
    build = native_build()
    made = build.devices.get(device)
    reason = build.problem if made is None else made.reason
    absent = importlib.util.find_spec(MODULES[device]) is None
    if made is None and not absent:
        return None  # built by other means than setup.py; loading it will tell
    if absent or reason is not None:
        why = reason or f"{MODULES[device]} is gone"
        text = f"vllm_fl was built without {_NAMES[device]} kernels: {why}"
        return Refusal("missing", text, how_to_build(device))
    return _torch_refusal(device, build) or _gpu_refusal(device, build)


def _torch_refusal(device: str, build: NativeBuild) -> Refusal | None:
    """Kernels that were built for another torch than the installed one."""
    if build.torch is None:
        return None
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    # The build's name after the + is another matter: 2.13.0+cpu runs what 2.13.0 compiled.
    if installed.partition("+")[0] == build.torch.partition("+")[0]:
        return None
    text = (
        f"vllm_fl's {_NAMES[device]} kernels were built for torch {build.torch}, and this is "
        f"{installed}"
    )
    return Refusal("unfit", text, how_to_build(device))


def _gpu_refusal(device: str, build: NativeBuild) -> Refusal | None:
    """Kernels that have no code for the GPU that this process has initialised."""
    architectures = build.devices[device].architectures
    gpu = None if device == "cpu" else initialised_gpu()
    if gpu is None or any(_runs(architecture, gpu) for architecture in architectures):
        return None
    setting = f"PYTORCH_ROCM_ARCH={gpu}"
    if gpu.startswith("sm_"):
        setting = f"TORCH_CUDA_ARCH_LIST={gpu[3:-1]}.{gpu[-1]}"
    text = (
        f"vllm_fl's {_NAMES[device]} kernels are for {', '.join(architectures)}, and this GPU is "
        f"{gpu}"
    )
    return Refusal("unfit", text, f"set {setting}, and {how_to_build(device)}")


def initialised_gpu() -> str | None:
    """The architecture of the current GPU, e.g. "sm_90" or "gfx942"; None where CUDA is not
    initialised: asking would do so, after which no process could be forked from this one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    if torch.version.hip:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return str(properties.gcnArchName).partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _runs(architecture: str, gpu: str) -> bool:
    """Whether a GPU runs code for an architecture: the same, or a later one of its generation; of
    PTX, whatever is not older. Code for sm_90a and the like is for that one alone."""
    code = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", architecture)
    if code is None or not gpu.startswith("sm_"):
        return architecture.partition(":")[0] == gpu
    ours, theirs = int(code[2]), int(gpu[3:])
    if code[3] == "a":
        return ours == theirs
    same_generation = ours // 10 == theirs // 10
    return ours <= theirs and (same_generation or (code[1] == "compute" and not code[3]))
