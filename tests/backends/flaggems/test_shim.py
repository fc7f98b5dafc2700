# SPDX-License-Identifier: Apache-2.0
"""The shim for Triton 3.7 and later; `make test-flaggems TRITON=3.7.1` runs everything on it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_fl.backends.flaggems import shim, versions
from vllm_fl.dispatch.types import OpImpl


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """FlagGems' two settings, in modules that stand in for its own."""
    entry = types.ModuleType("flag_gems.utils.libentry")
    entry.minor_version = 7  # type: ignore[attr-defined]
    config = types.SimpleNamespace(prefer_block_pointer=True)
    utils = types.ModuleType("flag_gems.utils.codegen_config_utils")
    utils.get_codegen_config = lambda: config  # type: ignore[attr-defined]
    for name in ("flag_gems", "flag_gems.utils"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    # As in FlagGems, a decorator hides the module of the same name.
    sys.modules["flag_gems.utils"].libentry = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, entry.__name__, entry)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(shim, "_before", [])
    return entry, config


def test_it_changes_two_settings_and_takes_them_back(settings: tuple[Any, Any]) -> None:
    entry, config = settings
    shim.apply()
    assert (entry.minor_version, config.prefer_block_pointer) == (6, False)
    shim.apply()
    shim.revert()
    assert (entry.minor_version, config.prefer_block_pointer) == (7, True)
    shim.revert()
    assert (entry.minor_version, config.prefer_block_pointer) == (7, True)


def test_it_is_in_force_only_where_triton_needs_it(gems: Mapping[str, OpImpl]) -> None:
    triton = versions.triton_version()
    assert triton is not None
    needed = versions.needs_shim(triton)
    utils = importlib.import_module("flag_gems.utils.codegen_config_utils")
    assert bool(shim._before) is needed
    assert utils.get_codegen_config().prefer_block_pointer is not needed
