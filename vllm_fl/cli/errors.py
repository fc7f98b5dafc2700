# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one line on stderr."""

from __future__ import annotations

__all__ = ["CommandError", "UsageError"]


class CommandError(Exception):
    """There is no answer; exit code 1."""


class UsageError(CommandError):
    """The command line names something that does not exist; exit code 2."""
