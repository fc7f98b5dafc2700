# SPDX-License-Identifier: Apache-2.0
"""What every result says of where it comes from, and how it reaches the disk."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["about", "headline", "table", "write_json"]

PACKAGES = ("torch", "triton", "vllm", "vllm-fl", "flag-gems")


def about(device: str) -> dict[str, Any]:
    """Date, versions, the command. Initialises the device."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {
        "device": name,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "driver": driver() if device == "cuda" else None,
        "versions": {package: installed(package) for package in PACKAGES},
        "command": " ".join(
            ["python", *(Path(a).name if a == sys.argv[0] else a for a in sys.argv)]
        ),
    }


def installed(package: str) -> str:
    """Its version, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    # Unpacked, and not installed, a package knows its version only in its own files.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "_version.py").read_text()
            if found := re.search(r"version\s*=\s*['\"]([^'\"]+)", text):
                return found[1]
    return "none" if spec is None else "of unknown version"


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def headline(facts: dict[str, Any]) -> str:
    """One line above a table."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    device = facts["device"] + (f" (driver {facts['driver']})" if facts.get("driver") else "")
    return f"{facts['date']}, {device}, Python {facts['python']}, {versions}."


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all: a command that is ended leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(data, indent=1, default=str) + "\n")
    beside.replace(path)
