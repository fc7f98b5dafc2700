# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl check-vendor`: the checklist of a vendor's package, each item by name."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..dispatch.config import load_config
from ..dispatch.errors import did_you_mean
from ..dispatch.packaged import policy_files
from ..dispatch.policy import token_matches
from ..dispatch.registry import OpRegistry
from ..dispatch.types import (
    API_VERSION,
    BackendImplKind,
    BackendPriority,
    DeviceFacts,
    OpImpl,
    Origin,
)
from .diagnosis import remedies
from .errors import CommandError
from .output import answer_stream, print_table
from .vendor_probe import built_in_registry
from .verify import check_device

__all__ = ["ITEMS", "Finding", "add_parser", "check_vendor"]

ITEMS = {
    "import": "the module imports and has a function that registers",
    "API version": "it was written for this version of vllm_fl's API",
    "registration": "the registry takes what it registers",
    "backend": "every function belongs to a subclass of vllm_fl.backends.Backend",
    "vendor": "the vendor is named, in small letters",
    "impl_id": "ids are vendor.<vendor> or vendor.<vendor>.<name>",
    "priority": "priorities can win: above the reference's 50",
    "policy": "policy files that it ships, if any, order what there is",
    "signatures": "parameters are those of the op's declaration, and the op is declared",
    "availability": "it says whether it can run, imports no kernels for that, and is right",
    "missing dependency": "without a module that it needs, it registers and says what is missing",
    "guards": "guards read metadata only, and answer on fake tensors",
    "conformance": "each function does what its op's contract says",
}
"""The checklist: item to what it asks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        item: of the checklist.
        what: what was found, and what to do.
        note: it is advice, and no failure.
    """

    item: str
    what: str
    note: bool = False


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check-vendor",
        help="go through the checklist of a vendor's package",
        description="Imports a vendor's module, registers it apart from everything else, and goes "
        "through the checklist; says what is missing, by the item's name.",
    )
    parser.add_argument("package", metavar="PACKAGE", help="the module, e.g. vllm_fl_acme")
    parser.add_argument("--device", help="where the tensors are (default: the backend's device)")
    parser.add_argument("--no-conformance", action="store_true", help="leave the last two out")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return 1 if something is missing."""
    with answer_stream() as stream:
        findings, asked = check_vendor(
            arguments.package, device=arguments.device, conformance=not arguments.no_conformance
        )
        failed = {finding.item for finding in findings if not finding.note}
        if arguments.json:
            told = {
                "package": arguments.package,
                "passed": not failed,
                "items": {item: item not in failed for item in asked},
                "findings": [
                    {"item": f.item, "what": f.what, "note": f.note} for f in findings
                ],
            }  # fmt: skip
            json.dump(told, stream, indent=2)
            stream.write("\n")
            return int(bool(failed))
        rows = [("MISSING" if item in failed else "ok", item, ITEMS[item]) for item in asked]
        print_table(stream, ("", "item", "what it asks"), rows)
        stream.writelines(f"{'note' if f.note else f.item}: {f.what}\n" for f in findings)
        stream.write(
            f"{arguments.package}: {len(failed)} of {len(asked)} items are missing\n"
            if failed
            else f"{arguments.package}: all {len(asked)} items are there\n"
        )
    return int(bool(failed))


def check_vendor(
    package: str, *, device: str | None = None, conformance: bool = True
) -> tuple[list[Finding], list[str]]:
    """(what was found, the items that were asked).

    Args:
        package: the module's name.
        device: where tensors are for the conformance kit; None takes the backend's device.
        conformance: with the two items that run the functions.

    Raises:
        CommandError: there is no such module.
        UsageError: torch does not know or see the device.
    """
    found = _probe(package)
    if found["error"] is not None:
        item, what = _of_error(package, found["error"])
        return [Finding(item, what)], [item]
    check_device(device)
    registry = _registered(package)
    every = (i for impls in registry.snapshot().impls_by_op.values() for i in impls)
    impls = [i for i in every if i.origin is not None and i.origin.source == "module"]
    findings = [
        *_about_registration(impls, set(registry.snapshot().declarations)),
        *_about_availability(package, found, impls),
        *_about_dependencies(package, found),
    ]
    asked = [item for item in ITEMS if item not in ("guards", "conformance")]
    if conformance and not any(f.item in ("backend", "availability") for f in findings):
        findings += _about_conformance(impls, device)
        asked = list(ITEMS)
    findings += _about_policy_names(registry)
    findings += _about_rivals(impls, registry)
    return findings, asked


def _probe(package: str, blocked: Sequence[str] = ()) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllm_fl.cli.vendor_probe", package, *blocked]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        text = f"the process that imported it ended with {done.returncode}: {last}"
        return {"error": {"type": "crash", "text": text, "traceback": done.stderr}}
    answer = json.loads(lines[-1])
    assert isinstance(answer, dict)
    return answer


def _of_error(package: str, error: dict[str, str]) -> tuple[str, str]:
    """The item that an exception of the import or the registration is about."""
    kind, text = error["type"], error["text"]
    missing = re.match(r"No module named '([^']*)'", text)
    if kind == "ModuleNotFoundError" and missing and missing[1] == package.partition(".")[0]:
        raise CommandError(f"there is no module {package}; install the package first")
    said = f"{kind}: {text}"
    if kind == "ModuleNotFoundError":
        return "missing dependency", (
            f"{said}. Import it in the backend's load(), and name it in `requires`: registering "
            "must work where it is not installed."
        )
    if kind == "DuplicateImplementationError":
        return "registration", said
    if kind == "SignatureMismatchError":
        return "signatures", said
    if text.startswith("policy of "):
        return "policy", said
    if "vllm_fl's API" in text:
        return "API version", said
    if "a vendor's name must be" in text:
        return "vendor", said
    if "needs vendor=" in text:
        return "vendor", f"{said}. Set the class attribute `vendor` of the backend."
    if "impl_id" in text and ("must be" in text or "has no attribute" in text):
        return "impl_id", f"{said}. Set the class attribute `impl_id` of the backend."
    if "priority" in text:
        return "priority", said
    return ("registration" if "Error" in kind and "egist" in kind else "import"), said


def _registered(package: str) -> OpRegistry:
    """What the package registers, in this process, on top of the built-ins."""
    from ..dispatch.discovery import REGISTRARS

    registry = built_in_registry(package)
    module = importlib.import_module(package)
    registrar: Callable[[OpRegistry], None] = next(
        f for name in REGISTRARS if callable(f := getattr(module, name, None))
    )
    with registry.batch(Origin("module", package)):
        registrar(registry)
    return registry


def _about_registration(impls: Sequence[OpImpl], declared: set[str]) -> Iterator[Finding]:
    from ..backends import Backend
    from ..ops import CONTRACTS

    if not impls:
        yield Finding("registration", "it registers nothing")
    described = {contract.name for contract in CONTRACTS}
    for impl in impls:
        who = f"{impl.impl_id} of {impl.op_name}"
        if not isinstance(impl.backend, Backend):
            yield Finding(
                "backend",
                f"{who} belongs to no subclass of vllm_fl.backends.Backend, so nobody knows which "
                "devices it runs on; mark it with @backend.implements()",
            )
        if impl.kind is not BackendImplKind.VENDOR or not impl.vendor:
            yield Finding("vendor", f"{who} has kind {impl.kind.value}, a vendor's is vendor")
            continue
        if not re.fullmatch(r"[a-z][a-z0-9_]*", impl.vendor):
            yield Finding("vendor", f'{who} has vendor "{impl.vendor}"; small letters, digits, _')
        wanted = f"vendor.{impl.vendor}"
        if impl.impl_id != wanted and not impl.impl_id.startswith(f"{wanted}."):
            yield Finding("impl_id", f"{who}: expected {wanted} or {wanted}.<name>")
        if impl.priority <= BackendPriority.REFERENCE:
            yield Finding(
                "priority",
                f"{who} has priority {int(impl.priority)}, so the reference (50) is always chosen; "
                "a vendor's is 100",
            )
        if impl.api_version != API_VERSION:  # the registry refuses it; kept for a laxer one
            yield Finding("API version", f"{who} was written for version {impl.api_version}")
        if impl.op_name not in declared:
            yield Finding(
                "signatures",
                f"{who}: the op is not declared, so nothing checks it; declare an op of your own "
                "with registry.declare(OpSignature.parse(...))",
            )
        elif impl.op_name not in described and impl.op_name != "attention_backend":
            yield Finding("conformance", f"{who}: the op has no contract", note=True)


def _about_availability(
    package: str, found: dict[str, Any], impls: Sequence[OpImpl]
) -> Iterator[Finding]:
    if found["initialized"]:
        yield Finding(
            "availability", "registering it initialized CUDA, after which no worker forks"
        )
    if found["imported"]:
        yield Finding(
            "availability",
            f"registering it and asking is_available() imported {', '.join(found['imported'])}; "
            "import kernels in load()",
        )
    for who, said in found["availability"].items():
        if said.startswith("its availability probe raised"):
            yield Finding("availability", f"{who}: {said}; return False or a reason instead")
    seen: set[int] = set()
    for impl in impls:
        backend = impl.backend
        said = found["availability"].get(f"{impl.impl_id} of {impl.op_name}", "yes")
        if backend is None or id(backend) in seen or said != "yes":
            continue
        seen.add(id(backend))
        try:
            backend.load()
        except Exception as error:
            yield Finding(
                "availability",
                f"{impl.impl_id} says that it is available, but load() raised "
                f"{type(error).__name__}: {error}; is_available() can say so beforehand",
            )


def _about_dependencies(package: str, found: dict[str, Any]) -> Iterator[Finding]:
    required = {name for names in found["requires"].values() for name in names}
    blocked = sorted(required - {"torch", "vllm"})
    if not blocked:
        return
    without = _probe(package, blocked)
    if without["error"] is not None:
        error = without["error"]
        yield Finding(
            "missing dependency",
            f"without {', '.join(blocked)} it does not register: {error['type']}: "
            f"{error['text']}; import them in load()",
        )
        return
    for who, said in without["availability"].items():
        lacking = [name for name in found["requires"].get(who, ()) if name in blocked]
        if said == "yes" and lacking:
            yield Finding("missing dependency", f"{who} is available without {', '.join(lacking)}")


def _about_conformance(impls: Sequence[OpImpl], device: str | None) -> Iterator[Finding]:
    from ..ops import CONTRACTS
    from ..testing import Kind, check_implementation

    described = {contract.name for contract in CONTRACTS}
    for impl in impls:
        if impl.op_name not in described:
            continue
        types = getattr(impl.backend, "device_types", None) or ("cpu",)
        report = check_implementation(impl, device=device or types[0])
        if not report.failures and not report.passed:
            why = [skip.reason for skip in report.left_out] or ["its guards refuse every case"]
            yield Finding("conformance", f"{impl.impl_id} of {impl.op_name} did not run: {why[0]}")
        shown: set[str] = set()
        for failure in report.failures:
            item = "guards" if failure.kind is Kind.GUARD else "conformance"
            if item not in shown:  # the first of each says enough; verify has them all
                shown.add(item)
                yield Finding(item, str(failure))


def _about_rivals(impls: Sequence[OpImpl], registry: OpRegistry) -> Iterator[Finding]:
    """Notes on who is before the package's; notes, because it may well be meant so, and whether
    FlagGems serves the device is not the package's doing."""
    from ..ops import CONTRACTS

    described = {contract.name for contract in CONTRACTS}
    behind: dict[tuple[str, str, int], list[str]] = {}
    for impl in impls:
        if _is_ordered(impl, registry):
            continue
        for other in registry.get_implementations(impl.op_name):
            if other.priority > impl.priority and _share_a_device(impl, other):
                key = (impl.impl_id, other.impl_id, int(other.priority))
                behind.setdefault(key, []).append(impl.op_name)
    for (impl_id, other_id, priority), ops in behind.items():
        names = sorted(set(ops))
        measured = next((name for name in names if name in described), None)
        who = "FlagGems" if other_id == "default.flaggems" else other_id
        yield Finding(
            "priority",
            f"where {who} serves the device it is always chosen before {impl_id}, by its "
            f"priority of {priority}, for {', '.join(names)}; {remedies(impl_id, measured)}",
            note=True,
        )


