# SPDX-License-Identifier: Apache-2.0
"""From what was seen to what is wrong: pure functions on data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .pairings import Finding, finding, of_flaggems, of_platform
from .versions import find_conflicts

__all__ = ["diagnose", "remedies"]


def diagnose(
    versions: Sequence[Mapping[str, Any]],
    imports: Mapping[str, str | None],
    found: Mapping[str, Any],
    hooks: Mapping[str, Any],
    native: Mapping[str, Any],
    platform: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that was seen, with the findings and a verdict.

    Args:
        versions: what `installed_versions` returns.
        imports: package to what went wrong when it was imported, or None.
        found: what `inventory` returns, or {"error"} where there is none.
        hooks: {"error", "vllm", "enabled", "device", "installed", "awaited", "with_a_model"}; only
            "error" where there is one.
        native: what `native_kernels` returns.
        platform: what `platform_choice.describe` returns, with "error", "active" (the class of
            vLLM's platform) and "shims"; None where there is no vLLM.

    Returns:
        versions (each with import_error: None where it was not tried, "" where it worked),
        error, enabled, device, plugins, ops, never_selected, native, platform, hooks, findings
        (level "problem" or "note", about, text, advice), verdict (problems, notes, text).
    """
    findings = [
        *_of_versions(versions, imports),
        *of_flaggems(versions, found),
        *_of_registry(found, torch_works=not imports.get("torch")),
        *_of_native(native, found, torch_works=not imports.get("torch")),
        *of_platform(platform, found),
        *_of_hooks(hooks, found),
    ]
    counts = {level: sum(f["level"] == level for f in findings) for level in ("problem", "note")}
    return {
        "versions": [
            {
                "package": entry["package"],
                "version": entry["version"],
                "import_error": (imports[entry["package"]] or "")
                if entry["package"] in imports and entry["version"]
                else None,
            }
            for entry in versions
        ],
        "error": found.get("error"),
        "enabled": found.get("enabled"),
        "device": found.get("device"),
        "plugins": [
            {
                "name": record["name"],
                "from": f"{record['package']} {record['version']}".strip() or record["source"],
                "implementations": record["implementations"],
                "error": record["error"],
            }
            for record in found.get("plugins", ())
        ],
        "ops": [
            {"op": name, "winner": op["winner"], "why": op["why"]}
            for name, op in found.get("ops", {}).items()
            if not op["selector"] or op["winner"]
        ],
        "never_selected": _never_selected(found),
        "native": {
            **native,
            "devices": [
                {key: value for key, value in entry.items() if key != "advice"}
                for entry in native["devices"]
            ],
        },
        "platform": None if platform is None else dict(platform),
        "hooks": dict(hooks),
        "findings": findings,
        "verdict": _verdict(counts["problem"], counts["note"]),
    }


def _verdict(problems: int, notes: int) -> dict[str, Any]:
    found = _count(problems, "problem") if problems else "fine, no problem found"
    more = f", {_count(notes, 'note')}" if notes else ""
    return {"problems": problems, "notes": notes, "text": f"Verdict: {found}{more}."}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _of_versions(
    versions: Sequence[Mapping[str, Any]], imports: Mapping[str, str | None]
) -> Iterator[Finding]:
    installed = {entry["package"]: entry["version"] for entry in versions}
    for package in ("torch", "vllm"):
        if not installed.get(package):
            what = "nothing can run" if package == "torch" else "there is nothing to plug into"
            yield finding(
                "problem", "versions", f"{package} is not installed: {what}", f"install {package}"
            )
    for package, error in imports.items():
        if error and installed.get(package):
            yield finding(
                "problem", "versions", f"{package} cannot be imported: {error}",
                _import_advice(package, error, str(installed[package])),
            )  # fmt: skip
    for entry in find_conflicts(versions):
        yield finding(entry["level"], entry["about"], entry["text"], entry["advice"])


_EXTENSION = re.compile(r"Failed to load the backend extension: (\w+)")


def _import_advice(package: str, error: str, version: str) -> str:
    extension = _EXTENSION.search(error)
    if extension is not None:  # torch loads installed extensions of devices when it is imported
        below = "CANN (source its set_env.sh)" if extension[1] == "torch_npu" else "its driver"
        return (
            f"{extension[1]} is installed, and what it needs is not found: {below}. To use torch "
            f"without it, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall {extension[1]}"
        )
    return (
        f"install {package} {version} again, and look for another {package} earlier on the path "
        "(PYTHONPATH, the current folder)"
    )


def _of_registry(found: Mapping[str, Any], *, torch_works: bool) -> Iterator[Finding]:
    if found.get("error"):
        yield finding("problem", "registry", f"it could not be looked at: {found['error']}")
        return
    if not found["enabled"]:
        yield finding(
            "note", "configuration", "vllm_fl is switched off; vLLM runs as without it",
            "unset VLLM_FL_ENABLED",
        )  # fmt: skip
    if found.get("config_error"):
        yield finding(
            "problem", "configuration", found["config_error"],
            "correct it; vLLM does not start with it. Everything here is told for the defaults",
        )  # fmt: skip
    for sighting in found.get("sightings", ()):
        if not sighting["found"]:
            yield finding("note", "device", sighting["text"], "nothing, unless it is your device")
    for record in found["plugins"]:
        yield from _of_plugin(record, torch_works)
    for name, op in found["ops"].items():
        yield from _of_op(name, op, found)
    reference = [n for n, op in found["ops"].items() if _kind(n, op, found) == "reference"]
    if reference:
        yield finding(
            "note", "operators",
            f"the reference serves {', '.join(reference)}: correct, and slow",
            "in vLLM, its own forward stays where it is faster; else install the vendor's package",
        )  # fmt: skip
    yield from _of_priority(found)
    for tie in found["ties"]:
        by_name = tie["settled_by"] == "the smaller id"
        yield finding(
            "problem" if by_name else "note", "ties",
            f"{tie['op']}: {tie['winner']} and {', '.join(tie['others'])} have priority "
            f"{tie['priority']}; settled by: {tie['settled_by']}",
            f"say which: VLLM_FL_PER_OP='{tie['op']}=impl:{tie['winner']}'" if by_name else "",
        )  # fmt: skip


