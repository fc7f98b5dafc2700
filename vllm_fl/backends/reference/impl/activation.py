# SPDX-License-Identifier: Apache-2.0
"""Activations: the contracts' own reference."""

from __future__ import annotations

from ....ops import activation as ops
from ..reference import backend

silu_and_mul = backend.serves(ops.SILU_AND_MUL)
mul_and_silu = backend.serves(ops.MUL_AND_SILU)
gelu_and_mul = backend.serves(ops.GELU_AND_MUL)
silu_and_mul_with_clamp = backend.serves(ops.SILU_AND_MUL_WITH_CLAMP)
swigluoai_and_mul = backend.serves(ops.SWIGLUOAI_AND_MUL)
fatrelu_and_mul = backend.serves(ops.FATRELU_AND_MUL)
gelu_new = backend.serves(ops.GELU_NEW)
gelu_fast = backend.serves(ops.GELU_FAST)
gelu_quick = backend.serves(ops.GELU_QUICK)
relu2 = backend.serves(ops.RELU2)
