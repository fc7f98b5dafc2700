# SPDX-License-Identifier: Apache-2.0
"""Norms: the contracts' own reference."""

from __future__ import annotations

from ....ops import normalization as ops
from ..reference import backend

rms_norm = backend.serves(ops.RMS_NORM)
fused_add_rms_norm = backend.serves(ops.FUSED_ADD_RMS_NORM)
gemma_rms_norm = backend.serves(ops.GEMMA_RMS_NORM)
fused_add_gemma_rms_norm = backend.serves(ops.FUSED_ADD_GEMMA_RMS_NORM)
rms_norm_gated = backend.serves(ops.RMS_NORM_GATED)
layer_norm = backend.serves(ops.LAYER_NORM)
