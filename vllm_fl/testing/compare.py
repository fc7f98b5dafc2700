# SPDX-License-Identifier: Apache-2.0
"""How far a result is from the exact one, in units in the last place."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops.contract import OpContract

__all__ = ["error_in_ulps", "exact_outputs", "outputs_of", "worst_errors"]


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
    found = outputs_of(result)
    exact = exact_outputs(contract, args)
    if contract.canonical is not None:
        found, exact = contract.canonical(found, args), contract.canonical(exact, args)
    if len(found) != len(exact):
        return (math.inf,) * max(len(found), len(exact), 1)
    magnitudes: tuple[torch.Tensor | None, ...] = (None,) * len(exact)
    if contract.magnitude is not None:
        magnitudes = contract.magnitude(*map(_in_double, args))
    return tuple(map(_worst, found, exact, magnitudes))


def error_in_ulps(contract: OpContract, result: Any, args: tuple[Any, ...]) -> float:
    """The worst of `worst_errors`."""
    return max(worst_errors(contract, result, args))


def _worst(
    found: torch.Tensor | None, exact: torch.Tensor | None, magnitude: torch.Tensor | None
) -> float:
    if found is None or exact is None:
        # A torch op cannot return None: there an output that is not there has no elements.
        missing = all(t is None or t.numel() == 0 for t in (found, exact))
        return 0.0 if missing else math.inf
    if found.shape != exact.shape:
        return math.inf
    if exact.numel() == 0:
        return 0.0
    exact = exact.to(found.device)
    if not found.dtype.is_floating_point:
        return float((found.double() - exact.double()).abs().max())
    size = exact.abs() if magnitude is None else torch.maximum(exact.abs(), magnitude.to(exact))
    return _distance(found, exact.double(), size.double())


def _distance(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    info = torch.finfo(found.dtype)
    # What is beyond the dtype's range is infinite in it, and what is below is subnormal.
    rounded = exact.to(found.dtype).double()
    values = found.double()
    finite = rounded.isfinite()
    if not torch.equal(values.isfinite(), finite):
        return math.inf
    special = ~finite
    if not torch.equal(values[special].nan_to_num(), rounded[special].nan_to_num()):
        return math.inf
    exponent = size.clamp(min=info.tiny).log2().floor()
    ulp = torch.exp2(exponent) * info.eps
    errors = ((values - exact).abs() / ulp)[finite]
    return float(errors.max()) if errors.numel() else 0.0


def _in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value
