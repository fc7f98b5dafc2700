# SPDX-License-Identifier: Apache-2.0
"""Readers of option values that several commands take; what they refuse, argparse tells."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from typing import TypeVar

from .errors import UsageError

__all__ = ["MOST", "once", "positive", "read_shape", "read_value"]

V = TypeVar("V")

MOST = (1 << 31) - 1
"""Above any count that means something here, and within what every library counts with."""


def positive(text: str) -> int:
    """A count: of tokens, of a row's elements, of processes."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MOST:
        least = f"of at least 1 and at most {MOST}" if value > MOST else "of at least 1"
        raise argparse.ArgumentTypeError(f'must be a whole number {least}, found "{_short(text)}"')
    return value


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The value of a --shape: the array's name, "" for the one under test, and the shape."""
    name, separator, numbers = text.rpartition("=")
    try:
        shape = tuple(int(part) for part in numbers.split(",") if part.strip())
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape) or (separator and not name):
        raise argparse.ArgumentTypeError(
            f'must be sizes such as 32,4096 or key=32,1024, found "{_short(text)}"'
        )
    return name, shape


def read_value(text: str) -> tuple[str, object]:
    """The value of a --set: name and value. Which type it must have, the op says."""
    name, separator, written = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f'must be NAME=VALUE, found "{_short(text)}"')
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, written  # a word, e.g. approximate=tanh
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
        raise argparse.ArgumentTypeError(
            f"must be a number, a word, True, False, None or a list of numbers, found "
            f'"{_short(written)}" for {name}'
        )
    return name, list(value) if isinstance(value, tuple) else value


def once(option: str, pairs: Iterable[tuple[str, V]]) -> dict[str, V]:
    """The values of a repeated option by name.

    Raises:
        UsageError: a name is given twice, so that one of the two would not count.
    """
    found: dict[str, V] = {}
    for name, value in pairs:
        if name in found:
            what = f"{name} is" if name else "the argument under test is"
            raise UsageError(f"{option}: {what} given twice; keep one of the two")
        found[name] = value
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
