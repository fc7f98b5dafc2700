# SPDX-License-Identifier: Apache-2.0
"""Arguments without data, built from an op's contract, so that its guards can be asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch.errors import did_you_mean
from .arrays import ArraySpec, bind_axes, holds, shape_of
from .contract import OpContract
from .scalars import read_scalar

__all__ = ["FakeCall", "dtype_of", "fake_call"]


_MOST_BYTES = (1 << 63) - 1
"""Of a tensor: PyTorch counts them in 64 bits."""


@dataclass(frozen=True, slots=True)
class FakeCall:
    """The arguments of a call that is only asked about.

    Attributes:
        args: the op's positional arguments; tensors hold no data.
        given: argument to its text, for those that were asked for.
        assumed: argument to its text, for those that were not.
        on_device: whether the tensors are of the device's type; otherwise they are the CPU's,
            because this PyTorch does not know the type, and call guards cannot be asked.
    """

    args: tuple[Any, ...]
    given: dict[str, str]
    assumed: dict[str, str]
    on_device: bool


def dtype_of(contract: OpContract, name: str) -> torch.dtype:
    """The dtype of that name, if the op is for it.

    Raises:
        ValueError: names the op's dtypes.
    """
    valid = {str(dtype).removeprefix("torch."): dtype for dtype in contract.tolerances}
    if name not in valid:
        raise ValueError(
            f"unknown dtype '{name}' for {contract.name}; valid: {', '.join(valid)}."
            f"{did_you_mean(name, valid)}"
        )
    return valid[name]


def fake_call(
    contract: OpContract,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    dtype: torch.dtype | None,
    device_type: str,
) -> FakeCall:
    """Build a call of the op.

    What is not given is taken from the first input of the contract, with its sizes made to fit
    those that are given.

    Args:
        shapes: array argument to its shape; "" stands for the argument that is under test, the
            first one whose dtype is T.
        values: scalar argument to its value.
        dtype: what T stands for; None takes the contract's first.

    Raises:
        ValueError: a name, shape or value does not fit the op.
    """
    dtype = next(iter(contract.tolerances)) if dtype is None else dtype
    example = _example(contract, dtype)
    main = _main_array(contract)
    shapes = {name or main: shape for name, shape in shapes.items()}
    scalars = [name for name in example if name not in contract.arrays]
    _check_names(contract, shapes, tuple(contract.arrays), "array")
    _check_names(contract, values, scalars, "scalar argument")
    values = {name: read_scalar(contract, name, value) for name, value in values.items()}
    arguments = {**example, **values}
    axes = _axes(contract, shapes, arguments, dtype)
    form = _form_of(contract.arrays[main], shapes.get(main), axes)
    sized = {}
    for name, spec in contract.arrays.items():
        if name in shapes:
            sized[name] = shapes[name]
        elif isinstance(example[name], torch.Tensor):
            sized[name] = _sized_like(spec, example[name], axes, form)
            _check_shape(contract, name, sized[name], example[name].dtype)
    for constraint in contract.constraints:
        if not holds(constraint, {**arguments, **axes}):
            raise ValueError(
                f"{contract.name} needs {constraint}; with these arguments it does not hold"
            )
    on_device, made = _tensors(sized, arguments, dtype, device_type)
    arguments |= made
    said = {name: _text(value) for name, value in arguments.items()}
    given = {*shapes, *values}
    return FakeCall(
        args=tuple(arguments[name] for name in contract.signature.parameter_names),
        given={name: text for name, text in said.items() if name in given},
        assumed={name: text for name, text in said.items() if name not in given},
        on_device=on_device,
    )


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def _example(contract: OpContract, dtype: torch.dtype) -> dict[str, Any]:
    """Every argument's value in the contract's first input."""
    args = contract.cases_for(dtype)[0].make(dtype, torch.Generator().manual_seed(0))
    parameters = contract.signature.parameters
    defaults = {p.name: p.default for p in parameters[len(args) :]}
    return dict(zip(contract.signature.parameter_names, args, strict=False)) | defaults


def _main_array(contract: OpContract) -> str:
    under_test = [name for name, spec in contract.arrays.items() if "T[" in spec]
    return next(iter(under_test or contract.arrays))


def _check_names(
    contract: OpContract, names: Iterable[str], valid: Iterable[str], what: str
) -> None:
    valid = list(valid)
    for name in names:
        if name not in valid:
            raise ValueError(
                f"{contract.name} has no {what} '{name}'; valid: {', '.join(valid) or 'none'}."
                f"{did_you_mean(name, valid)}"
            )


def _check_shape(contract: OpContract, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse a shape that no tensor has, before PyTorch does it in words of its own."""
    size = dtype.itemsize
    for length in shape:
        size *= max(length, 1)  # also where the tensor would be empty, as PyTorch does
        if length < 0 or size > _MOST_BYTES:
            found = ", ".join(str(n) if abs(n) < 10**30 else "..." for n in shape)
            raise ValueError(
                f"{contract.name}: {name} must have sizes from 0 up, and at most 2**63-1 bytes in "
                f"all; with these arguments it would be [{found}]. Give other sizes"
            )


