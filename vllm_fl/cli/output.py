# SPDX-License-Identifier: Apache-2.0
"""Answers on stdout, whatever the libraries underneath print."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

__all__ = ["answer_stream", "print_table"]


@contextlib.contextmanager
def answer_stream() -> Iterator[TextIO]:
    """A stream to the real stdout. Inside the block, file descriptor 1 leads to stderr, in
    child processes too, so that no library's output mixes with the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_table(stream: TextIO, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their headings, numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    terminal = stream.isatty()
    width = None if terminal else 110
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    console.print(table)
