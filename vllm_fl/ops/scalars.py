# SPDX-License-Identifier: Apache-2.0
"""Values of scalar arguments, held to the types of an op's schema before anything computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from .contract import OpContract

__all__ = ["read_scalar", "scalar_types"]

_ARGUMENT = re.compile(r"([\w\[\]]+\??)\s+(\w+)")
_INT64 = range(-(1 << 63), 1 << 63)


def scalar_types(contract: OpContract) -> dict[str, str]:
    """Scalar argument to its type as the schema has it, e.g. "SymInt?"."""
    arguments = contract.schema.rpartition(" -> ")[0]
    found = {name: kind for kind, name in _ARGUMENT.findall(arguments)}
    return {name: kind for name, kind in found.items() if name not in contract.arrays}


def read_scalar(contract: OpContract, name: str, value: Any) -> Any:
    """The value as the op takes it: an integer for a float becomes one, a dtype's name the dtype.

    Raises:
        ValueError: it is of another type, with what was expected and what was found.
    """
    kind = scalar_types(contract)[name]
    if value is None and kind.endswith("?"):
        return None
    read, wanted = _READERS[kind.removesuffix("?")]
    try:
        return read(value)
    except (TypeError, OverflowError):
        optional = ", or None" if kind.endswith("?") else ""
        raise ValueError(
            f"{contract.name}: {name} must be {wanted}{optional}, found {_short(value)} of type "
            f"{type(value).__name__}; the op is {contract.signature}"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    if value not in _INT64:
        raise OverflowError
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _ints(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return [_int(item) for item in value]


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None) if type(value) is str else value
    if not isinstance(found, torch.dtype):
        raise TypeError
    return found


_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "SymInt": (_int, "a whole number of 64 bits"),
    "int": (_int, "a whole number of 64 bits"),
    "float": (_float, "a number"),
    "bool": (_bool, "True or False"),
    "str": (_str, "a word"),
    "int[]": (_ints, "a list of whole numbers such as [128,128]"),
    "SymInt[]": (_ints, "a list of whole numbers such as [128,128]"),
    "ScalarType": (_dtype, "a dtype's name such as bfloat16"),
}
"""Type in a schema to what reads a value of it, and what that is for people."""
