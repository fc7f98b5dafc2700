# SPDX-License-Identifier: Apache-2.0
"""The vLLM layers that are served, one file per family."""

from __future__ import annotations

from .activation import ACTIVATIONS
from .normalization import NORMS
from .rotary import ROTARIES
from .serve import LayerSpec

__all__ = ["LAYERS", "LayerSpec"]

LAYERS: tuple[LayerSpec, ...] = (*NORMS, *ACTIVATIONS, *ROTARIES)
