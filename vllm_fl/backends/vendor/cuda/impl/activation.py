# SPDX-License-Identifier: Apache-2.0
"""Activations by vLLM's CUDA kernels.

They read rows as if they were contiguous, and at whole vectors' addresses (on an H200 the process
lost the device at an odd one), so a view and what lies elsewhere is copied first.

Those of fatrelu_and_mul, silu_and_mul_with_clamp and swigluoai_and_mul make a number of NaN, which
the contracts keep, and the last one loses the device at odd sizes: they are not served, and vLLM's
layers stay with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cuda import backend
from .common import dense, fits, tensor_reason


def _supports_elementwise(x: torch.Tensor) -> bool | str:
    if not fits(x):
        return tensor_reason(x)
    return x.dim() > 0 or "the tensor has no dimensions"


def _supports(x: torch.Tensor, *_: Any, **__: Any) -> bool | str:
    verdict = _supports_elementwise(x)
    if verdict is True and x.shape[-1] % 2:
        return f"the last dimension {x.shape[-1]} is odd"
    return verdict


def _supports_gelu(x: torch.Tensor, approximate: str = "none") -> bool | str:
    return _supports(x)


def _supports_approximate(facts: Mapping[str, Any]) -> bool | str:
    approximate = facts["approximate"]
    return approximate in ("none", "tanh") or f"approximate '{approximate}' is not none or tanh"


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@backend.calling("_C.silu_and_mul").implements(supports=_supports, batch_invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d)."""
    out = _half(x)
    torch.ops._C.silu_and_mul(out, dense(x))
    return out


@backend.calling("_C.mul_and_silu").implements(supports=_supports, batch_invariant=True)
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d)."""
    out = _half(x)
    torch.ops._C.mul_and_silu(out, dense(x))
    return out


@backend.calling("_C.gelu_and_mul", "_C.gelu_tanh_and_mul").implements(
    supports=_supports_gelu, supports_layer=_supports_approximate, batch_invariant=True
)
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); approximate: "none" or "tanh"."""
    out = _half(x)
    kernel = torch.ops._C.gelu_and_mul if approximate == "none" else torch.ops._C.gelu_tanh_and_mul
    kernel(out, dense(x))
    return out


@backend.calling("_C.gelu_new").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d) -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_new(out, dense(x))
    return out


@backend.calling("_C.gelu_fast").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d) -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_fast(out, dense(x))
    return out


@backend.calling("_C.gelu_quick").implements(supports=_supports_elementwise, batch_invariant=True)
def gelu_quick(x: torch.Tensor) -> torch.Tensor:
    """x: (..., d) -> a contiguous tensor of its shape."""
    out = x.new_empty(x.shape)
    torch.ops._C.gelu_quick(out, dense(x))
    return out
