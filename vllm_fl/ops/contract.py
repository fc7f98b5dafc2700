# SPDX-License-Identifier: Apache-2.0
"""OpContract: everything an op means, in one declarative record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .arrays import ArraySpec

__all__ = [
    "NEEDED_CASES",
    "CallSite",
    "Case",
    "OpContract",
    "Tolerance",
    "exactly",
    "half_and_single",
]

NEEDED_CASES: Mapping[str, tuple[str, ...]] = {
    "zero tokens": ("zero tokens",),
    "one token": ("one token",),
    "odd and prime sizes": ("odd", "prime"),
    "leading shapes": ("1-D", "3-D", "4-D"),
    "slices": ("slice",),
    "permuted": ("permuted",),
    "tiny values": ("tiny values",),
    "huge values": ("huge values",),
    "inf and nan": ("inf", "nan"),
}
"""What a contract's cases must be about, and the words that must stand in their names. Tiny is
about 1e-3, huge 1e4. A contract to which one of them cannot apply says why in `without`."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right implementation may be from the exact result.

    An element passes if ``|found - exact| <= ulps * ulp(magnitude)``, where ulp is that of the
    output's dtype (1 for integers) and magnitude the larger of ``|exact|`` and what the
    contract's `magnitude` says of the terms that were added up (a difference of large terms is
    not exact to its own size).

    Attributes:
        ulps: units in the last place; one number, or one for each output.
        why: where the number comes from.
    """

    ulps: float | tuple[float, ...]
    why: str

    def for_output(self, index: int) -> float:
        """The limit of the output at `index`."""
        return self.ulps[index] if isinstance(self.ulps, tuple) else self.ulps


def half_and_single(
    *, half: float | tuple[float, ...], single: float | tuple[float, ...], why: str
) -> dict[torch.dtype, Tolerance]:
    """One tolerance for bfloat16 and float16, one for float32."""
    return {
        torch.bfloat16: Tolerance(half, why),
        torch.float16: Tolerance(half, why),
        torch.float32: Tolerance(single, why),
    }


def exactly(*dtypes: torch.dtype, why: str) -> dict[torch.dtype, Tolerance]:
    """No difference at all, in each of the dtypes."""
    return {dtype: Tolerance(0, why) for dtype in dtypes}


@dataclass(frozen=True, slots=True)
class Case:
    """One input, by name.

    Attributes:
        name: what is particular about it.
        make: takes dtype and a seeded generator, returns the op's positional arguments. The
            tensors are made on the CPU; who needs them elsewhere moves them.
        dtypes: those that the case is for; None for all of the contract's.
    """

    name: str
    make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where vLLM calls for the op.

    Attributes:
        where: "module:Class" or "module:function" of vLLM.
        hook: how the op gets there, e.g. "the layer's forward".
        device_types: those on which vLLM comes this way; None for any.
        note: what else there is to know, e.g. the releases that have it.
    """

    where: str
    hook: str
    device_types: tuple[str, ...] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContract:
    """The torch half of an op; its torch-free half is the `signature`.

    From it are derived: the check of registrations, `torch.ops.vllm_fl.<op>`, the op's page in
    docs/ops, the inputs of verification and of benchmarks.

    Attributes:
        signature: parameters, defaults, facts, what an in-place form writes.
        schema: the functional schema as torch.library takes it, without the name.
        reference: plain PyTorch; functional, any device, any dtype. An op that has an in-place
            form returns the written arguments' new values, in the order of
            `signature.inplace`.
        fake: shape, dtype and strides of the outputs.
        arrays: tensor arguments by name, each as an ArraySpec such as "T[..., hidden]".
        results: the outputs, in the same notation.
        cases: inputs, the nasty ones among them.
        tolerances: dtype under test (T) to how far an implementation may be from the exact
            result. Its keys are the dtypes that the op is for.
        constraints: expressions over axes and scalar arguments that hold for valid calls.
        exact: what the exact result is, as float64 (or integers): takes the arguments with
            floating-point tensors in float64 and returns the outputs before any rounding to
            their dtype. None: the reference itself, in float64.
        magnitude: for each output the size of the terms behind each element, or None where
            the output's own size is right; takes the arguments in float64.
        canonical: maps (outputs, arguments) to outputs that can be compared element by
            element, where the op leaves an order open (ties, the order within a group).
        without: those of NEEDED_CASES that cannot apply to the op, each with the reason.
        strided: the strides of the outputs depend on more than their shapes, as the fake says;
            False: they are contiguous.
        batched: arguments whose first dimension is the tokens, each of which is computed
            alone; the first dimension of every output is the same. Empty where tokens meet.
        call_sites: where vLLM calls for it; empty: it is there for callers of the library.
        source: where the formula comes from.
    """

    signature: OpSignature
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    arrays: Mapping[str, ArraySpec]
    results: tuple[ArraySpec, ...]
    cases: tuple[Case, ...]
    tolerances: Mapping[torch.dtype, Tolerance]
    constraints: tuple[str, ...] = ()
    exact: Callable[..., Any] | None = None
    magnitude: Callable[..., tuple[torch.Tensor | None, ...]] | None = None
    canonical: Callable[..., tuple[torch.Tensor | None, ...]] | None = None
    without: Mapping[str, str] = field(default_factory=dict)
    strided: bool = False
    batched: tuple[str, ...] = ()
    call_sites: tuple[CallSite, ...] = ()
    source: str = ""

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

    def cases_for(self, dtype: torch.dtype) -> tuple[Case, ...]:
        """The cases that apply to a dtype."""
        return tuple(c for c in self.cases if c.dtypes is None or dtype in c.dtypes)
