# SPDX-License-Identifier: Apache-2.0
"""SiluAndMul and GeluAndMul."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note

__all__ = ["GELU_AND_MUL", "SILU_AND_MUL"]


def _silu_forward(self: Any, x: Any) -> Any:
    try:
        return self.silu_and_mul(x)
    except Exception as error:
        note(error, self, "silu_and_mul", (x,))
        raise


def _gelu_forward(self: Any, x: Any) -> Any:
    approximate = self.layer.approximate
    try:
        return self.gelu_and_mul(x, approximate)
    except Exception as error:
        note(error, self, "gelu_and_mul", (x, approximate))
        raise


SILU_AND_MUL = LayerSpec(
    name="silu_and_mul",
    paths=(
        "vllm.model_executor.layers.activation:SiluAndMul",
        "vllm.model_executor.hw_agnostic.layers.activation:SiluAndMul",
    ),
    facts=lambda layer: {"silu_and_mul": None},
    forward=_silu_forward,
)

GELU_AND_MUL = LayerSpec(
    name="gelu_and_mul",
    paths=("vllm.model_executor.layers.activation:GeluAndMul",),
    facts=lambda layer: {"gelu_and_mul": {"approximate": layer.approximate}},
    forward=_gelu_forward,
)
