# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl`: reads the command line and hands over to the command's file.

Exit codes: 0 fine, 1 found a problem, 2 wrong usage, or a file or stream that cannot be used;
128 and the signal's number where a signal ended it. Answers go to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from ..dispatch.errors import DispatchError
from . import bench, check_vendor, config, demo, doctor, explain, new_vendor, snapshot, verify
from . import list as list_command
from .demo_model import DemoModelError
from .errors import CommandError, UsageError
from .output import open_standard_streams
from .signals import Ended, raised_as_exceptions

__all__ = ["main"]

COMMANDS = (
    demo,
    list_command,
    explain,
    config,
    doctor,
    verify,
    bench,
    snapshot,
    new_vendor,
    check_vendor,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = argparse.ArgumentParser(
        prog="vllm-fl", description="Operator dispatch across AI chips for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-fl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if not open_standard_streams():
        print("vllm-fl: stdout is closed, so the answer has nowhere to go", file=sys.stderr)
        return 1
    who = "vllm-fl"
    try:
        with raised_as_exceptions():
            arguments = _parsed(argv)
            who = f"vllm-fl {arguments.command}"
            return int(arguments.run(arguments))
    except (DispatchError, DemoModelError, CommandError) as error:
        _say(f"{who}: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # whoever read the answer has had enough of it
        _give_up_stdout()
        return 1
    except (OSError, UnicodeError) as error:
        _give_up_stdout()
        _say(f"{who}: {_sentence(error)}")
        return 2
    except KeyboardInterrupt:
        _say(f"{who}: interrupted")
        return 128 + signal.SIGINT
    except Ended as ended:
        return 128 + ended.signum


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        return build_parser().parse_args(argv)
    finally:
        sys.stdout.flush()  # --help and --version: at exit it would be too late to say what failed


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # who cannot be told is not told
        print(line, file=sys.stderr, flush=True)


def _sentence(error: OSError | UnicodeError) -> str:
    """What the system refused, for whom, and what to do."""
    if isinstance(error, UnicodeError):
        return f"a text cannot be written or read: {error}; give a name or file in UTF-8"
    why = error.strerror or str(error) or type(error).__name__
    names = [
        os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)
    ]
    if names:
        return f"cannot use {' or '.join(map(_short, names))}: {why}; name another one, or mend it"
    return f"cannot go on: {why}; the answer is not complete"


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:90]}...{name[-90:]}"


def _give_up_stdout() -> None:
    """Where stdout takes no more, let what is left for it go nowhere: the interpreter would try
    once more at exit, and fail with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
