# SPDX-License-Identifier: Apache-2.0
"""RMSNorm."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note

__all__ = ["RMS_NORM"]

_FUNCTIONAL = "vllm.model_executor.hw_agnostic.layers.layernorm:RMSNorm"


def _facts(layer: Any) -> dict[str, dict[str, Any]]:
    weight = layer.weight if layer.has_weight else None
    facts = {
        "hidden_size": layer.hidden_size,
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": None if weight is None else weight.numel(),
        "variance_size": layer.variance_size_override,
    }
    return {"rms_norm": facts, "fused_add_rms_norm": facts}


def _forward(self: Any, x: Any, residual: Any = None) -> Any:
    layer = self.layer
    weight = layer.weight.data if layer.has_weight else None
    if residual is None:
        fn = self.rms_norm
        args: tuple[Any, ...] = (x, weight, layer.variance_epsilon, layer.variance_size_override)
    else:
        fn = self.fused_add_rms_norm
        args = (x, residual, weight, layer.variance_epsilon, layer.variance_size_override)
    if fn is None:
        return self.native(x, residual)
    try:
        return fn(*args)
    except Exception as error:
        note(error, self, "rms_norm" if residual is None else "fused_add_rms_norm", args)
        raise


RMS_NORM = LayerSpec(
    name="rms_norm",
    paths=(
        "vllm.model_executor.layers.layernorm:RMSNorm",
        _FUNCTIONAL,
    ),
    facts=_facts,
    forward=_forward,
    functional=(_FUNCTIONAL,),
)
