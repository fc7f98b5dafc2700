# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl explain`: what would run for an op, and why nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from ..backends.vendor.devices import facts_of
from ..dispatch.decision import Call, Decision
from ..dispatch.errors import ConfigError, UnknownOpError, did_you_mean
from ..dispatch.manager import OpManager
from ..dispatch.policy import MODES
from ..dispatch.types import (
    BackendImplKind,
    DeviceFacts,
    OpImpl,
    Rejected,
    as_verdict,
    is_installed,
)
from .arguments import once, read_shape, read_value
from .child import survey
from .errors import CommandError, UsageError
from .inventory import note_of
from .output import emit, print_table

__all__ = ["add_parser", "contract_of", "explain", "render"]


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say what would run for an op, here or on another vendor's device, and why",
        description="Decides for one op as a worker would, and prints the winner with one reason "
        "for each implementation that lost. With a shape, guards are asked too.",
    )
    parser.add_argument("op", metavar="OP", help="the op's name")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=read_shape,
        metavar="[NAME=]N,N",
        help="shape of the argument under test, or of the array NAME; may be repeated",
    )
    parser.add_argument("--dtype", help="dtype under test, e.g. bfloat16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=read_value,
        metavar="NAME=VALUE",
        help="value of a scalar argument, e.g. is_neox=False; may be repeated",
    )
    parser.add_argument(
        "--mode", choices=MODES, default="eager", help="eager (default) or compiled"
    )
    parser.add_argument(
        "--vendor",
        metavar="NAME",
        help="decide for this vendor's device; what the vendor's own implementations require is "
        "assumed to be installed there, and FlagGems is not",
    )
    parser.add_argument(
        "--with",
        dest="also",
        action="append",
        default=[],
        metavar="MODULE",
        help="with --vendor: assume this module installed there, e.g. flag_gems, and what is "
        "required together with it; may be repeated",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="MODULE",
        help="with --vendor: do not assume this module installed there; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the decision; exit code 1 where nothing can run."""
    data = survey(
        "explain",
        op=arguments.op,
        shapes=once("--shape", arguments.shape),
        dtype=arguments.dtype,
        values=once("--set", arguments.set),
        mode=arguments.mode,
        vendor=arguments.vendor,
        also=arguments.also,
        without=arguments.without,
    )
    emit(data, render, as_json=arguments.json)
    return 0 if data["winner"] else 1


def explain(
    manager: OpManager,
    op: str,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    values: Mapping[str, Any] | None = None,
    mode: str = "eager",
    vendor: str | None = None,
    also: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """The decision as data.

    Args:
        shapes: array argument to its shape; "" is the argument under test. Without any shape,
            dtype and value, guards are not asked.
        dtype: the dtype under test, by name.
        values: scalar argument to its value.
        mode: "eager" or "compiled".
        vendor: decide for this vendor's device, whatever this machine has. What vendors'
            implementations and the reference require is assumed to be installed there, what
            others (FlagGems) require is not.
        also: modules that are assumed installed there too, with what implementations that require
            them require.
        without: modules that are not assumed installed there.

    Returns:
        What `Decision.to_dict` gives; enabled; given and assumed (argument to text); facts; asked
        (which guards were asked); registered (for each implementation what it runs on and
        requires, and what of that is missing here).

    Raises:
        UsageError: nobody knows the op, vendor, dtype, argument or module, or a shape does not fit.
    """
    snapshot = manager.registry.snapshot()
    impls = snapshot.impls_by_op.get(op, ())
    device = manager.device
    if vendor is not None:
        try:
            device = facts_of(vendor, snapshot.known_vendors(), source="--vendor", assumed=True)
        except ConfigError as error:
            raise UsageError(str(error)) from None
    if vendor is not None:
        if op not in snapshot.declarations and not impls:
            raise _unknown(manager, op)
        device = _there(op, device, impls, also, without)
    elif also or without:
        raise UsageError("--with and --without are about another vendor's device; add --vendor")
    registered = [_registered(impl, device) for impl in impls]
    contract = contract_of(op)
    layer = contract is not None and any(
        site.device_types is None or device.device_type in site.device_types
        for site in contract.call_sites
    )
    call, given, assumed, asked, facts = None, {}, {}, "none", None
    if shapes or dtype is not None or values:
        if op not in snapshot.declarations and not impls:
            raise _unknown(manager, op)
        if contract is None:
            raise UsageError(
                f"{op} has no contract in vllm_fl, so no arguments can be built for it; leave out "
                "--shape, --dtype and --set"
            )
        from ..ops.fakes import dtype_of, fake_call

        try:
            made = fake_call(
                contract,
                shapes={name: tuple(shape) for name, shape in (shapes or {}).items()},
                values=values or {},
                dtype=None if dtype is None else dtype_of(contract, dtype),
                device_type=device.device_type,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        given, assumed = made.given, made.assumed
        facts = dict(contract.signature.facts_of(*made.args))
        asked = "layer guards"
        if made.on_device:
            call, asked = Call(made.args), "all guards"
    here = manager.device
    try:
        manager.set_device(device)  # and so its shipped policy counts
        decision = manager.decide(op, facts=facts, call=call, mode=mode, layer=layer)
    except UnknownOpError:
        raise _unknown(manager, op) from None
    finally:
        manager.set_device(here)
    return {
        **_as_data(decision),
        "enabled": manager.config.enabled,
        "given": given,
        "assumed": assumed,
        "facts": {name: _plain(value) for name, value in (facts or {}).items()},
        "asked": asked,
        "registered": registered,
    }


def _unknown(manager: OpManager, op: str) -> CommandError:
    """The error for an op that nobody knows: wrong usage, unless vllm_fl's own are missing."""
    failed = [p for p in manager.get_discovered_plugins() if not p.ok]
    notes = [f"Note: {p.name} failed ({p.error})." for p in failed]
    text = manager.registry.snapshot().unknown_text(op, notes)
    own = any(p.source == "builtin" for p in failed)
    return CommandError(text) if own else UsageError(text)


def contract_of(op: str) -> Any:
    """The contract of an op of vllm_fl, or None."""
    try:
        from ..ops import CONTRACTS
    except ImportError:  # without torch there are none
        return None
    return next((contract for contract in CONTRACTS if contract.name == op), None)


def _registered(impl: OpImpl, device: DeviceFacts) -> dict[str, Any]:
    backend = impl.backend
    types = None if backend is None else backend.device_types
    vendors = getattr(backend, "vendors", None)
    requires = [] if backend is None else list(backend.requires)
    missing = [module for module in requires if not is_installed(module)]
    return {
        "impl_id": impl.impl_id,
        "device_types": None if types is None else list(types),
        "vendors": None if vendors is None else list(vendors),
        "requires": requires,
        "missing": missing,
        "note": note_of(impl),
        "unsure": _unsure(impl, missing, device),
    }


def _unsure(impl: OpImpl, missing: Sequence[str], device: DeviceFacts) -> str:
    """Why an implementation that is taken to be usable on another device may not be. Whether
    a library has the kernel for this op, only an installed one can say."""
    backend = impl.backend
    if (
        impl.available is None
        or backend is None
        or impl.available == backend.is_available
        or not device.assumed
        or not impl.availability(device)
    ):
        return ""
    if missing:
        return (
            f"whether it has a kernel for {impl.op_name} was not looked up, for want of "
            f"{', '.join(missing)} here"
        )
    try:
        verdict = as_verdict(impl.available(), default_reason="its availability probe says no")
    except (Exception, SystemExit) as error:
        return f"here, its availability probe raised {type(error).__name__}: {error}"
    return f"as it is installed here: {verdict.reason}" if isinstance(verdict, Rejected) else ""


def _there(
    op: str,
    device: DeviceFacts,
    impls: Sequence[OpImpl],
    also: Sequence[str],
    without: Sequence[str],
) -> DeviceFacts:
    """The device with what is taken to be installed beside it, and what is not.

    A vendor's own stack is what its chips are sold with; FlagGems is somebody's choice. What this
    machine has installed says nothing about another one.
    """
    fitting = [
        (impl.kind, tuple(impl.backend.requires))
        for impl in impls
        if impl.backend is not None and _fits(impl.backend, device)
    ]
    required = dict.fromkeys(module for _, modules in fitting for module in modules)
    if both := [module for module in also if module in without]:
        raise UsageError(
            f"--with {both[0]} and --without {both[0]} contradict each other; keep one of them"
        )
    for module in (*also, *without):
        if module not in required:
            raise UsageError(
                f"no implementation of {op} for {device.device_class} requires the module "
                f"'{module}', so it changes nothing; "
                f"valid: {', '.join(required) or 'none'}.{did_you_mean(module, required)}"
            )
    assumed = dict.fromkeys(
        module
        for kind, modules in fitting
        if kind is not BackendImplKind.DEFAULT or set(modules) & set(also)
        for module in modules
        if module not in without
    )
    absent = tuple(module for module in required if module not in assumed)
    return replace(device, assumed_modules=tuple(assumed), absent_modules=absent)


def _fits(backend: Any, device: DeviceFacts) -> bool:
    vendors = getattr(backend, "vendors", None)
    return (backend.device_types is None or device.device_type in backend.device_types) and (
        vendors is None or device.vendor in vendors
    )


def _as_data(decision: Decision) -> dict[str, Any]:
    data = decision.to_dict()
    data["device"]["device_class"] = decision.device.device_class
    return data


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print the decision for people."""
    device = data["device"]
    where = device["device_class"] + (" (assumed)" if device["assumed"] else "")
    winner = data["winner"]["impl_id"] if data["winner"] else "nothing available"
    lines = [f"{data['op']} on {where}, {data['mode']}: {winner}"]
    lines.append(f"  chosen: {data['reason']}" if data["winner"] else f"  {data['reason']}")
    lines += [f"  not {loser['impl_id']}: {loser['reason']}" for loser in data["losers"]]
    lines += [
        f"  policy {name} = {entry['value']} (from {entry['source']})"
        for name, entry in data["policy"].items()
    ]
    for what in ("given", "assumed", "facts"):
        if data[what]:
            said = ", ".join(f"{name} = {text}" for name, text in data[what].items())
            lines.append(f"  {what}: {said}")
    if device["assumed_modules"]:
        lines.append(f"  assumed to be installed there: {', '.join(device['assumed_modules'])}")
    if device["absent_modules"]:
        lines.append(
            f"  not assumed to be installed there: {', '.join(device['absent_modules'])}; "
            "--with assumes a module"
        )
    lines.append(f"  {_ASKED[data['asked']]}")
    lines += [f"  {e['impl_id']} runs {e['note']}" for e in data["registered"] if e["note"]]
    lines += [f"  {e['impl_id']}: {e['unsure']}" for e in data["registered"] if e["unsure"]]
    if not data["enabled"]:
        lines.append("  but vllm_fl is switched off: vLLM runs as without it")
    print("\n".join(lines), file=stream)
    if data["registered"]:
        print("\nRegistered:", file=stream)
        print_table(
            stream,
            ("implementation", "runs on", "requires", "missing here"),
            [
                (
                    entry["impl_id"],
                    _runs_on(entry),
                    ", ".join(entry["requires"]) or "-",
                    ", ".join(entry["missing"]) or "-",
                )
                for entry in data["registered"]
            ],
        )


def _runs_on(entry: Mapping[str, Any]) -> str:
    types = "any" if entry["device_types"] is None else ", ".join(entry["device_types"])
    return types if entry["vendors"] is None else f"{types} of {', '.join(entry['vendors'])}"


_ASKED = {
    "none": "guards were not asked; give a --shape, and they are",
    "layer guards": "guards of the layer were asked; those of a call were not, because this "
    "PyTorch cannot make tensors of that device type",
    "all guards": "guards were asked, of the layer and of the call",
}
