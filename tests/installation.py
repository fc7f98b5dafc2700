# SPDX-License-Identifier: Apache-2.0
"""vllm_fl as pip installs it, in an environment of its own that sees the packages of this one.

`python -m tests.installation WHEEL` is how `make wheel` looks at what it built: no path of the
machine is in it, it installs, and doctor finds the kernels that it says it has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
"""What is here already is not to be looked for in an index."""


class Installation:
    """An environment in a folder. No setting and no PYTHONPATH of this process reaches it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(self.run([self.python, "-c", code]).stdout.strip())
        below = sysconfig.get_path("purelib")
        (self.packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")

    def run(
        self, command: Iterable[str | Path], environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            RuntimeError: it failed, with all that it printed.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        kept.pop("PYTHONPATH", None)
        command = [str(part) for part in command]
        done = subprocess.run(
            command, env={**kept, **(environ or {})}, cwd=self.folder, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command} returned {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def install(self, source: Path, environ: Mapping[str, str] | None = None) -> str:
        """Install a wheel or a source tree, and return what pip said."""
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        done = self.run([*pip, "install", "-v", *OFFLINE, source], environ)
        code = "import vllm_fl; print(vllm_fl.__file__)"
        found = Path(self.run([self.python, "-c", code]).stdout.strip())
        if not found.is_relative_to(self.packages):
            raise RuntimeError(f"{found} was imported, and not what was installed")
        return done.stdout + done.stderr

    def cli(self, *arguments: str, **environ: str) -> Any:
        """The answer of a command, as data."""
        command = [self.python, "-m", "vllm_fl.cli.main", *arguments, "--json"]
        return json.loads(self.run(command, environ).stdout)

    @property
    def modules(self) -> list[Path]:
        """The native modules."""
        return sorted((self.packages / "vllm_fl").glob("_C*.so"))


def kernels(doctor: Mapping[str, Any]) -> dict[str, str]:
    """Device to "works", "missing", "unfit" or "broken", as doctor found it."""
    return {entry["device"]: entry["code"] for entry in doctor["native"]["devices"]}


def notes_on_kernels(doctor: Mapping[str, Any]) -> list[str]:
    """What doctor has to say about native kernels."""
    return [f["text"] for f in doctor["findings"] if f["about"] == "native kernels"]


def builders_paths() -> list[str]:
    """Folders of this machine whose names nothing that is given away may hold."""
    torch = find_spec("torch")
    folders = [ROOT, Path.home(), Path(sys.prefix), Path(sysconfig.get_path("include"))]
    folders += [Path(torch.origin).parent] if torch is not None and torch.origin else []
    names = {str(path) for folder in folders for path in (folder, folder.resolve())}
    return sorted(f"{name}/" for name in names if name != "/")


def paths_in(data: bytes, paths: Iterable[str]) -> list[str]:
    """Those of the paths that some bytes hold."""
    return [path for path in paths if path.encode() in data]


def check(wheel: Path) -> str:
    """Look at a wheel, and return doctor's verdict on it.

    Raises:
        RuntimeError: it holds a path of this machine, does not install, or has other kernels than
            it says.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            found = paths_in(archive.read(name), builders_paths())
            if found:
                raise RuntimeError(f"{wheel.name}: {name} holds {', '.join(found)}")
        record = json.loads(archive.read("vllm_fl/_native.json"))
    built = {name for name, made in record["devices"].items() if made["reason"] is None}
    with tempfile.TemporaryDirectory() as folder:
        installation = Installation(Path(folder))
        installation.install(wheel)
        data = installation.cli("doctor")
    expected = {name: "works" if name in built else "missing" for name in record["devices"]}
    if kernels(data) != expected:
        states = [f"{entry['device']}: {entry['state']}" for entry in data["native"]["devices"]]
        raise RuntimeError(f"{wheel.name}: expected {expected}, doctor found {'; '.join(states)}")
    states = [f"{e['device']} {e['state']}" for e in data["native"]["devices"] if e["compiler"]]
    return f"{', '.join(states) or 'no native kernels'}. {data['verdict']['text']}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        try:
            print(f"wheel: {Path(argument).name}: {check(Path(argument).resolve())}")
        except RuntimeError as problem:
            sys.exit(f"wheel: {problem}")
