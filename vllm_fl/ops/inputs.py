# SPDX-License-Identifier: Apache-2.0
"""What the cases of several families are made of."""

from __future__ import annotations

import math

import torch

__all__ = ["SPECIAL", "WIDE_RANGE", "rows", "with_special"]

WIDE_RANGE = (torch.float32, torch.bfloat16)
"""The dtypes that hold products of values around 1e4; float16 ends at 65504."""

SPECIAL = (math.inf, -math.inf, math.nan)


def rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    pad: int = 0,
    layout: str = "",
) -> torch.Tensor:
    """Normally distributed values.

    Args:
        scale: their standard deviation.
        pad: the rows are slices of rows that are longer by this many elements.
        layout: "permuted": the first two of three or more dimensions are swapped in memory;
            "transposed": the last two of two or more are, so that no row is contiguous.
    """
    wanted = [*shape[:-1], shape[-1] + pad]
    swapped = {"": None, "permuted": (0, 1), "transposed": (-1, -2)}[layout]
    if swapped is not None:
        first, second = swapped
        wanted[first], wanted[second] = wanted[second], wanted[first]
    x = (scale * torch.randn(wanted, generator=generator)).to(dtype)
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