def _axes(
    contract: OpContract,
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Axis to size: what the given shapes say, and for the rest what the example has."""
    scalars = {n: v for n, v in arguments.items() if n not in contract.arrays}
    known: dict[str, Any] = {}
    for name, shape in shapes.items():
        example = arguments[name]
        own = example.dtype if isinstance(example, torch.Tensor) else dtype
        _check_shape(contract, name, shape, own)
        value = torch.empty(shape, dtype=own, device="meta")
        try:
            known = bind_axes(
                {name: contract.arrays[name]}, {**scalars, name: value}, dtype=dtype, known=known
            )
        except ValueError as error:
            raise ValueError(f"{contract.name}: {error}") from None
    try:
        assumed = bind_axes(contract.arrays, arguments, dtype=dtype)
    except ValueError:  # a scalar that was given does not fit the example's sizes
        assumed = bind_axes(contract.arrays, _example(contract, dtype), dtype=dtype)
    return {**assumed, **known, **{n: v for n, v in scalars.items() if isinstance(v, int)}}


def _alternatives(spec: ArraySpec, axes: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
    """The shape of each alternative of a spec; None where it has an axis that nothing tells."""
    shapes: list[tuple[int, ...] | None] = []
    for part in spec.removesuffix("?").strip("()").split(" or "):
        try:
            shapes.append(tuple(shape_of(part, axes)[0]))
        except KeyError:
            shapes.append(None)
    return shapes


def _form_of(
    spec: ArraySpec, shape: tuple[int, ...] | None, axes: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Which of how many alternatives a given shape has; None where none is given."""
    alternatives = _alternatives(spec, axes)
    return None if shape not in alternatives else (alternatives.index(shape), len(alternatives))


def _sized_like(
    spec: ArraySpec, example: torch.Tensor, axes: Mapping[str, Any], form: tuple[int, int] | None
) -> tuple[int, ...]:
    """The shape of an array that was not given: in the form of the one under test where it has
    the same alternatives, else with as many dimensions as the example has."""
    alternatives = _alternatives(spec, axes)
    if form is not None and form[1] == len(alternatives):
        fitting = [alternatives[form[0]]]
    else:
        fitting = [s for s in alternatives if s is not None and len(s) == example.ndim]
        fitting += alternatives if "..." in spec else []
    return next((shape for shape in fitting if shape is not None), tuple(example.shape))


def _tensors(
    sized: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, Any],
    dtype: torch.dtype,
    device_type: str,
) -> tuple[bool, dict[str, torch.Tensor]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def make(device: str) -> dict[str, torch.Tensor]:
        made = {}
        for name, shape in sized.items():
            example = arguments[name]
            own = example.dtype if isinstance(example, torch.Tensor) else dtype
            made[name] = torch.empty(shape, dtype=own, device=device)
        return made

    with FakeTensorMode():
        try:
            return True, make(device_type)
        except Exception:  # a type of which this PyTorch knows no more than the name, or nothing
            return False, make("cpu")
