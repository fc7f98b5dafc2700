# SPDX-License-Identifier: Apache-2.0
"""The cases of an op: those of its contract, and its tensors laid out in other ways."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ops.contract import Case, OpContract

__all__ = [
    "COMPILE",
    "NotApplicable",
    "arguments_of",
    "cases_of",
    "dtype_name",
    "dtype_of",
    "named_arguments",
]

COMPILE = "torch.compile"
"""The case that compiles the torch op; made from the contract's first case that fits."""

_LARGEST = 2**18
"""Elements of a tensor that a case of another layout may have: the layout is the point."""


class NotApplicable(Exception):
    """The op has no input that a case could be made of; the text says why."""


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, without the module."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def cases_of(contract: OpContract, dtype: torch.dtype) -> dict[str, Case]:
    """All cases of an op for a dtype, by name, that of torch.compile aside.

    Raises:
        ValueError: the contract has two cases of one name.
    """
    cases: dict[str, Case] = {}
    for case in (*contract.cases_for(dtype), *_layouts(contract)):
        if case.name in cases:
            raise ValueError(f"the contract of {contract.name} has two cases '{case.name}'")
        cases[case.name] = case
    return cases


def arguments_of(contract: OpContract, case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a case, on the CPU, the same each time.

    Raises:
        NotApplicable: there is no input of that kind.
    """
    # A case run alone gets the numbers that it gets among the others.
    seed = zlib.crc32(f"{contract.name} {dtype_name(dtype)} {case.name}".encode())
    return case.make(dtype, torch.Generator().manual_seed(seed))


def named_arguments(contract: OpContract, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by parameter name, defaults included."""
    parameters = contract.signature.parameters
    values = {p.name: p.default for p in parameters[len(args) :]}
    return {**{p.name: v for p, v in zip(parameters, args, strict=False)}, **values}


def base_case(
    contract: OpContract,
    dtype: torch.dtype,
    fits: Callable[[tuple[Any, ...]], bool],
) -> tuple[Any, ...]:
    """The arguments of the contract's first case that fits.

    Raises:
        NotApplicable: none fits.
    """
    for case in contract.cases_for(dtype):
        args = arguments_of(contract, case, dtype)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if all(0 < t.numel() <= _LARGEST for t in tensors) and fits(args):
            return args
    raise NotApplicable("no case of the contract has arguments to make it of")


def _layouts(contract: OpContract) -> tuple[Case, ...]:
    """The first fitting case of the contract again, its matrices and larger tensors of the dtype
    under test laid out in ways that a caller may have."""
    names = contract.signature.parameter_names
    movable = tuple(i for i, name in enumerate(names) if "T" in _dtypes_of(contract, name))
    if not movable:
        return ()
    return tuple(
        Case(name, partial(_laid_out, contract, movable, lay_out))
        for name, lay_out in (
            ("layout: rows of a wider tensor", _in_wider_rows),
            ("layout: permuted", _permuted),
            ("layout: odd address", _at_odd_address),
        )
    )


def _dtypes_of(contract: OpContract, name: str) -> set[str]:
    """The dtype words of an array's spec."""
    spec = contract.arrays.get(name, "").strip("()?")
    return {word for form in spec.split(" or ") for word in form.partition("[")[0].split("|")}


def _laid_out(
    contract: OpContract,
    movable: tuple[int, ...],
    lay_out: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Any, ...]:
    def matters(value: Any) -> bool:
        large = isinstance(value, torch.Tensor) and value.dim() >= 2
        return bool(large and min(value.shape[0], value.shape[-1]) > 1)

    def candidates(args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [args[i] for i in movable if i < len(args) and matters(args[i])]

    def welcome(args: tuple[Any, ...]) -> bool:
        """Of a size that no guard need refuse, because the layout is the point."""
        found = candidates(args)
        return bool(found) and all(t.is_contiguous() and t.shape[-1] % 16 == 0 for t in found)

    try:
        args = base_case(contract, dtype, welcome)
    except NotApplicable:
        args = base_case(contract, dtype, lambda args: bool(candidates(args)))
    return tuple(lay_out(a) if i in movable and matters(a) else a for i, a in enumerate(args))


def _in_wider_rows(x: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 32, dtype=x.dtype)
    return wide[..., : x.shape[-1]].copy_(x)


def _permuted(x: torch.Tensor) -> torch.Tensor:
    """The first two dimensions stored in the other order: of a matrix, its columns."""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def _at_odd_address(x: torch.Tensor) -> torch.Tensor:
    moved = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)
