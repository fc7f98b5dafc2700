# SPDX-License-Identifier: Apache-2.0
"""Activations by vLLM's CPU kernels.

They read rows as if they were contiguous (a slice gave an error of 3.1), so a view is copied
first. Rows without elements, and offsets beyond a 32-bit int, end the process: both are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cpu import backend
from .common import VECTOR, fits, tensor_reason

_MAX_ELEMENTS = 2**31


def _supports_rows_of(multiple: int, x: torch.Tensor) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    size = x.shape[-1]
    if not size or size % multiple:
        return f"the last dimension {size} is not a positive multiple of {multiple}"
    if x.numel() >= _MAX_ELEMENTS:
        return f"{x.numel()} elements are {_MAX_ELEMENTS} or more"
    return True


def _supports(x: torch.Tensor) -> bool | str:
    return _supports_rows_of(2 * VECTOR, x)


def _supports_elementwise(x: torch.Tensor) -> bool | str:
    if not x.dim():
        return "the tensor has no dimensions"
    return _supports_rows_of(VECTOR, x)


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


def _output(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@backend.calling("_C.silu_and_mul").implements(supports=_supports, batch_invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); d a multiple of 8."""
    out = _output(x)
    torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


@backend.calling("_C.gelu_and_mul", "_C.gelu_tanh_and_mul").implements(
    supports=_supports_gelu, supports_layer=_supports_approximate, batch_invariant=True
)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); d a multiple of 8; approximate: "none" or "tanh"."""
    out = _output(x)
    kernel = torch.ops._C.gelu_and_mul if approximate == "none" else torch.ops._C.gelu_tanh_and_mul
    kernel(out, x.contiguous())
    return out


@backend.calling("_C.gelu_new").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d), d a multiple of 8 -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_new(out, x.contiguous())
    return out


@backend.calling("_C.gelu_fast").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d), d a multiple of 8 -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_fast(out, x.contiguous())
    return out


@backend.calling("_C.gelu_quick").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_quick(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d), d a multiple of 8 -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_quick(out, x.contiguous())
    return out