def remedies(impl_id: str, op: str | None) -> str:
    """What to do where FlagGems is before a vendor's kernels and they are faster.

    Args:
        op: one that can be benchmarked; None where none has a contract.
    """
    if op is None:
        shown = (
            "They have no contract, so that they are right and faster is for the package to show"
        )
    else:
        shown = (
            "That they are right and faster is shown on the device: "
            f"vllm-fl verify --impl {impl_id}, vllm-fl bench {op}"
        )
    return (
        "where the vendor's kernels are faster, its package says so: with an order in a policy "
        f"file (registry.add_policies), or with a priority above that. {shown}"
    )


def _of_priority(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Vendors whose kernels FlagGems' priority is before."""
    ops: dict[tuple[str, int, str, int], list[str]] = {}
    for entry in found["behind"]:
        key = (entry["impl_id"], entry["priority"], entry["winner"], entry["winners_priority"])
        ops.setdefault(key, []).append(entry["op"])
    for (impl_id, priority, winner, winners), names in ops.items():
        yield finding(
            "note", "priority",
            f"{impl_id} could serve {', '.join(names)}, and always loses to {winner}, whose "
            f"priority is {winners}, not {priority}",
            remedies(impl_id, names[0]),
        )  # fmt: skip


def _of_plugin(record: Mapping[str, Any], torch_works: bool) -> Iterator[Finding]:
    if record["error"] is None:
        return
    package = record["package"] or record["name"]
    if record["source"] != "builtin":
        advice = f"mend or uninstall {package}"
    else:
        advice = "see what its import needs" if torch_works else "mend torch first"
    yield finding("problem", "plugins", f"{record['name']} failed: {record['error']}", advice)


def _of_op(name: str, op: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    if op["signature"] is None:
        meant = f'; did you mean "{op["closest"]}"?' if op["closest"] else ""
        yield finding(
            "problem", "operators",
            f"nobody declared {name}, so its implementations are unchecked{meant}",
            f"declare it: registry.declare(OpSignature.parse('{name}(...)'))",
        )  # fmt: skip
    if op["winner"] is not None or op["selector"]:
        return
    implemented = any(entry["op"] == name for entry in found["implementations"])
    why = op["why"] if implemented else "no implementation is registered"
    yield finding(
        "problem" if implemented else "note", "operators", f"nothing can serve {name}: {why}",
        f"see vllm-fl explain {name}" if implemented else "",
    )  # fmt: skip


def _kind(name: str, op: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The kind of what serves an op."""
    chosen = (name, op["winner"])
    impls = found["implementations"]
    return next((i["kind"] for i in impls if (i["op"], i["impl_id"]) == chosen), None)


def _never_selected(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Implementations that can never be selected here; ops with one reason in one entry."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for impl in found.get("implementations", ()):
        never = impl["never_selected"]
        if never is None:
            continue
        entry = entries.setdefault(
            (impl["impl_id"], never["reason"]),
            {"impl_id": impl["impl_id"], "kind": impl["kind"], **never, "ops": []},
        )
        entry["ops"].append(impl["op"])
    return list(entries.values())


_KERNELS_OF = {"cpu": "cpu", "cuda": "cuda", "rocm": "hip"}
"""A vendor to the native kernels that its chips run."""


def _of_native(
    native: Mapping[str, Any], found: Mapping[str, Any], *, torch_works: bool
) -> Iterator[Finding]:
    here = _KERNELS_OF.get(str((found.get("device") or {}).get("vendor")))
    for entry in native["devices"]:
        if entry["code"] == "works" or (entry["code"] == "broken" and not torch_works):
            continue
        if entry["code"] == "missing" and entry["device"] != here:
            continue  # nothing here would run them
        level = "note" if entry["code"] == "missing" else "problem"
        yield finding(level, "native kernels", entry["state"], entry["advice"])


def _of_hooks(hooks: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    if hooks["error"]:
        if hooks.get("vllm") or hooks["error"] != "vLLM is not installed":
            yield finding(
                "problem", "hooks", f"registering the plugin as vLLM does: {hooks['error']}",
                "vLLM's own processes meet the same",
            )  # fmt: skip
        return
    for hook in hooks["installed"]:
        if not hook["in_place"]:
            yield finding("note", "hooks", f"{hook['name']} was replaced by another plugin")
    here = (found.get("device") or {}).get("vendor")
    if hooks["device"] and here and hooks["device"].partition(":")[0] != here:
        yield finding(
            "note", "device",
            f"vLLM's platform is {hooks['device']}, and this machine looks like {here}: in vLLM "
            f"the operators are chosen for {hooks['device']}",
            "set VLLM_FL_PLATFORM, or install the vLLM of the device",
        )  # fmt: skip
