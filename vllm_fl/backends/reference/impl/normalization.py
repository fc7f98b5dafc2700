# SPDX-License-Identifier: Apache-2.0
"""RMS norms in plain PyTorch: variance in float32, the product in the weight's dtype."""

from __future__ import annotations

import torch

from ..reference import backend


def _normalize(
    x32: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    head = x32 if variance_size is None else x32[..., :variance_size]
    scaled = x32 * torch.rsqrt(head.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        scaled = scaled.to(weight.dtype) * weight
    return scaled.to(dtype)


@backend.implements()
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) or None -> x's shape and dtype."""
    return _normalize(x.to(torch.float32), weight, epsilon, variance_size, x.dtype)


@backend.implements()
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual rounded to x's dtype); the norm is of the unrounded
    float32 sum."""
    total = x.to(torch.float32) + residual.to(torch.float32)
    return _normalize(total, weight, epsilon, variance_size, x.dtype), total.to(x.dtype)