def _share_a_device(impl: OpImpl, other: OpImpl) -> bool:
    """Whether another implementation may run where this one does."""
    for name in ("device_types", "vendors"):  # None is any
        mine, theirs = (getattr(i.backend, name, None) for i in (impl, other))
        if mine is not None and theirs is not None and set(mine).isdisjoint(theirs):
            return False
    return True


def _about_policy_names(registry: OpRegistry) -> Iterator[Finding]:
    """Notes on policy files that no device asks for."""
    vendors = {*registry.known_vendors(), "nvidia"}  # as the files of "cuda" are named
    for brought in registry.snapshot().policies:
        for path in sorted(brought.folder.glob("*.yaml")):
            if not any(path.stem == v or path.stem.startswith(f"{v}_") for v in vendors):
                yield Finding(
                    "policy",
                    f"{path.name} is named as no vendor and no vendor's product, so it may count "
                    f"nowhere; vendors: {', '.join(sorted(vendors))}."
                    f"{did_you_mean(path.stem, vendors)}",
                    note=True,
                )


def _is_ordered(impl: OpImpl, registry: OpRegistry) -> bool:
    """Whether the package's policy for its vendor's device puts it first."""
    device = DeviceFacts(impl.vendor or "", "")
    packaged = policy_files(device, registry.snapshot())["packaged"]
    order = load_config({}, packaged=packaged).policy.order_for(impl.op_name)
    return bool(order) and token_matches(order[0], impl)
