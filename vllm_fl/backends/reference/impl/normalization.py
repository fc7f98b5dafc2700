# SPDX-License-Identifier: Apache-2.0
"""RMS norms: the contracts' own reference."""

from __future__ import annotations

from ....ops.normalization import FUSED_ADD_RMS_NORM, RMS_NORM
from ..reference import backend

rms_norm = backend.serves(RMS_NORM)
fused_add_rms_norm = backend.serves(FUSED_ADD_RMS_NORM)
