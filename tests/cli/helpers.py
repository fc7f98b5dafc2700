# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as a user does, and compares a text with the data behind it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import output

ROOT = Path(__file__).resolve().parents[2]


def run(
    *arguments: str, path: Collection[Path] = (), env: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """`vllm-fl <arguments>` in a process of its own.

    Args:
        path: folders that come before everything else on the path, in child processes too.
        env: environment variables beside ours.
    """
    paths = os.pathsep.join(map(str, [*path, ROOT]))
    return subprocess.run(
        [sys.executable, "-m", "vllm_fl.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        cwd=ROOT,
        text=True,
        timeout=120,
        check=False,
        **(popen or {"capture_output": True}),
    )


def text_of(render: Callable[..., None], data: Mapping[str, Any]) -> str:
    """What a command prints for people, in lines as long as they need to be."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "WIDTH", 2000)
        render(data, stream)
    return stream.getvalue()


def leaves(data: Any, without: Collection[str] = ()) -> Iterator[str]:
    """Every text and number in the data, except under the keys in `without`."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key not in without:
                yield from leaves(value, without)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, without)
    elif data is not None and not isinstance(data, bool) and data != "":
        yield str(data)


def untold(
    render: Callable[..., None], data: Mapping[str, Any], without: Collection[str] = ()
) -> list[str]:
    """What the data say and the text for people does not."""
    text = text_of(render, data)
    return [leaf for leaf in leaves(data, without) if leaf not in text]
