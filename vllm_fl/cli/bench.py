# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl bench`: which implementation of an op is the fastest here, if any is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ..backends.vendor.devices import VENDORS, facts_of
from ..dispatch.decision import Call, Decision
from ..dispatch.errors import did_you_mean
from ..dispatch.manager import OpManager
from ..dispatch.policy import SelectionPolicy, policy_context
from .arguments import MOST, once, positive, read_shape, read_value
from .child import survey
from .errors import UsageError
from .explain import contract_of
from .output import emit, print_table

if TYPE_CHECKING:
    from ..ops.contract import OpContract
    from ..testing.timing import Timing

__all__ = ["add_parser", "bench", "render"]

TOKENS = (1, 32, 512)
"""A decode step, a batch of them, and a prefill."""

HIDDEN = 4096

Tell = Callable[..., None]


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time every implementation of an op here, side by side",
        description="Times what serves an op on this machine: implementations in turns, median and "
        "spread, against the one that the policy chooses. Names no winner within the spread.",
    )
    parser.add_argument("op", metavar="OP", help="the op's name")
    parser.add_argument(
        "--impl",
        action="append",
        default=[],
        metavar="ID",
        help="only this implementation, by its id; may be repeated",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the tensors are (default: this machine's device)"
    )
    parser.add_argument("--dtype", help="dtype under test (default: the op's first)")
    parser.add_argument(
        "--tokens", type=_sizes, metavar="N,N", help="numbers of tokens (default: 1,32,512)"
    )
    parser.add_argument(
        "--hidden",
        type=positive,
        metavar="N",
        help=f"size of a row, where the op has it ({HIDDEN})",
    )
    for option, form, read, what in (
        (
            "--shape",
            "[NAME=]N,N",
            read_shape,
            "shape of the argument under test, or of the array NAME",
        ),
        ("--set", "NAME=VALUE", read_value, "value of a scalar argument, e.g. head_size=128"),
    ):
        parser.add_argument(
            option, action="append", default=[], type=read, metavar=form,
            help=f"{what}; may be repeated",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def _sizes(text: str) -> list[int]:
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be numbers such as 1,32,512, from 1 to {MOST}, found "
            f'"{text if len(text) <= 60 else text[:57] + "..."}"'
        ) from None


def run(arguments: argparse.Namespace) -> int:
    """Print the times; exit code 1 where nothing ran."""
    data = survey(
        "bench",
        op=arguments.op,
        impls=arguments.impl,
        device=arguments.device,
        dtype=arguments.dtype,
        tokens=arguments.tokens,
        hidden=arguments.hidden,
        shapes=once("--shape", arguments.shape),
        values=once("--set", arguments.set),
    )
    emit(data, render, as_json=arguments.json)
    return 0 if any(size["timings"] for size in data["sizes"]) else 1


def bench(
    manager: OpManager,
    op: str,
    *,
    impls: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    tokens: Sequence[int] | None = None,
    hidden: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Any] | None = None,
    crashed: Mapping[str, str] | None = None,
    tell: Tell = lambda *doing: None,
) -> dict[str, Any]:
    """Times as data.

    Args:
        tokens, hidden: None takes the usual ones, or none where shapes are given.
        crashed: implementations that are left out, each with the reason.
        tell: is told of each implementation before it runs for the first time.

    Returns:
        op, device, dtype, and sizes: for each its arguments, the policy's choice, timings (host
        and device in microseconds, spread and ratio to the policy's choice), refused (with the
        reason), and the fastest, None where two cannot be told apart.

    Raises:
        UsageError: nobody knows the op, implementation, dtype, device or argument.
    """
    contract = contract_of(op)
    if contract is None:
        known = [name for name in manager.registry.list_operators() if contract_of(name)]
        raise UsageError(
            f"no contract for the op '{op}', to make inputs of.{did_you_mean(op, known)}"
        )
    from ..ops.fakes import dtype_of
    from ..testing.sized import has_hidden, sized_arguments
    from .verify import check_device

    known = [impl.impl_id for impl in manager.registry.get_implementations(op)]
    for name in impls:
        if name not in known:
            raise UsageError(
                f"no implementation '{name}' of {op}; valid: {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    check_device(device)
    device = device or manager.device.device_type
    _use(manager, device)
    free = not shapes
    counts: Iterable[int | None] = tokens or (TOKENS if free else (None,))
    if hidden is None and free and has_hidden(contract):
        hidden = HIDDEN
    sizes = []
    try:
        wanted = None if dtype is None else dtype_of(contract, dtype)
        wanted = next(iter(contract.tolerances)) if wanted is None else wanted
        for count in counts:
            args, text = sized_arguments(
                contract, wanted, tokens=count, hidden=hidden, device=device,
                shapes={name: tuple(shape) for name, shape in (shapes or {}).items()},
                values=values or {},
            )  # fmt: skip
            found = _size(manager, contract, args, impls or known, device, crashed or {}, tell)
            sizes.append({"tokens": count, "arguments": text, **found})
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {"op": op, "device": device, "dtype": str(wanted).partition(".")[2], "sizes": sizes}


def _use(manager: OpManager, device: str) -> None:
    """Decide for the device, and run on it, where it is not the one that this machine has first."""
    kind, _, index = device.partition(":")
    vendor = next((info.name for info in VENDORS if info.device_type == kind), None)
    if kind != manager.device.device_type and vendor is not None:
        manager.set_device(facts_of(vendor))
    if index and kind != "cpu":
        import torch

        getattr(torch, kind).set_device(device)  # a kernel may ask for the current one


def _size(
    manager: OpManager,
    contract: OpContract,
    args: tuple[Any, ...],
    ids: Sequence[str],
    device: str,
    crashed: Mapping[str, str],
    tell: Tell,
) -> dict[str, Any]:
    """Everything about one size."""
    import torch

    from ..testing.timing import fastest, time_together

    facts = contract.signature.facts_of(*args)
    chosen = manager.decide(contract.name, facts=facts, call=Call(args)).winner_id
    functions, refused = {}, []
    with torch.inference_mode():
        # The policy's choice is the measure, whether it was asked for or not.
        for impl_id in dict.fromkeys([*ids, *([chosen] if chosen else [])]):
            tell("impl", impl_id)
            reason = crashed.get(impl_id)
            if reason is None:
                reason, fn = _bound(manager, contract.name, impl_id, facts, args)
                functions[impl_id] = lambda fn=fn: fn(*args)
            if reason is None:
                try:
                    functions[impl_id]()
                except Exception as error:
                    reason = f"it raised {type(error).__name__}: {str(error).splitlines()[0]}"
            if reason is not None:
                functions.pop(impl_id, None)
                refused.append({"impl_id": impl_id, "reason": reason})
        timings = time_together(functions, device) if functions else {}
    base = timings.get(chosen or "")
    rows = [_row(name, timing, base) for name, timing in timings.items()]
    rows.sort(key=lambda row: float(row["device_us"]))
    first = fastest(timings)
    return {"policy": chosen, "timings": rows, "refused": refused, "fastest": first}


def _bound(
    manager: OpManager, op: str, impl_id: str, facts: Mapping[str, Any], args: tuple[Any, ...]
) -> tuple[str | None, Any]:
    """The callable as a layer gets it, whose arguments are given up; or why there is none."""
    with policy_context(SelectionPolicy(per_op_order=((op, (f"impl:{impl_id}",)),))):
        asked = manager.decide(op, facts=facts, call=Call(args))
        if asked.winner_id != impl_id:
            return _why(asked, impl_id), None
        binding = manager.bind_op(op, donate=True, facts=facts)
    if binding.decision.winner_id != impl_id:  # its kernels could not be loaded
        return _why(binding.decision, impl_id), None
    return None, binding.fn


def _why(decision: Decision, impl_id: str) -> str:
    return next(loser.reason for loser in decision.losers if loser.impl_id == impl_id)


def _row(name: str, timing: Timing, base: Timing | None) -> dict[str, Any]:
    return {
        "impl_id": name,
        "host_us": round(timing.host, 2),
        "device_us": round(timing.device, 2),
        "how": timing.how,
        "spread": round(timing.spread, 3),
        "ratio": None if base is None else round(timing.device / base.device, 3),
    }


def render(data: Mapping[str, Any], stream: TextIO) -> None:
    """Print the times for people."""
    print(f"{data['op']} on {data['device']}, {data['dtype']}", file=stream)
    for size in data["sizes"]:
        text = ", ".join(f"{name} = {value}" for name, value in size["arguments"].items())
        print(f"\n{text}", file=stream)
        chosen = size["policy"]
        columns = ("implementation", "host us", "device us", "how", "spread", "to the policy's")
        rows = [
            (
                r["impl_id"] + (" (the policy's)" if r["impl_id"] == chosen else ""),
                f"{r['host_us']:.2f}",
                f"{r['device_us']:.2f}",
                r["how"],
                f"{r['spread']:.1%}",
                "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
            )
            for r in size["timings"]
        ]
        if rows:
            print_table(stream, columns, rows)
        print(_verdict(size), file=stream)
    refused: dict[tuple[str, str], list[Any]] = {}
    for size in data["sizes"]:
        for entry in size["refused"]:
            refused.setdefault((entry["impl_id"], entry["reason"]), []).append(size["tokens"])
    for (impl_id, reason), tokens in refused.items():
        some = len(tokens) < len(data["sizes"])
        where = f" at {', '.join(map(str, tokens))} tokens" if some else ""
        print(f"not timed{where}: {impl_id}: {reason}", file=stream)


def _verdict(size: Mapping[str, Any]) -> str:
    if not size["timings"]:
        return "nothing ran"
    if len(size["timings"]) == 1:
        return "one implementation alone: nothing to compare with"
    if size["fastest"] is None:
        return "no winner: the fastest ones are within each other's spread"
    if size["fastest"] == size["policy"]:
        return f"{size['fastest']} is the fastest, and the policy's choice"
    return (
        f"{size['fastest']} is the fastest, and the policy chooses {size['policy'] or 'nothing'}; "
        f"see that it is right: vllm-fl verify --impl {size['fastest']}"
    )
