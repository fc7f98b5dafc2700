# SPDX-License-Identifier: Apache-2.0
"""What doctor finds about vLLM's platform and about FlagGems: pure functions on data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..vllm_plugin.platform_choice import PLATFORM

__all__ = ["Finding", "finding", "of_flaggems", "of_platform"]

Finding = dict[str, str]


def finding(level: str, about: str, text: str, advice: str = "") -> Finding:
    """One finding; level is "problem" or "note"."""
    return {"level": level, "about": about, "text": text, "advice": advice}


def of_platform(platform: Mapping[str, Any] | None, found: Mapping[str, Any]) -> Iterator[Finding]:
    """Where vLLM's platform is not the one that works here."""
    if platform is None:
        return
    if platform["error"]:
        if not found.get("config_error"):  # that one says the same
            text = f"whether vllm_fl's platform steps in could not be told: {platform['error']}"
            yield finding("problem", "platform", text)
        return
    active, reason = platform["active"], platform["reason"]
    if platform["rival"]:
        yield finding(
            "problem", "platform",
            f"two platform plugins are active, vllm_fl's ({reason}) and '{platform['rival']}': "
            "vLLM refuses two",
            "unset VLLM_FL_PLATFORM, or name those to load in VLLM_PLUGINS",
        )  # fmt: skip
    elif platform["steps_in"] and active is not None and active != PLATFORM:
        yield finding(
            "problem", "platform",
            f"vllm_fl's platform would step in ({reason}), and vLLM took {active}",
            "see that VLLM_PLUGINS does not leave 'fl' out, and what vLLM logs of its plugins",
        )  # fmt: skip
    elif platform["vendor"] == "cuda" and not platform["extension"] and not platform["steps_in"]:
        yield finding(
            "note", "platform",
            f"this vLLM has no compiled extension, and vllm_fl's platform stays back: {reason}",
            "vLLM alone starts no worker on the GPU without it",
        )  # fmt: skip
    for shim in platform["shims"]:
        if shim["state"] == "needed":
            yield finding(
                "problem", "platform",
                f"the stand-in for {shim['name']} is not in place: {shim['reason']}",
                "report it, with the versions above",
            )  # fmt: skip


def of_flaggems(
    versions: Sequence[Mapping[str, Any]], found: Mapping[str, Any]
) -> Iterator[Finding]:
    """What FlagGems meets here, and what it runs with."""
    installed = {entry["package"]: entry["version"] for entry in versions}
    gems, torch = installed.get("flag-gems"), installed.get("torch") or ""
    device = found.get("device") or {}
    if gems and device.get("device_type") == "cuda" and torch.partition("+")[2].startswith("cpu"):
        yield finding(
            "problem", "broken pairing",
            f"flag-gems {gems} with torch {torch} on a device of {device['vendor']}: its import "
            "asks this torch for the device's name, and raises",
            "install the torch of the device, or keep FlagGems out: VLLM_FL_PREFER=vendor",
        )  # fmt: skip
    notes = {(i["impl_id"], i["note"]) for i in found.get("implementations", ()) if i.get("note")}
    for impl_id, note in sorted(notes):
        yield finding("note", "implementations", f"{impl_id} runs {note}")
