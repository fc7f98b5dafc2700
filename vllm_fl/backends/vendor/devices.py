# SPDX-License-Identifier: Apache-2.0
"""Which vendor's chip this machine has: found by markers, importing and touching nothing.

A device type says little: eight vendors call theirs "cuda". The facts themselves are in
`device_table`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...dispatch.config import check_names
from ...dispatch.errors import ConfigError
from ...dispatch.log import logger
from ...dispatch.registry import OpRegistry
from ...dispatch.types import DeviceFacts, VendorInfo, is_installed
from .device_table import CPU, DEVICES, Marker, VendorDevice

__all__ = [
    "VENDORS",
    "Sighting",
    "Surroundings",
    "describe",
    "detect",
    "device_of",
    "facts_of",
    "flaggems_name",
    "observed",
    "register_builtins",
    "survey",
]

VENDORS: tuple[VendorDevice, ...] = (CPU, *sorted(DEVICES, key=lambda info: info.name != "cuda"))
"""Every vendor; whose device type others share, before them."""

_BY_NAME = {info.name: info for info in VENDORS}
_TORCH_MARKS = ("__hcu_version__", "corex", "cuda", "hip", "xpu")
_OF_VERSION = ("cuda", "hip", "xpu")
"""Those that `torch.version` names in every build, as None where they do not apply."""


def register_builtins(registry: OpRegistry) -> None:
    """Make the vendors' names known."""
    for vendor in VENDORS:
        registry.declare_vendor(vendor)


def device_of(vendor: str, *, source: str = "vendor") -> VendorDevice:
    """The table's row of a vendor.

    Raises:
        ConfigError: the vendor is not in the table; lists the valid names.
    """
    check_names([vendor], _BY_NAME, what="vendor", source=source)
    return _BY_NAME[vendor]


def facts_of(
    vendor: str,
    known: Mapping[str, VendorInfo] = MappingProxyType({}),
    *,
    source: str = "vendor",
    assumed: bool = False,
) -> DeviceFacts:
    """The device facts of a vendor of the table, or of one that a plugin brought.

    Args:
        known: vendors beside those of the table, e.g. `registry.snapshot().known_vendors()`.
        source: who names the vendor, for the error.

    Raises:
        ConfigError: nobody knows the vendor (lists the valid names), or its device type.
    """
    table: Mapping[str, VendorInfo] = {**_BY_NAME, **known}
    check_names([vendor], table, what="vendor", source=source)
    if not table[vendor].device_type:
        raise ConfigError(
            f'{source}: the vendor "{vendor}" has implementations, but nobody said what PyTorch '
            "calls its device. Its package should set Backend.device_types, or call "
            f'registry.declare_vendor(VendorInfo("{vendor}", "<device type>"))'
        )
    return DeviceFacts(vendor, table[vendor].device_type, assumed=assumed)


def flaggems_name(vendor: str) -> str | None:
    """What GEMS_VENDOR is for a vendor, or None where FlagGems has no backend for it.

    FlagGems' own search runs every vendor's tool and takes the first that answers, so on a
    machine with two of them the outcome is a race. A vendor that is not in the table (an external
    package's) is None too.
    """
    info = _BY_NAME.get(vendor)
    return info.flaggems if info is not None else None


# ------------------------------------------------------------------------- the surroundings


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where markers are looked for; a test gives others.

    Attributes:
        dev: where device nodes lie.
        path: the folders of commands; None for PATH.
        variables: environment variables that are markers, by name.
        modules: installed modules; None asks Python's finders.
        torch_marks: the marks of the torch that is installed; None reads them.
    """

    dev: Path = Path("/dev")
    path: str | None = None
    variables: Mapping[str, str] = field(
        default_factory=lambda: {"PPU_SDK": os.environ.get("PPU_SDK", "")}
    )
    modules: frozenset[str] | None = None
    torch_marks: frozenset[str] | None = None

    def has(self, marker: Marker) -> bool:
        """Whether a marker is there."""
        if marker.kind == "node":
            return next(self.dev.glob(marker.what), None) is not None
        if marker.kind == "tool":
            return shutil.which(marker.what, path=self.path) is not None
        if marker.kind == "env":
            return bool(self.variables.get(marker.what))
        if marker.kind == "module":
            known = self.modules
            return marker.what in known if known is not None else is_installed(marker.what)
        marks = self.torch_marks
        return marker.what in (_torch_marks() if marks is None else marks)


def _torch_marks() -> frozenset[str]:
    """The marks of this Python's torch. An imported one is asked for its attributes, otherwise
    its sources are read: importing torch can fail where a vendor's extension is half installed."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        found = {name for name in ("__hcu_version__", "corex") if getattr(torch, name, False)}
        return frozenset(found | {n for n in _OF_VERSION if getattr(torch.version, n, None)})
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return frozenset()
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return frozenset().union(*(read_torch_marks(Path(folder)) for folder in folders))


