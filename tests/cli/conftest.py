# SPDX-License-Identifier: Apache-2.0
"""Machines on which something is broken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_fl.dispatch.log import logger

BLOCKER = """
import sys
class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker)
"""


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    logger.addHandler(logging.NullHandler())
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture
def without(tmp_path: Path) -> Callable[..., Path]:
    """without("torch") is a folder which, on the path, hides the packages from every process."""

    def without(*names: str) -> Path:
        folder = tmp_path / "hidden"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(BLOCKER.format(names=names))
        return folder

    return without


@pytest.fixture
def modules(tmp_path: Path) -> Callable[..., Path]:
    """modules(name="text") is a folder with these modules."""

    def modules(**texts: str) -> Path:
        folder = tmp_path / "modules"
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    return modules
