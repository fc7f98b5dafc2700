# SPDX-License-Identifier: Apache-2.0
"""Gated activations by vLLM's CPU kernels. They read rows as if they were contiguous (a slice
gave an error of 3.1), so a view is copied first."""

from __future__ import annotations

import torch

from ..cpu import backend
from .common import DTYPES, VECTOR, dtype_reason


def _supports(x: torch.Tensor) -> bool | str:
    if x.dtype not in DTYPES:
        return dtype_reason(x.dtype)
    if x.shape[-1] % (2 * VECTOR):
        return f"the last dimension {x.shape[-1]} is not a multiple of {2 * VECTOR}"
    return True


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_approximate(facts: dict[str, str]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


def _output(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@backend.implements(supports=_supports, batch_invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); d a multiple of 8."""
    out = _output(x)
    torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


@backend.implements(
    supports=_supports_gelu, supports_layer=_supports_approximate, batch_invariant=True
)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); d a multiple of 8; approximate: "none" or "tanh"."""
    out = _output(x)
    kernel = torch.ops._C.gelu_and_mul if approximate == "none" else torch.ops._C.gelu_tanh_and_mul
    kernel(out, x.contiguous())
    return out
