# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of arguments in a notation that people read and tests check.

    T[..., 2*d]           any leading dimensions, then an even one; the dtype under test
    int32|int64[tokens]   either dtype
    T[tokens, heads*head_size] or T[tokens, heads, head_size]
    float32[hidden]?      may be None; around alternatives, (a or b)?

A dimension is an axis, an integer, a scalar argument, or a product of these, in which at most
one axis is not known from another argument. "..." stands for the same leading dimensions in all
arrays of an op.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ArraySpec", "bind_axes", "holds"]

_FORM = re.compile(r"^(?P<dtype>[\w|]+)\[(?P<dims>[^\]]*)\]$")
_GROUPS = {
    "float": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "fp8": (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    "index": (torch.int32, torch.int64),
}

ArraySpec = str
"""The notation above."""


@dataclass(frozen=True, slots=True)
class _Form:
    dtypes: tuple[str, ...]
    dims: tuple[str, ...]


def _forms(spec: ArraySpec) -> tuple[list[_Form], bool]:
    """The alternatives of a spec, and whether it may be None."""
    optional = spec.endswith("?")
    forms = []
    for part in spec.removesuffix("?").strip("()").split(" or "):
        match = _FORM.match(part.strip())
        if match is None:
            raise ValueError(f"cannot read the array {part.strip()!r}; write dtype[axis, axis]")
        dims = tuple(d.strip() for d in match["dims"].split(",") if d.strip())
        forms.append(_Form(tuple(match["dtype"].split("|")), dims))
    return forms, optional


def bind_axes(
    arrays: Mapping[str, ArraySpec],
    values: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The size of every axis in a call.

    Args:
        arrays: argument to its spec.
        values: argument to its value, scalars among them.
        dtype: what T stands for; None leaves T's dtype unchecked.
        known: axes that are known already.

    Returns: axis to size, with "..." as a tuple, and the integer arguments.

    Raises:
        ValueError: an argument does not fit, with the argument, what was expected and what was
            found.
    """
    scalars = {k: v for k, v in values.items() if isinstance(v, int) and k not in arrays}
    axes: dict[str, Any] = {**scalars, **(known or {})}
    for name, spec in arrays.items():
        value = values.get(name)
        forms, optional = _forms(spec)
        if value is None:
            if not optional:
                raise ValueError(f"{name} must be {spec}, found None")
            continue
        complaints = []
        for form in forms:
            found = _fit(form, value, axes, dtype)
            if isinstance(found, dict):
                axes = found
                break
            complaints.append(found)
        else:
            shown = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise ValueError(f"{name} must be {spec}, found {shown}: {'; '.join(complaints)}")
    return axes


def holds(constraint: str, axes: Mapping[str, Any]) -> bool:
    """Whether a constraint is true of the axes; one that names an unknown axis is not asked, and
    one that divides by a zero among them is not."""
    try:
        return bool(eval(constraint, {"__builtins__": {}}, dict(axes)))  # our own text
    except NameError:
        return True
    except ZeroDivisionError:
        return False


def _fit(
    form: _Form, value: torch.Tensor, axes: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Any] | str:
    wanted: list[torch.dtype] = []
    for name in form.dtypes:
        if name == "T":
            wanted += [value.dtype if dtype is None else dtype]
        elif name in _GROUPS:
            wanted += _GROUPS[name]
        else:
            wanted += [getattr(torch, name)]
    if value.dtype not in wanted:
        return f"dtype {value.dtype}"
    axes = dict(axes)
    dims, shape = list(form.dims), list(value.shape)
    if "..." in dims:
        before = dims.index("...")
        after = len(dims) - before - 1
        if len(shape) < before + after:
            return f"{len(shape)} dimensions"
        leading = tuple(shape[before : len(shape) - after])
        if axes.setdefault("...", leading) != leading:
            return f"leading dimensions {list(leading)}, elsewhere {list(axes['...'])}"
        dims = dims[:before] + dims[before + 1 :]
        shape = shape[:before] + shape[len(shape) - after :]
    if len(dims) != len(shape):
        return f"{len(shape)} dimensions"
    for dim, size in zip(dims, shape, strict=True):
        complaint = _solve(dim, size, axes)
        if complaint:
            return complaint
    return axes


def _solve(dim: str, size: int, axes: dict[str, Any]) -> str | None:
    """Learn the one unknown axis of a dimension, or check it."""
    factor, unknown = 1, []
    for part in (p.strip() for p in dim.split("*")):
        if part.isdigit():
            factor *= int(part)
        elif part in axes:
            factor *= axes[part]
        else:
            unknown.append(part)
    if not unknown:
        return None if factor == size else f"{dim} is {factor}, not {size}"
    if len(unknown) > 1:
        return f"{' and '.join(unknown)} are both unknown in {dim}"
    if factor == 0 or size % factor:
        return f"{size} is not a multiple of {factor} ({dim})"
    axes[unknown[0]] = size // factor
    return None


def shape_of(spec: ArraySpec, axes: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    """The shapes that a spec allows for known axes, one for each alternative."""
    shapes = []
    for form in _forms(spec)[0]:
        sizes: list[int] = []
        for dim in form.dims:
            if dim == "...":
                sizes += axes["..."]
                continue
            size = 1
            for part in (p.strip() for p in dim.split("*")):
                size *= int(part) if part.isdigit() else axes[part]
            sizes.append(size)
        shapes.append(tuple(sizes))
    return shapes
