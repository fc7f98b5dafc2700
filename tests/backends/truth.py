# SPDX-License-Identifier: Apache-2.0
"""Each op's formula in float64, written independently of the implementations, and how far a
float32 computation of it may be off."""

from __future__ import annotations

import torch

from tests.backends.helpers import FLOAT32_UNIT


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight."""
    x = x.double()
    part = x if variance_size is None else x[..., :variance_size]
    norm = x / (part.square().sum(-1, keepdim=True) / part.shape[-1] + epsilon).sqrt()
    return norm if weight is None else norm * weight.double()


def rms_norm_float32_error(truth: torch.Tensor, size: int) -> torch.Tensor:
    """A sum of `size` squares, in at least 8 partial sums, is off by at most size / 8 + 8 units,
    its root by half of that; square root, division and two products add one each."""
    return truth.abs() * FLOAT32_UNIT * (size / 16 + 8)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """a / (1 + exp(-a)) * b."""
    gate, up = x.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def silu_float32_error(x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """exp is off by 2 units; sum, division and product add one each. Below -88.7 exp(-a)
    overflows and the result is 0 instead of up to 2.7e-37 (< 2**-121)."""
    up = x.double().chunk(2, -1)[1]
    return truth.abs() * FLOAT32_UNIT * 6 + up.abs() * 2.0**-121


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """a * Phi(a) * b, or its tanh approximation (https://arxiv.org/abs/1606.08415)."""
    gate, up = x.double().chunk(2, -1)
    if approximate == "none":
        return gate * torch.special.erfc(-gate * 0.5**0.5) / 2 * up
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * inner) * up


def gelu_float32_error(x: torch.Tensor) -> torch.Tensor:
    """1 + erf (or tanh) cancels for negative gates, so the error is relative to |a * b|, not to
    the result. Measured on [-30, 30]: 2 units (the kernels), 6 units (PyTorch's erf)."""
    gate, up = x.double().chunk(2, -1)
    return (gate * up).abs() * FLOAT32_UNIT * 8


def rotary_embedding(
    positions: torch.Tensor,
    x: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of channels as complex numbers, times cos + i * sin of their token's position.

    Returns:
        (the rotated x; for each element |a * cos| + |b * sin|, to which errors are relative).
    """
    tokens, rotary_dim = positions.numel(), cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache.double()[positions.flatten().long()].chunk(2, -1)
    turn = torch.complex(cos, sin)[:, None]
    heads = x.double().reshape(tokens, -1, head_size).clone()
    size = torch.zeros_like(heads)
    half = rotary_dim // 2
    first = torch.arange(half) if is_neox else torch.arange(0, rotary_dim, 2)
    second = first + (half if is_neox else 1)
    pairs = torch.complex(heads[..., first], heads[..., second])
    rotated = pairs * turn
    size[..., first] = (pairs.real * turn.real).abs() + (pairs.imag * turn.imag).abs()
    size[..., second] = (pairs.imag * turn.real).abs() + (pairs.real * turn.imag).abs()
    heads[..., first], heads[..., second] = rotated.real, rotated.imag
    return heads.reshape(x.shape), size.reshape(x.shape)


def rotary_float32_error(size: torch.Tensor) -> torch.Tensor:
    """Two products and a sum, each off by one unit of at most `size`."""
    return size * FLOAT32_UNIT * 2
