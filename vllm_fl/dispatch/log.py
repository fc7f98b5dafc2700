# SPDX-License-Identifier: Apache-2.0
"""The vllm_fl logger: on stderr, so that stdout carries answers only."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["configure_logging", "logger"]

logger = logging.getLogger("vllm_fl")
logger.addHandler(logging.NullHandler())


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at the moment, as logging.lastResort does."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """logging assigns here; sys.stderr stays the truth."""


def configure_logging(level: str) -> None:
    """Set the level and, unless the application brought a handler, write to stderr."""
    logger.setLevel(level)
    if not any(not isinstance(h, logging.NullHandler) for h in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
