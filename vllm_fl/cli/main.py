# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl`: reads the command line and hands over to the command's file.

Exit codes: 0 fine, 1 found a problem, 2 wrong usage. Answers go to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..dispatch.errors import DispatchError
from . import demo
from .demo_model import DemoModelError

__all__ = ["main"]

COMMANDS = (demo,)


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
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (DispatchError, DemoModelError) as error:
        print(f"vllm-fl {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
