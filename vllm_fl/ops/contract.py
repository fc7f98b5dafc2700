# SPDX-License-Identifier: Apache-2.0
"""OpContract: everything an op means, in one declarative record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..dispatch.types import OpSignature

__all__ = ["Case", "OpContract", "Tolerance", "error_in_ulps", "half_and_single"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right implementation may be from the exact result.

    An element passes if ``|found - exact| <= ulps * ulp(magnitude)``, where ulp is that of the
    output's dtype and magnitude the larger of ``|exact|`` and what the contract's `magnitude`
    says of the terms that were added up (a difference of large terms is not exact to its own
    size).

    Attributes:
        ulps: units in the last place.
        why: where the number comes from.
    """

    ulps: float
    why: str


def half_and_single(*, half: float, single: float, why: str) -> dict[torch.dtype, Tolerance]:
    """One tolerance for bfloat16 and float16, one for float32."""
    return {
        torch.bfloat16: Tolerance(half, why),
        torch.float16: Tolerance(half, why),
        torch.float32: Tolerance(single, why),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One input, by name.

    Attributes:
        name: what is particular about it.
        make: takes dtype and a seeded generator, returns the op's positional arguments.
    """

    name: str
    make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class OpContract:
    """The torch half of an op; its torch-free half is the `signature`.

    Attributes:
        signature: parameters, defaults, facts, what an in-place form writes.
        schema: the functional schema as torch.library takes it, without the name.
        reference: plain PyTorch; functional, any device, any dtype.
        fake: shape and dtype of the outputs; contiguous.
        cases: inputs, the nasty ones among them.
        tolerances: dtype to how far an implementation may be from float64.
        magnitude: for each output the size of the terms behind each element, or None where
            the output's own size is right; takes the arguments in float64.
    """

    signature: OpSignature
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cases: tuple[Case, ...]
    tolerances: Mapping[torch.dtype, Tolerance]
    magnitude: Callable[..., tuple[torch.Tensor | None, ...]] | None = None

    @property
    def name(self) -> str:
        """The op's name."""
        return self.signature.op_name

    @property
    def inplace_schema(self) -> str | None:
        """The schema of the form that writes its arguments, or None if there is none.

        It returns nothing: a schema that returns what it mutates fails opcheck.
        """
        if not self.signature.inplace:
            return None
        arguments = self.schema.partition(" -> ")[0]
        for alias, name in zip("abcdefgh", self.signature.inplace, strict=False):
            for kind in ("Tensor?", "Tensor"):
                if f"{kind} {name}" in arguments:
                    marked = f"Tensor({alias}!){kind.removeprefix('Tensor')} {name}"
                    arguments = arguments.replace(f"{kind} {name}", marked, 1)
                    break
        return f"{arguments} -> ()"


def error_in_ulps(contract: OpContract, result: Any, args: tuple[Any, ...]) -> float:
    """The worst element's distance from the exact result, in units of the contract's tolerance.

    The exact result is the reference in float64. NaN and infinities must be where they are in it;
    otherwise the distance is infinite.
    """
    exact_args = tuple(_in_double(a) for a in args)
    exact = _outputs(contract.reference(*exact_args))
    magnitudes: tuple[torch.Tensor | None, ...] = (None,) * len(exact)
    if contract.magnitude is not None:
        magnitudes = contract.magnitude(*exact_args)
    worst = 0.0
    for found, truth, magnitude in zip(_outputs(result), exact, magnitudes, strict=True):
        if (found is None) != (truth is None) or (
            truth is not None and found is not None and found.shape != truth.shape
        ):
            return float("inf")
        if truth is None or found is None or truth.numel() == 0:
            continue
        size = truth.abs() if magnitude is None else torch.maximum(truth.abs(), magnitude)
        worst = max(worst, _distance(found, truth, size))
    return worst


def _distance(found: torch.Tensor, truth: torch.Tensor, size: torch.Tensor) -> float:
    info = torch.finfo(found.dtype)
    # What is beyond the dtype's range is infinite in it, and what is below is subnormal.
    rounded = truth.to(found.dtype)
    finite = rounded.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    special = ~finite
    if not torch.equal(found[special].nan_to_num(), rounded[special].nan_to_num()):
        return float("inf")
    exponent = size.clamp(min=info.tiny).log2().floor()
    ulp = torch.exp2(exponent) * info.eps
    errors = ((found.double() - truth).abs() / ulp)[finite]
    return float(errors.max()) if errors.numel() else 0.0


def _in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def _outputs(result: Any) -> tuple[torch.Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)
