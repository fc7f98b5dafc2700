# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl snapshot`: everything a bug report needs, as JSON."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from .child import survey
from .output import emit, print_table
from .versions import installed_versions

__all__ = ["FORMAT", "add_parser", "render", "snapshot"]

FORMAT = 1
"""Grows when a key changes its meaning or goes."""


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "snapshot",
        help="print versions, configuration and registry for a bug report",
        description="Prints what is installed, configured, registered and chosen, for a bug "
        "report. It holds no data of yours but the paths in the configuration and in tracebacks.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON, as it is without an option, too")
    form.add_argument("--text", action="store_true", help="an outline with tables instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the snapshot; exit code 1 where a plugin failed or the configuration is wrong."""
    data = snapshot(installed_versions(), survey("registry", quiet=True))
    emit(data, render, as_json=not arguments.text)
    failed = any(record["error"] is not None for record in data["plugins"])
    return 1 if failed or data["config_error"] else 0


def snapshot(
    versions: Sequence[Mapping[str, Any]],
    found: Mapping[str, Any],
    machine: str | None = None,
) -> dict[str, Any]:
    """The snapshot as data.

    Args:
        versions: what `installed_versions` returns.
        found: what `inventory` returns.
        machine: operating system and processor; None asks this machine's.
    """
    return {
        "format": FORMAT,
        "machine": platform.platform() if machine is None else machine,
        "versions": {entry["package"]: entry["version"] for entry in versions},
        **found,
    }


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print the snapshot's outline for people; the JSON has all of it."""
    device = data["device"]
    product = f" ({device['name']})" if device["name"] else ""
    failed = [record for record in data["plugins"] if record["error"] is not None]
    print(f"machine:      {data['machine']}", file=stream)
    print(f"device:       {device['device_class']}{product}", file=stream)
    print(f"switched on:  {'yes' if data['enabled'] else 'no'}", file=stream)
    print(f"fingerprint:  {data['fingerprint']}", file=stream)
    print(f"plugins:      {len(data['plugins'])}, {len(failed)} failed", file=stream)
    for record in failed:
        print(f"  {record['name']}: {record['error']}", file=stream)
    if data["config_error"]:
        print(f"wrong configuration: {data['config_error']}", file=stream)
    for name, entry in data["policy"].items():
        print(f"policy:       {name} = {entry['value']} (from {entry['source']})", file=stream)
    print_table(
        stream,
        ("package", "version"),
        [(name, version or "not installed") for name, version in data["versions"].items()],
    )
    print_table(
        stream,
        ("operator", "chosen", "implementations"),
        [
            (
                name,
                op["winner"] or "nothing",
                ", ".join(i["impl_id"] for i in data["implementations"] if i["op"] == name),
            )
            for name, op in data["ops"].items()
        ],
    )
