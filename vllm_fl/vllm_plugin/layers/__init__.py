# SPDX-License-Identifier: Apache-2.0
"""The vLLM layers that are served, one file per family."""

from __future__ import annotations

from .activation import GELU_AND_MUL, SILU_AND_MUL
from .normalization import RMS_NORM
from .rotary import ROTARY_EMBEDDING
from .serve import LayerSpec

__all__ = ["LAYERS", "LayerSpec"]

LAYERS: tuple[LayerSpec, ...] = (RMS_NORM, SILU_AND_MUL, GELU_AND_MUL, ROTARY_EMBEDDING)
