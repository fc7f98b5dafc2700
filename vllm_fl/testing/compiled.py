# SPDX-License-Identifier: Apache-2.0
"""The torch op in a graph: torch.compile(fullgraph=True) gives what the op gives eagerly."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.library import bind_name, define, op_for
from .compare import outputs_of
from .memory import place, same_bits
from .report import Kind
from .target import Dispatcher, Target

__all__ = ["problems"]


def problems(
    target: Target, args: tuple[Any, ...], device: str, dispatcher: Dispatcher
) -> list[tuple[Kind, str]]:
    """What differs between eager and compiled, for the functional form and the one in place."""
    contract = target.contract
    define(contract)
    found: list[tuple[Kind, str]] = []
    binding = dispatcher.manager.bind_op(contract.name)
    functional = op_for(contract.name, inplace=False)
    name = bind_name(binding, "conformance").name
    _compare(functional, name, args, device, found, written=())
    if contract.inplace_schema is not None:
        given_up = dispatcher.manager.bind_op(contract.name, donate=True)
        name = bind_name(given_up, "conformance, in place").name
        names = contract.signature.parameter_names
        written = tuple(names.index(n) for n in contract.signature.inplace)
        _compare(op_for(contract.name, inplace=True), name, args, device, found, written=written)
    return found


def _compare(
    op: Any,
    binding: str,
    args: tuple[Any, ...],
    device: str,
    found: list[tuple[Kind, str]],
    *,
    written: tuple[int, ...],
) -> None:
    def call(*given: Any) -> Any:
        return op(*given, binding=binding)

    def outputs(function: Any) -> tuple[Any, ...]:
        placed = place(args, device).args
        result = function(*placed)
        if not written:
            return outputs_of(result)
        return tuple(placed[i] for i in written if i < len(placed))

    torch._dynamo.reset()
    try:
        eager = outputs(call)
        graph = outputs(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found.append((Kind.COMPILE, f"{op} raised {type(error).__name__}: {lines[0]}"))
        return
    for i, (one, other) in enumerate(zip(eager, graph, strict=True)):
        if not same_bits(one, other):
            found.append((Kind.COMPILE, f"{op}: output {i} differs between eager and compiled"))
        elif one is not None and one.stride() != other.stride():
            text = f"output {i} has strides {other.stride()} compiled, {one.stride()} eagerly"
            found.append((Kind.COMPILE, f"{op}: {text}"))
