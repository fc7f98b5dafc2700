# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl`: reads the command line and hands over to the command's file.

Exit codes: 0 fine, 1 found a problem, 2 wrong usage. Answers go to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..dispatch.errors import DispatchError
from . import bench, check_vendor, config, demo, doctor, explain, new_vendor, snapshot, verify
from . import list as list_command
from .demo_model import DemoModelError
from .errors import CommandError, UsageError
from .output import open_standard_streams

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
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (DispatchError, DemoModelError, CommandError) as error:
        print(f"vllm-fl {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # whoever read the answer has had enough of it
        return 1
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print(f"vllm-fl {arguments.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
