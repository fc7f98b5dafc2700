# SPDX-License-Identifier: Apache-2.0
"""The cases of the norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .contract import Case
from .inputs import HUGE, rows, with_special

__all__ = ["GATED_CASES", "LAYER_NORM_CASES", "gemma_cases", "rms_cases"]


def _two(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shape: tuple[int, ...],
    count: int,
    special: bool = False,
    **settings: Any,
) -> list[torch.Tensor]:
    """`count` tensors of a shape, the first of them with special values where asked for."""
    found = [rows(shape, dtype, generator, **settings) for _ in range(count)]
    if special:
        with_special(found[0])
    return found


def _weight(size: int, generator: torch.Generator, shift: float = 0.5) -> torch.Tensor:
    return torch.rand(size, generator=generator) + shift


def _norm_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    count: int,
    weight_dtype: torch.dtype | None = None,
    weight: bool = True,
    shift: float = 0.5,
    after: tuple[Any, ...] = (),
    **settings: Any,
) -> tuple[Any, ...]:
    """x, a residual where count is 2, weight, epsilon, and what is given to come after."""
    tensors = _two(dtype, generator, count=count, **settings)
    scales = _weight(settings["shape"][-1], generator, shift).to(weight_dtype or dtype)
    return (*tensors, scales if weight else None, 1e-6, *after)


def _gated_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    gate: bool = True,
    weight_dtype: torch.dtype | None = None,
    after: tuple[Any, ...] = (),
    **settings: Any,
) -> tuple[Any, ...]:
    x, z = _two(dtype, generator, count=2, **settings)
    scales = _weight(settings["shape"][-1], generator).to(weight_dtype or dtype)
    return (x, z if gate else None, scales, 1e-6, *after)


def _layer_norm_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    weight: bool = True,
    bias: bool = True,
    weight_dtype: torch.dtype | None = None,
    offset: float = 0.0,
    **settings: Any,
) -> tuple[Any, ...]:
    (x,) = _two(dtype, generator, count=1, **settings)
    x += offset
    size = settings["shape"][-1]
    scales = _weight(size, generator).to(weight_dtype or dtype)
    shifts = torch.randn(size, generator=generator).to(weight_dtype or dtype)
    return x, scales if weight else None, shifts if bias else None, 1e-5


def _cases(
    make: Callable[..., tuple[Any, ...]], more: dict[str, dict[str, Any]]
) -> tuple[Case, ...]:
    variants: dict[str, dict[str, Any]] = {
        "one token": {"shape": (1, 64)},
        "zero tokens": {"shape": (0, 64)},
        "odd size": {"shape": (7, 45)},
        "prime size": {"shape": (5, 61)},
        "1-D": {"shape": (64,)},
        "3-D, heads": {"shape": (3, 5, 64)},
        "4-D": {"shape": (2, 3, 4, 64)},
        "hidden 576": {"shape": (9, 576)},
        "wide": {"shape": (2, 4096)},
        "tiny values": {"shape": (3, 64), "scale": 1e-3},
        "huge values": {"shape": (3, 64), **HUGE},
        "slice of wider rows": {"shape": (5, 64), "pad": 32},
        "permuted": {"shape": (3, 5, 64), "layout": "permuted"},
        "transposed": {"shape": (6, 64), "layout": "transposed"},
        "inf and nan": {"shape": (4, 64), "special": True},
        **more,
    }
    return tuple(Case(name, partial(make, **settings)) for name, settings in variants.items())


def rms_cases(count: int) -> tuple[Case, ...]:
    """Of rms_norm, or with count 2 of the op that takes a residual too."""
    more: dict[str, dict[str, Any]] = {
        "no weight": {"shape": (5, 64), "weight": False},
        "float32 weight": {"shape": (5, 64), "weight_dtype": torch.float32},
        "variance of a part": {"shape": (5, 64), "after": (32,)},
    }
    return _cases(partial(_norm_inputs, count=count), more)


def gemma_cases(count: int) -> tuple[Case, ...]:
    """Of gemma_rms_norm, or with count 2 of the op that takes a residual too."""
    # Gemma's weights lie around 0, and 1 is added to them.
    more = {"float32 weight": {"shape": (5, 64), "weight_dtype": torch.float32}}
    return _cases(partial(_norm_inputs, count=count, shift=-0.5), more)


GATED_CASES = _cases(
    _gated_inputs,
    {
        "no gate": {"shape": (5, 64), "gate": False},
        "groups": {"shape": (5, 64), "after": (16,)},
        "norm before gate": {"shape": (5, 64), "after": (None, True)},
        "norm before gate, groups, sigmoid": {"shape": (5, 64), "after": (16, True, "sigmoid")},
        "gate before norm, sigmoid": {"shape": (5, 64), "after": (None, False, "sigmoid")},
        "float32 weight": {"shape": (5, 64), "weight_dtype": torch.float32},
    },
)

LAYER_NORM_CASES = _cases(
    _layer_norm_inputs,
    {
        "no weight": {"shape": (5, 64), "weight": False, "bias": False},
        "no bias": {"shape": (5, 64), "bias": False},
        "float32 weight": {"shape": (5, 64), "weight_dtype": torch.float32},
        "far from zero": {"shape": (5, 64), "offset": 100.0},
    },
)
