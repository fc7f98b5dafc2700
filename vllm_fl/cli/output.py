# SPDX-License-Identifier: Apache-2.0
"""Answers on stdout, whatever the libraries underneath print."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

__all__ = ["answer_stream", "emit", "open_standard_streams", "print_table"]

WIDTH = 110
"""Columns of a table that goes into a file or a pipe."""

Renderer = Callable[[Mapping[str, Any], TextIO], None]


def open_standard_streams() -> bool:
    """Make file descriptors 0 to 2 safe to use, and say whether stdout was open.

    A closed one would be given to the next file that is opened, and an answer or a log would be
    written into that; and `print(file=None)` writes to stdout what was meant for a closed stderr.
    """
    had_stdout = True
    for fd in (0, 1, 2):  # in this order: os.open takes the lowest one that is free
        try:
            os.fstat(fd)
        except OSError:
            had_stdout = had_stdout and fd != 1
            os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(fd), "w"))
    return had_stdout


@contextlib.contextmanager
def answer_stream() -> Iterator[TextIO]:
    """A stream to the real stdout. Inside the block, file descriptor 1 leads to stderr, in
    child processes too, so that no library's output mixes with the answer.

    Raises:
        BrokenPipeError: nobody reads the answer any more.
        OSError: it cannot be written, e.g. because the disk is full.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        # A file's name may hold bytes that are no UTF-8, which Python keeps as \udc80 to \udcff.
        # They are written in these very letters: in JSON, that is what stands for them.
        stream = os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace")
        try:
            yield stream
            stream.flush()
        finally:
            with contextlib.suppress(OSError):  # flush() told it
                stream.close()
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def emit(data: Mapping[str, Any], render: Renderer, *, as_json: bool) -> None:
    """Print one answer: the data as JSON, or what `render` makes of the same data."""
    with answer_stream() as stream:
        if as_json:
            print(json.dumps(data, indent=2, ensure_ascii=False), file=stream)
        else:
            render(data, stream)


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
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    console.print(table)
