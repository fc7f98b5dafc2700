# SPDX-License-Identifier: Apache-2.0
"""RMS norms by our GPU kernels: rows anywhere, any float dtype of the weight, or none."""

from __future__ import annotations

import torch

from ..fl import backend, kernels


def _supports_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool | str:
    return kernels.supports_rms_norm(x, weight, epsilon, variance_size)


def _supports_fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool | str:
    return kernels.supports_fused_add_rms_norm(x, residual, weight, epsilon, variance_size)


@backend.implements(supports=_supports_rms_norm, batch_invariant=True)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x: (..., hidden), weight: (hidden,) or None -> a contiguous tensor of x's shape and dtype."""
    return kernels.rms_norm(x, weight, epsilon, variance_size)


@backend.implements(supports=_supports_fused, mutates=("x", "residual"), batch_invariant=True)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: x becomes the norm, residual the sum. Returns both.

    Where they overlap, both cannot be: they stay as they are and new tensors are returned."""
    return kernels.fused_add_rms_norm(x, residual, weight, epsilon, variance_size)


def _supports_gemma(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> bool | str:
    return kernels.supports_rms_norm(x, weight, epsilon, None)


def _supports_fused_gemma(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> bool | str:
    return kernels.supports_fused_add_rms_norm(x, residual, weight, epsilon, None)


@backend.implements(supports=_supports_gemma, batch_invariant=True)
def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As rms_norm, with the weight plus one."""
    return kernels.gemma_rms_norm(x, weight, epsilon, None)


@backend.implements(supports=_supports_fused_gemma, mutates=("x", "residual"), batch_invariant=True)
def fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As fused_add_rms_norm, with the weight plus one."""
    return kernels.fused_add_gemma_rms_norm(x, residual, weight, epsilon, None)
