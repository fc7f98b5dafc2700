# SPDX-License-Identifier: Apache-2.0
"""Reads every supported release of vLLM and looks for what vllm_fl relies on in it.

    python -m tests.releases.audit [--wheels DIR] [--json]

A bare Python will do: wheels are downloaded and read, never installed or imported. Exits with 1
if a release lacks something.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .checks import Entry, Finding
from .source import Source
from .surface import ALIASES, RELEASES, SURFACE, Release

__all__ = ["audit", "failures", "main", "read_installed", "report"]

CACHE = Path(".cache/wheels")
MARKS = {"absent": "-"}


def audit(source: Source, surface: Iterable[Entry] = SURFACE) -> list[Finding]:
    """One finding for each entry."""
    return [entry.look(source) for entry in surface]


def failures(source: Source, surface: Sequence[Entry] = SURFACE) -> list[str]:
    """A line for each entry that a release does not meet."""
    return [
        f"{entry.path}: {finding.status}: {finding.text} ({finding.at or 'vLLM ' + source.version})"
        for entry, finding in zip(surface, audit(source, surface), strict=True)
        if finding.status not in ("ok", "absent")
    ]


def read_installed() -> Source | None:
    """The sources of the vLLM of this environment, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        for package in {release.package for release in RELEASES}:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(package)
                return Source.of_folder(Path(folder).parent, version, ALIASES)
    return None


def report(findings: dict[str, list[Finding]], surface: Sequence[Entry] = SURFACE) -> list[str]:
    """The table: an entry a line, a release a column, and below it what was found."""
    releases = list(findings)
    width = max(len(entry.path.partition(":")[2]) for entry in surface) + 4
    lines: list[str] = []
    module = None
    for row, entry in enumerate(surface):
        here, _, name = entry.path.partition(":")
        if here != module:
            module = here
            lines += ["", f"{module:<{width}}" + "".join(f"{r:>9}" for r in releases)]
        row_findings = {release: findings[release][row] for release in releases}
        marks = [MARKS.get(f.status, f.status) for f in row_findings.values()]
        lines.append(f"  {name or '(module)':<{width - 2}}" + "".join(f"{m:>9}" for m in marks))
        lines += _found(row_findings)
    return lines


def _found(row: dict[str, Finding]) -> list[str]:
    """What was found, once for the releases where it is the same; with its place if it is wrong."""
    by_text: dict[str, list[str]] = {}
    for release, finding in row.items():
        if finding.status != "absent":
            wrong = finding.status != "ok" and finding.at
            text = f"{finding.text} ({finding.at})" if wrong else finding.text
            by_text.setdefault(text, []).append(release)
    everywhere = len(by_text) == 1
    return [
        f"      {text}" if everywhere else f"      {', '.join(releases)}: {text}"
        for text, releases in by_text.items()
        if text
    ]


def _to_json(findings: dict[str, list[Finding]]) -> list[dict[str, object]]:
    return [
        {
            "path": entry.path,
            "why": entry.why,
            "releases": {
                release: {"status": row.status, "found": row.text, "at": row.at}
                for release, row in ((r, found[index]) for r, found in findings.items())
            },
        }
        for index, entry in enumerate(SURFACE)
    ]


class WheelError(Exception):
    """A wheel cannot be had."""


def _wheel_of(release: Release, folder: Path) -> Path | None:
    name = release.package.replace("-", "_")
    return next(folder.glob(f"{name}-{release.version}-*.whl"), None)


def _download(release: Release, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # The wheel of a fixed platform: only its Python files are read, so this one's does not matter.
    command += ["--only-binary", ":all:", "--implementation", "cp", "--abi", "abi3"]
    command += ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
    command += ["--dest", str(folder), f"{release.package}=={release.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = _wheel_of(release, folder)
    if done.returncode or wheel is None:
        raise WheelError(
            f"pip could not download {release.package} {release.version}:\n{done.stderr.strip()}"
        )
    return wheel


def _collect(folder: Path | None) -> list[Path]:
    """The wheels, from a folder that has them all, or from the cache and what it lacks by pip."""
    wheels = []
    for release in RELEASES:
        wheel = _wheel_of(release, folder or CACHE)
        if wheel is None and folder is not None:
            raise WheelError(f"{folder} has no wheel of {release.package} {release.version}")
        if wheel is None:
            print(
                f"audit-hooks: downloading {release.package} {release.version}",
                file=sys.stderr,
                flush=True,
            )
            wheel = _download(release, CACHE)
        wheels.append(wheel)
    return wheels


def _audit_wheel(wheel: Path) -> list[Finding]:
    return audit(Source.of_wheel(wheel, ALIASES))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases.audit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help=f"use the wheels in DIR, instead of {CACHE}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    given = parser.parse_args(arguments)
    try:
        wheels = _collect(given.wheels)
    except WheelError as error:
        print(f"audit-hooks: {error}", file=sys.stderr)
        return 1
    with ProcessPoolExecutor(max_workers=len(wheels)) as pool:
        results = list(pool.map(_audit_wheel, wheels))
    findings = {release.version: found for release, found in zip(RELEASES, results, strict=True)}
    if given.json:
        print(json.dumps(_to_json(findings), indent=2))
    else:
        print("\n".join(report(findings)))
    bad = sum(row.status in ("missing", "changed") for found in results for row in found)
    if not given.json:
        print(f"\n{len(SURFACE)} entries, {len(RELEASES)} releases: {bad or 'no'} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
