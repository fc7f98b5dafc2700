# SPDX-License-Identifier: Apache-2.0
"""How far a result is from the exact one, in units in the last place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.contract import OpContract

__all__ = [
    "Difference",
    "differences",
    "error_in_ulps",
    "exact_outputs",
    "outputs_of",
    "worst_errors",
]


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst element of an output.

    Attributes:
        ulps: its distance from the exact result; 0 where nothing differs.
        text: which element it is, what was found and what is exact.
    """

    ulps: float
    text: str = ""


def outputs_of(result: Any) -> tuple[torch.Tensor | None, ...]:
    """The outputs of an op as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def exact_outputs(contract: OpContract, args: tuple[Any, ...]) -> tuple[torch.Tensor | None, ...]:
    """What the op gives before any rounding."""
    exact = contract.exact or contract.reference
    return outputs_of(exact(*map(_in_double, args)))


def worst_errors(contract: OpContract, result: Any, args: tuple[Any, ...]) -> tuple[float, ...]:
    """For each output the worst element's distance from the exact result, in ulps.

    NaN and infinities must be where they are in the exact result, shapes must be equal, and
    integers are compared as such; otherwise the distance is infinite.

    Args:
        args: the arguments as they were before the call.
    """
    return tuple(difference.ulps for difference in differences(contract, result, args))


def error_in_ulps(contract: OpContract, result: Any, args: tuple[Any, ...]) -> float:
    """The worst of `worst_errors`."""
    return max(worst_errors(contract, result, args))


def differences(contract: OpContract, result: Any, args: tuple[Any, ...]) -> tuple[Difference, ...]:
    """As `worst_errors`, each with the element that it is of."""
    found = outputs_of(result)
    exact = exact_outputs(contract, args)
    if contract.canonical is not None:
        found, exact = contract.canonical(found, args), contract.canonical(exact, args)
    if len(found) != len(exact):
        text = f"{len(found)} outputs instead of {len(exact)}"
        return (Difference(math.inf, text),) * max(len(found), len(exact), 1)
    magnitudes: tuple[torch.Tensor | None, ...] = (None,) * len(exact)
    if contract.magnitude is not None:
        magnitudes = contract.magnitude(*map(_in_double, args))
    return tuple(map(_worst, found, exact, magnitudes))


def _worst(
    found: torch.Tensor | None, exact: torch.Tensor | None, magnitude: torch.Tensor | None
) -> Difference:
    if found is None or exact is None:
        # A torch op cannot return None: there an output that is not there has no elements.
        missing = all(t is None or t.numel() == 0 for t in (found, exact))
        return Difference(0.0) if missing else Difference(math.inf, "one of the two is None")
    if found.shape != exact.shape:
        return Difference(math.inf, f"shape {list(found.shape)} instead of {list(exact.shape)}")
    if exact.numel() == 0:
        return Difference(0.0)
    exact = exact.to(found.device)
    if not found.dtype.is_floating_point:
        errors = (found.double() - exact.double()).abs()
    else:
        size = exact.abs() if magnitude is None else torch.maximum(exact.abs(), magnitude.to(exact))
        errors = _distances(found, exact.double(), size.double())
    errors = errors.nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(errors.argmax())
    ulps = float(errors.reshape(-1)[at])
    where = [int(i) for i in torch.unravel_index(torch.tensor(at), exact.shape)]
    values = (float(t.reshape(-1)[at]) for t in (found.double(), exact.double()))
    return Difference(ulps, "at {} found {!r}, exact {!r}".format(where, *values))


def _distances(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(found.dtype)
    # What is beyond the dtype's range is infinite in it, and what is below is subnormal.
    rounded = exact.to(found.dtype).double()
    values = found.double()
    exponent = size.clamp(min=info.tiny).log2().floor()
    ulp = torch.exp2(exponent) * info.eps
    errors = (values - exact).abs() / ulp
    special = ~(values.isfinite() & rounded.isfinite())
    alike = (values == rounded) | (values.isnan() & rounded.isnan())
    infinite = torch.full_like(errors, math.inf)
    return errors.where(~special, infinite.where(~alike, torch.zeros_like(errors)))


def _in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value