def read_torch_marks(folder: Path) -> frozenset[str]:
    """The marks in the sources of a torch: names that `version.py` gives a value, and names that
    `__init__.py` or `version.py` define."""
    marks: set[str] = set()
    for name in ("version.py", "__init__.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for mark in _TORCH_MARKS:
            if name == "__init__.py" and mark in _OF_VERSION:
                continue  # there it is the name of a submodule
            found = re.search(rf"^{mark}\s*(?::[^=\n]*)?=\s*(.+)$", text, re.MULTILINE)
            if found is not None and _has_value(found[1]):
                marks.add(mark)
    return frozenset(marks)


def _has_value(text: str) -> bool:
    try:
        return bool(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError):
        return True  # it is computed


# ------------------------------------------------------------------------------- detection


@dataclass(frozen=True, slots=True)
class Sighting:
    """What of a vendor's markers is here.

    Attributes:
        vendor: its name.
        found: an alternative is complete: this machine has the vendor's chip.
        seen: the markers that are there.
        missing: what would complete the closest alternative.
    """

    vendor: str
    found: bool
    seen: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        seen = ", ".join(self.seen)
        if self.found:
            return f"{self.vendor}: found by {seen}"
        return f"{self.vendor}: not found; {seen} is here, but not {', '.join(self.missing)}"


def _sight(info: VendorDevice, around: Surroundings) -> Sighting:
    there = {m: around.has(m) for markers in info.markers for m in markers}
    lacking = [([m for m in way if not there[m]], len(way)) for way in info.markers]
    # The way that lacks least, and of those the one that something is here of.
    missing, _ = min(lacking, key=lambda way: (len(way[0]), len(way[0]) == way[1]))
    seen = tuple(str(m) for m, is_there in there.items() if is_there)
    return Sighting(info.name, not missing, seen, tuple(map(str, missing)))


def survey(around: Surroundings | None = None) -> tuple[Sighting, ...]:
    """The vendors of whom anything is here, in the order in which `detect` asks: the first that
    is found is this machine's. The others explain why a chip is not taken for what it is."""
    around = around or Surroundings()
    return tuple(s for info in DEVICES if (s := _sight(info, around)).seen)


def detect(
    vendor: str | None,
    known: Mapping[str, VendorInfo] = MappingProxyType({}),
    *,
    around: Surroundings | None = None,
) -> DeviceFacts:
    """The device of this machine.

    Args:
        vendor: from VLLM_FL_PLATFORM; None looks for the vendors' markers.
        known: vendors beside those of the table.
        around: where to look.
    """
    if vendor is not None:
        return facts_of(vendor, known, source="environment variable VLLM_FL_PLATFORM")
    around = around or Surroundings()
    for info in DEVICES:
        if any(all(map(around.has, markers)) for markers in info.markers):
            return facts_of(info.name)
    return facts_of("cpu")


def observed(facts: DeviceFacts) -> DeviceFacts:
    """The same facts, with the product's name and architecture where PyTorch tells them.

    It asks the device, which initialises it: only for a process that has done so already or
    will not fork. Nothing is imported, and where nothing can be learned nothing is changed.
    """
    torch = sys.modules.get("torch")
    device: Any = getattr(torch, facts.device_type, None)
    if facts.device_type == "cpu" or not hasattr(device, "get_device_name"):
        return facts
    try:
        if not device.is_available():
            return facts
        name = str(device.get_device_name())
        arch = ""
        if facts.vendor == "cuda":
            arch = "sm_{}{}".format(*device.get_device_capability())
        elif facts.vendor == "rocm":
            arch = str(device.get_device_properties(0).gcnArchName).partition(":")[0]
    except Exception as error:  # a driver that answers with an error is none of our business
        logger.debug("the device was not described: %s: %s", type(error).__name__, error)
        return facts
    return replace(facts, name=name, arch=arch)


def describe(vendor: str, around: Surroundings | None = None) -> dict[str, Any]:
    """All that is known of a vendor's device, JSON-ready, and what of it is here.

    Returns:
        The table's fields by name; "open": field to what is known of a value that is not
        confirmed; "markers": the alternatives, each a list of {"kind", "what", "here"};
        "found": whether one of them is complete.

    Raises:
        ConfigError: the vendor is not in the table; lists the valid names.
    """
    info, around = device_of(vendor), around or Surroundings()
    told: dict[str, Any] = {f.name: getattr(info, f.name) for f in fields(info)}
    told["open"] = dict(info.open)
    told["visible_devices"] = list(info.visible_devices)
    told["markers"] = [
        [{"kind": m.kind, "what": m.what, "here": around.has(m)} for m in markers]
        for markers in info.markers
    ]
    told["found"] = any(all(m["here"] for m in markers) for markers in told["markers"])
    return told
