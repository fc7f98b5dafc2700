# SPDX-License-Identifier: Apache-2.0
"""What every result says of where it comes from, and how it reaches the disk."""

from __future__ import annotations

import json
import os
import platform
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
        return "none"


def headline(facts: dict[str, Any]) -> str:
    """One line above a table."""
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    return f"{facts['date']}, {facts['device']}, Python {facts['python']}, {versions}."


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
