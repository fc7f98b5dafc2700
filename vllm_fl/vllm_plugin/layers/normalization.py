# SPDX-License-Identifier: Apache-2.0
"""RMSNorm."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note, slot_of

__all__ = ["RMS_NORM"]

_NORM = slot_of("rms_norm")
_FUSED = slot_of("fused_add_rms_norm")


def _facts(layer: Any) -> dict[str, dict[str, Any]]:
    weight = layer.weight if layer.has_weight else None
    facts = {
        "hidden_size": layer.hidden_size,
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": None if weight is None else weight.shape[-1],
        "variance_size": layer.variance_size_override,
    }
    return {"rms_norm": facts, "fused_add_rms_norm": facts}


def _forward(self: Any, x: Any, residual: Any = None) -> Any:
    weight = self.weight.data if self.has_weight else None
    if residual is None:
        fn = self.__dict__[_NORM]
        args = (x, weight, self.variance_epsilon, self.variance_size_override)
    else:
        fn = self.__dict__[_FUSED]
        args = (x, residual, weight, self.variance_epsilon, self.variance_size_override)
    if fn is None:
        return self._vllm_fl_native(x, residual)
    try:
        return fn(*args)
    except Exception as error:
        note(error, self, "rms_norm" if residual is None else "fused_add_rms_norm", args)
        raise


RMS_NORM = LayerSpec(
    name="rms_norm",
    paths=(
        "vllm.model_executor.layers.layernorm:RMSNorm",
        "vllm.model_executor.hw_agnostic.layers.layernorm:RMSNorm",
    ),
    facts=_facts,
    forward=_forward,
)
