# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl config`: the effective configuration, each value with its source."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from .child import survey
from .errors import CommandError
from .output import emit, print_table

__all__ = ["add_parser", "effective", "render"]


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "config",
        help="show the effective configuration and where each value comes from",
        description="Shows each setting's value and its source: the environment variable, the "
        "file and line, the shipped policy, or the default. What vLLM is given with "
        "--additional-config is not seen here.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the configuration."""
    emit(effective(survey("registry")), render, as_json=arguments.json)
    return 0


def effective(found: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as data: setting to value and source.

    Args:
        found: what `inventory` returns.

    Raises:
        CommandError: the configuration is wrong; vLLM would not start with it.
    """
    if found.get("config_error"):
        raise CommandError(found["config_error"])
    settings: dict[str, Any] = found["config"]
    return settings


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print the configuration for people."""
    print_table(stream, ("setting", "value", "source"), list(_rows(data)))


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, entry in data.items():
        value, source = entry["value"], entry["source"]
        if isinstance(value, Mapping) and value:
            for op, tokens in value.items():
                yield f"{name}.{op}", ", ".join(tokens), source[op]
        else:
            yield name, _text(value), source


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, list):
        return ", ".join(value) or "nobody"
    return str(value).lower() if isinstance(value, bool) else str(value)
