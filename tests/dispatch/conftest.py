# SPDX-License-Identifier: Apache-2.0
"""The core alone: no built-in implementation is registered, unless a test asks for them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_fl.dispatch import discovery, reset_default_manager
from vllm_fl.dispatch.log import logger


@pytest.fixture(autouse=True)
def _fresh_default_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default manager with nothing registered."""
    monkeypatch.setattr(discovery, "BUILTIN_MODULES", ())
    reset_default_manager()
    yield
    reset_default_manager()


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What vllm_fl logs, as "LEVEL text"."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler = Keep()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def plugin_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path for modules and dist-info folders; what was imported from it is
    forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def write_module(plugin_path: Path) -> Callable[[str, str], None]:
    """Writes a module that can be imported."""

    def write(name: str, text: str) -> None:
        (plugin_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    return write


@pytest.fixture
def write_entry_point(plugin_path: Path) -> Callable[..., None]:
    """Writes what pip leaves of a package that declares one entry point `vllm_fl.plugin`."""

    def write(name: str, value: str, package: str = "vllm-plugin-acme", version: str = "1.2.3"):
        folder = plugin_path / f"{package.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        with (folder / "entry_points.txt").open("a") as file:
            if file.tell() == 0:
                file.write("[vllm_fl.plugin]\n")
            file.write(f"{name} = {value}\n")
        importlib.invalidate_caches()

    return write
