# SPDX-License-Identifier: Apache-2.0
"""What the cases of several families are made of."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = [
    "HUGE",
    "MAX_POSITION",
    "SPECIAL",
    "WIDE_RANGE",
    "cos_sin_cache",
    "rows",
    "with_special",
]

WIDE_RANGE = (torch.float32, torch.bfloat16)
"""The dtypes that hold products of values around 1e4; float16 ends at 65504."""

HUGE: dict[str, Any] = {"scale": 1e4, "beyond": 200.0}
"""Settings of `rows`. A sigmoid of -10 to -17 in float16, or of -87 to -104 in float32, is below
the normal numbers or 0, by rounding as by overflow of an exponential, and no bound in ulps holds:
beyond 200 it is 0 for all."""

SPECIAL = (math.inf, -math.inf, math.nan)

MAX_POSITION = 50
"""How many positions a rotary embedding's cache has."""


def cos_sin_cache(rotary_dim: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Cosines, then sines, of random angles: (MAX_POSITION, rotary_dim)."""
    angles = 6.3 * torch.rand(MAX_POSITION, rotary_dim // 2, generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    beyond: float = 0.0,
    pad: int = 0,
    layout: str = "",
) -> torch.Tensor:
    """Normally distributed values.

    Args:
        scale: their standard deviation.
        beyond: each value is that much farther from 0.
        pad: the rows are slices of rows that are longer by this many elements.
        layout: "permuted": the first two of three or more dimensions are swapped in memory;
            "transposed": the last two of two or more are, so that no row is contiguous.
    """
    wanted = [*shape[:-1], shape[-1] + pad]
    swapped = {"": None, "permuted": (0, 1), "transposed": (-1, -2)}[layout]
    if swapped is not None:
        first, second = swapped
        wanted[first], wanted[second] = wanted[second], wanted[first]
    x = scale * torch.randn(wanted, generator=generator)
    x = (x + beyond * x.sign()).to(dtype)
    if swapped is not None:
        x = x.transpose(*swapped)
    return x[..., : shape[-1]]


def with_special(x: torch.Tensor, values: tuple[float, ...] = SPECIAL) -> torch.Tensor:
    """The same tensor, with one of the values in each of its first rows, at a column of its own.

    Args:
        x: (at least as many rows as values, and columns); it is written.
    """
    for index, value in enumerate(values):
        x[index, 3 * index % x.shape[-1]] = value
    return x
