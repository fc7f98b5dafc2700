# SPDX-License-Identifier: Apache-2.0
"""Which FlagGems and which Triton fit together, told from metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

__all__ = ["PACKAGES", "defines", "flaggems_version", "needs_shim", "reason", "triton_version"]

PACKAGES = ("flaggems_vllm", "flag_gems")
"""Where a kernel is looked for, in this order: its authors move those for vLLM to the former."""

FLAGGEMS = (Version("5.0.2"), Version("5.1"))
"""From, and up to but not including: the guards were derived from 5.0.2."""

TRITON = (Version("3.3"), Version("3.9"))
"""From, and up to but not including: 3.9 has no block pointers, which kernels use by hand."""

SHIM_FROM = Version("3.7")
"""FlagGems leaves constants out of its launches from here on; `shim` puts that right."""

_TRITON_DISTRIBUTIONS = ("triton", "flagtree", "triton-ascend", "pytorch-triton")


def _installed(*distributions: str) -> Version | None:
    for name in distributions:
        try:
            return Version(version(name))
        except (PackageNotFoundError, InvalidVersion):
            continue
    return None


def flaggems_version() -> Version | None:
    """The installed FlagGems, or None."""
    return _installed("flag-gems")


def triton_version() -> Version | None:
    """The installed Triton, or whichever distribution stands in for it; None if there is none."""
    return _installed(*_TRITON_DISTRIBUTIONS)


def needs_shim(triton: Version) -> bool:
    """Whether FlagGems needs `shim` to work with this Triton."""
    return triton >= SHIM_FROM


def reason(flaggems: Version | None, triton: Version | None) -> str | None:
    """Why the two cannot be used, or None."""
    if flaggems is None:
        return "no distribution flag-gems; pip install --no-deps flag-gems sqlalchemy"
    if not _within(flaggems, FLAGGEMS):
        return f"flag-gems {flaggems} is installed, {_window(FLAGGEMS)} is proven"
    if triton is None:
        return "no distribution of Triton"
    if not _within(triton, TRITON):
        return f"Triton {triton} is installed, flag-gems {flaggems} works on {_window(TRITON)}"
    return None


def _within(found: Version, window: tuple[Version, Version]) -> bool:
    return window[0] <= found and Version(found.base_version) < window[1]


def _window(window: tuple[Version, Version]) -> str:
    return f">={window[0]},<{window[1]}"


def defines(symbol: str) -> bool:
    """Whether an installed package exports the symbol, told from its source."""
    return any(symbol in _exported(package) for package in PACKAGES)


@lru_cache(maxsize=8)
def _exported(package: str) -> frozenset[str]:
    """The words in the files that make up a package's namespace."""
    spec = importlib.util.find_spec(package)
    words: set[str] = set()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in ("__init__.py", "fused/__init__.py", "ops/__init__.py"):
            path = Path(folder) / name
            if path.is_file():
                words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(words)
