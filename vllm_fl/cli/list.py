# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl list`: every implementation of every op, and whether it can be used here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, TextIO

from ..dispatch.errors import did_you_mean
from .child import survey
from .errors import UsageError
from .output import emit, print_table

__all__ = ["add_parser", "listing", "render"]

KEYS = ("op", "impl_id", "kind", "vendor", "priority", "available", "reason", "note", "origin")


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "list",
        help="list the implementations of each op and whether they can be used here",
        description="Lists op by op the implementations that are registered: kind, vendor, "
        "priority, whether it is available here or why not, and the package it came from.",
    )
    parser.add_argument("--op", metavar="OP", help="of this op only")
    parser.add_argument("--available", action="store_true", help="only what is available here")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    data = listing(survey("registry"), op=arguments.op, available=arguments.available)
    emit(data, render, as_json=arguments.json)
    return 1 if data["failed"] or data["config_error"] else 0


def listing(
    found: Mapping[str, Any], *, op: str | None = None, available: bool = False
) -> dict[str, Any]:
    """The list as data.

    Args:
        found: what `inventory` returns.
        op: of this op only.
        available: only implementations that can be used here.

    Returns:
        enabled, device, implementations, unimplemented (ops that nobody implements), failed
        (plugins that did not register, with their errors), config_error.

    Raises:
        UsageError: nobody knows the op.
    """
    if op is not None:
        check_op(op, found)
    rows = [
        {key: entry[key] for key in KEYS}
        for entry in found["implementations"]
        if (op is None or entry["op"] == op) and (entry["available"] or not available)
    ]
    implemented = {entry["op"] for entry in found["implementations"]}
    return {
        "enabled": found["enabled"],
        "device": found["device"]["device_class"],
        "implementations": rows,
        "unimplemented": [
            name for name in found["ops"] if name not in implemented and op in (None, name)
        ],
        "failed": [
            {"plugin": record["name"], "error": record["error"]}
            for record in found["plugins"]
            if record["error"] is not None
        ],
        "config_error": found.get("config_error"),
    }


def check_op(op: str, found: Mapping[str, Any]) -> None:
    """Refuse an op that nobody knows.

    Raises:
        UsageError: names the known ones, and what failed.
    """
    if op not in found["ops"]:
        notes = "".join(
            f" Note: {record['name']} failed ({record['error']})."
            for record in found["plugins"]
            if record["error"] is not None
        )
        raise UsageError(
            f"unknown op '{op}'; known: {', '.join(found['ops']) or 'none'}."
            f"{did_you_mean(op, found['ops'])}{notes}"
        )


def _available(row: Mapping[str, Any]) -> str:
    answer = "yes" if row["available"] else f"no: {row['reason']}"
    return f"{answer}; runs {row['note']}" if row["note"] else answer


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print the list for people."""
    print(f"Implementations on {data['device']}:", file=stream)
    print_table(
        stream,
        ("operator", "implementation", "kind", "vendor", "priority", "available", "from"),
        [
            (
                row["op"],
                row["impl_id"],
                row["kind"],
                row["vendor"],
                row["priority"],
                _available(row),
                row["origin"],
            )
            for row in data["implementations"]
        ],
    )
    if data["unimplemented"]:
        print(f"Without an implementation: {', '.join(data['unimplemented'])}", file=stream)
    for entry in data["failed"]:
        print(f"FAILED plugin {entry['plugin']}: {entry['error']}", file=stream)
    if not data["enabled"]:
        print("vllm_fl is switched off: vLLM runs as without it", file=stream)
    if data["config_error"]:
        print(f"WRONG configuration: {data['config_error']}", file=stream)
