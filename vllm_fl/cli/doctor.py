# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl doctor`: what is wrong here, what is odd, and what is as it should be.

It has to be readable when half of the machine is broken, so nothing that could end this process
is imported into it: what is installed is read from metadata, and the rest is asked of child
processes, whose crash is a finding.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from .child import Reply, ask, questions, survey
from .diagnosis import diagnose
from .errors import CommandError
from .kernels import native_kernels
from .output import emit, print_table
from .versions import installed_versions

__all__ = ["add_parser", "examine", "render"]

IMPORTED = ("torch", "numpy")
"""Packages whose import is tried: everything else stands on them."""


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="look for what is wrong: versions, plugins, implementations, vLLM hooks",
        description="Looks at versions, plugins, what is registered and what is chosen here, and "
        "at the places where vLLM is hooked; ends in a verdict. Exit code 1 if it found a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    data = examine()
    emit(data, render, as_json=arguments.json)
    return 1 if data["verdict"]["problems"] else 0


def examine() -> dict[str, Any]:
    """Look at everything and return it with the findings; see `diagnose`."""
    versions = installed_versions()
    installed = {entry["package"] for entry in versions if entry["version"]}
    with questions(at_once=2) as pool:
        imports = {name: pool.submit(_import, name) for name in IMPORTED}
        found = pool.submit(_registry)
        hooks = pool.submit(ask, "hooks", {}, quiet=True) if "vllm" in installed else None
        native = pool.submit(native_kernels)
        offered = pool.submit(ask, "platform", {}, quiet=True) if "vllm" in installed else None
        hooked = _as_hooks(None if hooks is None else hooks.result())
        active = hooked.pop("platform", {"active": None, "shims": []})
        return diagnose(
            versions,
            {name: future.result() for name, future in imports.items()},
            found.result(),
            hooked,
            native.result(),
            None if offered is None else {**_as_platform(offered.result()), **active},
        )


def _import(module: str) -> str | None:
    """What is wrong with a package that is imported, or None."""
    reply = ask("import", {"module": module}, quiet=True)
    return _problem(reply)


def _problem(reply: Reply) -> str | None:
    if reply.answer is not None:
        return None
    return str(reply.error["text"]) if reply.error is not None else f"the process {reply.ended}"


def _registry() -> dict[str, Any]:
    try:
        return survey("registry", quiet=True)
    except CommandError as error:
        return {"error": str(error)}


def _as_hooks(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {"error": "vLLM is not installed"}
    return {"error": _problem(reply), **(reply.answer or {})}


def _as_platform(reply: Reply) -> dict[str, Any]:
    unknown = dict.fromkeys(("steps_in", "reason", "vendor", "extension", "asked", "rival"))
    return {"error": _problem(reply), **unknown, **(reply.answer or {})}


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print everything for people, the verdict last."""
    _print_versions(data["versions"], stream)
    if data["error"]:
        print(f"The registry could not be looked at: {data['error']}\n", file=stream)
    else:
        _print_registry(data, stream)
    _print_native(data["native"], stream)
    _print_platform(data["platform"], stream)
    _print_hooks(data["hooks"], stream)
    for level, title in (("problem", "Problems:"), ("note", "Notes:")):
        found = [entry for entry in data["findings"] if entry["level"] == level]
        if found:
            print(title, file=stream)
            rows = [(entry["about"], entry["text"], entry["advice"] or "-") for entry in found]
            print_table(stream, ("about", "what was found", "what to do"), rows)
    print(data["verdict"]["text"], file=stream)


def _print_versions(versions: Sequence[Mapping[str, Any]], stream: TextIO) -> None:
    print("Versions:", file=stream)
    print_table(
        stream,
        ("package", "version", "import"),
        [
            (
                entry["package"],
                entry["version"] or "not installed",
                {None: "-", "": "works"}.get(entry["import_error"], entry["import_error"]),
            )
            for entry in versions
        ],
    )


def _print_registry(data: Mapping[str, Any], stream: TextIO) -> None:
    device = data["device"]
    product = f" ({device['name']})" if device["name"] else ""
    off = "" if data["enabled"] else "; vllm_fl is switched off"
    print(f"Device: {device['device_class']}{product}{off}\n\nPlugins:", file=stream)
    print_table(
        stream,
        ("plugin", "from", "implementations", "state"),
        [
            (p["name"], p["from"], p["implementations"], p["error"] or "works")
            for p in data["plugins"]
        ],
    )
    print("What serves each operator here:", file=stream)
    rows = [(op["op"], op["winner"] or "nothing", op["why"]) for op in data["ops"]]
    print_table(stream, ("operator", "implementation", "why"), rows)
    if data["never_selected"]:
        print("Registered, and never selected here:", file=stream)
        print_table(
            stream,
            ("operators", "implementation", "kind", "why"),
            [
                (", ".join(entry["ops"]), entry["impl_id"], entry["kind"], entry["reason"])
                for entry in data["never_selected"]
            ],
        )


def _print_native(native: Mapping[str, Any], stream: TextIO) -> None:
    print(f"Native kernels{_built_for(native)}:", file=stream)
    print_table(
        stream,
        ("device", "state", "compiler", "compiled for"),
        [
            (d["device"], d["state"], d["compiler"] or "-", ", ".join(d["architectures"]) or "-")
            for d in native["devices"]
        ],
    )


def _built_for(native: Mapping[str, Any]) -> str:
    if native["problem"]:
        return f" ({native['problem']})"
    torch = f", for torch {native['torch']}" if native["torch"] else ""
    return f" (built with VLLM_FL_DEVICE={native['asked']}{torch})"


def _print_platform(platform: Mapping[str, Any] | None, stream: TextIO) -> None:
    if platform is None:
        return
    if platform["error"]:
        print(f"vllm_fl's platform: {platform['error']}\n", file=stream)
        return
    does = "steps in" if platform["steps_in"] else "stays back"
    extension = "with" if platform["extension"] else "without"
    lines = [f"vllm_fl's platform {does}: {platform['reason']}"]
    lines.append(f"vLLM is installed {extension} its compiled extension")
    if platform["asked"]:
        lines.append(f"asked for by VLLM_FL_PLATFORM={platform['asked']}")
    if platform["rival"]:
        lines.append(f"another platform plugin is active: {platform['rival']}")
    if platform["active"]:
        lines.append(f"vLLM's platform here: {platform['active']}")
    print("\n  ".join(lines) + "\n", file=stream)
    if platform["shims"]:
        print("Stand-ins for vLLM's extension:", file=stream)
        rows = [(shim["name"], shim["state"], shim["reason"]) for shim in platform["shims"]]
        print_table(stream, ("stand-in", "state", "why"), rows)


def _print_hooks(hooks: Mapping[str, Any], stream: TextIO) -> None:
    if hooks["error"]:
        print(f"vLLM hooks: {hooks['error']}\n", file=stream)
        return
    print(f"Hooks in a process of vLLM {hooks['vllm']}:", file=stream)
    rows = [
        (hook["name"], hook["purpose"], "in place" if hook["in_place"] else "replaced by others")
        for hook in hooks["installed"]
    ]
    rows += [(module, "hook what it holds", "when imported") for module in hooks["awaited"]]
    rows += [
        (hook["name"], hook["purpose"], "when a model is loaded") for hook in hooks["with_a_model"]
    ]
    print_table(stream, ("where", "what for", "state"), rows)
