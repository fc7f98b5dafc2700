# SPDX-License-Identifier: Apache-2.0
"""What the installation knows of its native code, without loading any of it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["HOW_TO_BUILD", "NativeBuild", "native_build", "native_refusal"]

HOW_TO_BUILD = (
    "install a C++ compiler and torch, then `pip install --no-build-isolation --no-deps "
    "--force-reinstall` vllm_fl from its source (docs/native-kernels.md)"
)

_RECORD = Path(__file__).with_name("_native.json")


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """What setup.py wrote down when this installation was built.

    Attributes:
        asked: VLLM_FL_DEVICE then: "auto", "cpu" or "none"; empty where nothing was written.
        built: the devices that have kernels, e.g. ("cpu",).
        torch: the version of torch that they were compiled for, or None.
        compiler: as it names itself, or None.
        reason: why nothing was built, or None.
    """

    asked: str
    built: tuple[str, ...]
    torch: str | None
    compiler: str | None
    reason: str | None


def native_build(record: Path = _RECORD) -> NativeBuild:
    """What was built, and why not more.

    Args:
        record: the file that setup.py wrote.
    """
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return NativeBuild(
            asked=found["asked"],
            built=tuple(found["built"]),
            torch=found["torch"],
            compiler=found["compiler"],
            reason=found["reason"],
        )
    except FileNotFoundError:
        reason = "it was not built by setup.py"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{record.name} cannot be read ({type(error).__name__}: {error})"
    return NativeBuild("", (), None, None, reason)


def native_refusal(device: str) -> str | None:
    """Why the native kernels for a device cannot be used here, or None.

    Nothing is loaded: that the file is there, and is for the installed torch, is all that is
    asked.
    """
    build = native_build()
    if importlib.util.find_spec("vllm_fl._C") is None:
        why = f" ({build.reason})" if build.reason else ""
        return f"vllm_fl was installed without native code{why}: {HOW_TO_BUILD}"
    if build.torch is None:
        return None  # built by other means than setup.py; loading it will tell
    if device not in build.built:
        return f"vllm_fl's native code is for {', '.join(build.built)}, not {device}"
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    if _release(installed) != _release(build.torch):
        return (
            f"vllm_fl's native code was built for torch {build.torch}, and this is {installed}: "
            f"{HOW_TO_BUILD}"
        )
    return None


def _release(version: str) -> str:
    """The version without the build's name: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]
