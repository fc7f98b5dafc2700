# SPDX-License-Identifier: Apache-2.0
"""Gated activations in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..reference import backend


@backend.implements()
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d)."""
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


@backend.implements()
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: (..., 2 * d) -> (..., d); approximate: "none" or "tanh"."""
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]
