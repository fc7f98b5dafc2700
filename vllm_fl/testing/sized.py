# SPDX-License-Identifier: Apache-2.0
"""Arguments of a wanted size: the values of a contract's own first input, repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..ops.arrays import bind_axes, shape_of
from ..ops.contract import OpContract
from ..ops.fakes import fake_call
from .cases import arguments_of, named_arguments

__all__ = ["Sized", "has_hidden", "sized_arguments"]

TOKENS = ("...", "tokens", "rows", "seqs")
HIDDEN = ("hidden", "d")
"""What contracts call these axes."""

Sized = tuple[tuple[Any, ...], dict[str, str]]
"""The positional arguments, and each argument's text."""


def has_hidden(contract: OpContract) -> bool:
    """Whether the op has an axis that `hidden` is the size of."""
    words = re.findall(r"\w+", " ".join(contract.arrays.values()))
    return not set(HIDDEN).isdisjoint(words)


def sized_arguments(
    contract: OpContract,
    dtype: torch.dtype,
    *,
    tokens: int | None = None,
    hidden: int | None = None,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    device: str = "cpu",
) -> Sized:
    """Contiguous arguments of the given sizes, of which the rest follows.

    Indices and scales stay valid, because they are the contract's own.

    Args:
        tokens, hidden: sizes of the axes that contracts call so; None keeps the first input's.
        shapes: array argument to its shape; "" is the one under test.
        values: scalar argument to its value.

    Raises:
        ValueError: the op has no such axis or argument, a size does not fit it, or there is not
            enough memory.
    """
    example = named_arguments(contract, arguments_of(contract, contract.cases_for(dtype)[0], dtype))
    wanted = _sized(contract, example, values, dtype, tokens, hidden)
    call = fake_call(
        contract, shapes={**wanted, **shapes}, values=values, dtype=dtype, device_type="cpu"
    )
    _check_memory(contract, call.args)
    try:
        args = tuple(
            _filled(value, example[name]).to(device) if isinstance(value, torch.Tensor) else value
            for name, value in zip(contract.signature.parameter_names, call.args, strict=True)
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{contract.name}: there is not enough memory for arguments of these sizes "
            f"({str(error).splitlines()[0] if str(error) else 'none left'}); give smaller ones"
        ) from None
    return args, {**call.given, **call.assumed}


def _check_memory(contract: OpContract, args: tuple[Any, ...]) -> None:
    """Refuse arguments that this machine's memory does not hold: the system would end some process
    for them, and not always this one."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    # The arguments, about as much again for results, and two indices into the example at a time.
    needed = 2 * sum(t.numel() * t.element_size() for t in tensors)
    needed += 2 * 8 * max((t.numel() for t in tensors), default=0)
    free = _free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{contract.name}: arguments of these sizes need about {needed / 1e9:.3g} GB of "
            f"memory, and {free / 1e9:.3g} GB are free; give smaller sizes"
        )


def _free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say it so."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _sized(
    contract: OpContract,
    example: Mapping[str, Any],
    values: Mapping[str, Any],
    dtype: torch.dtype,
    tokens: int | None,
    hidden: int | None,
) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that have one of the axes."""
    axes = bind_axes(contract.arrays, example, dtype=dtype)
    changed: dict[str, Any] = {n: v for n, v in values.items() if isinstance(v, int)}
    for what, size, names in (("tokens", tokens, TOKENS), ("hidden", hidden, HIDDEN)):
        if size is None:
            continue
        found = [name for name in names if name in axes]
        if not found:
            raise ValueError(f"{contract.name} has no axis for {what}; give a --shape instead")
        changed |= {name: (size,) if name == "..." else size for name in found}
    if tokens is None and hidden is None:
        return {}
    shapes = {}
    for name, spec in contract.arrays.items():
        value = example[name]
        if isinstance(value, torch.Tensor):
            before = [tuple(shape) for shape in _shapes(spec, axes)]
            after = [tuple(shape) for shape in _shapes(spec, {**axes, **changed})]
            form = before.index(tuple(value.shape))
            if before[form] != after[form]:
                shapes[name] = after[form]
    return shapes


def _shapes(spec: str, axes: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shape of each alternative; one that has an axis which nothing tells is no shape."""
    shapes = []
    for part in spec.removesuffix("?").strip("()").split(" or "):
        try:
            shapes.append(tuple(shape_of(part, axes)[0]))
        except KeyError:
            shapes.append((-1,))
    return shapes


def _filled(wanted: torch.Tensor, example: torch.Tensor | None) -> torch.Tensor:
    """A tensor of the wanted shape and dtype with the example's values, again and again."""
    if example is None or not example.numel():
        return torch.zeros(wanted.shape, dtype=wanted.dtype)
    source = example.contiguous().flatten()
    if source.element_size() == 1:  # FP8 has no indexing on the CPU
        source = source.view(torch.uint8)
    values = source[torch.arange(wanted.numel()) % source.numel()]
    return values.view(example.dtype).view(wanted.shape)
