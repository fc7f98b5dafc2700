# SPDX-License-Identifier: Apache-2.0
"""Logits on their way to a sampled token: the contracts' own reference."""

from __future__ import annotations

from ....ops.sampling import APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P
from ..reference import backend

apply_repetition_penalties = backend.serves(APPLY_REPETITION_PENALTIES)
apply_top_k_top_p = backend.serves(APPLY_TOP_K_TOP_P)
