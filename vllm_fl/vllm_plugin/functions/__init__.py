# SPDX-License-Identifier: Apache-2.0
"""The vLLM functions that are served, one file per family."""

from __future__ import annotations

from .sampling import APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P
from .serve import FunctionSpec

__all__ = ["FUNCTIONS", "FunctionSpec"]

FUNCTIONS: tuple[FunctionSpec, ...] = (APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P)
