# SPDX-License-Identifier: Apache-2.0
"""The norms of vLLM: RMSNorm, Gemma's and the gated one, and LayerNorm."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note

__all__ = ["NORMS"]

_MODULE = "vllm.model_executor.layers.layernorm"
_FUNCTIONAL = "vllm.model_executor.hw_agnostic.layers.layernorm:RMSNorm"


def _weight_facts(weight: Any, hidden_size: int | None = None) -> dict[str, Any]:
    """hidden_size: None for that of the weight."""
    size = None if weight is None else weight.numel()
    return {
        "hidden_size": size if hidden_size is None else hidden_size,
        "weight_dtype": None if weight is None else weight.dtype,
        "weight_size": size,
    }


# ----------------------------------------------------------------------------------- RMSNorm


def _rms_facts(layer: Any) -> dict[str, dict[str, Any]]:
    weight = layer.weight if layer.has_weight else None
    facts = {
        **_weight_facts(weight, layer.hidden_size),
        "variance_size": layer.variance_size_override,
    }
    return {"rms_norm": facts, "fused_add_rms_norm": facts}


def _rms_forward(self: Any, x: Any, residual: Any = None) -> Any:
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


# ------------------------------------------------------------------------------ GemmaRMSNorm


def _gemma_facts(layer: Any) -> dict[str, dict[str, Any]]:
    facts = _weight_facts(layer.weight)
    return {"gemma_rms_norm": facts, "fused_add_gemma_rms_norm": facts}


def _gemma_forward(self: Any, x: Any, residual: Any = None) -> Any:
    layer = self.layer
    if residual is None:
        fn = self.gemma_rms_norm
        args: tuple[Any, ...] = (x, layer.weight.data, layer.variance_epsilon)
    else:
        fn = self.fused_add_gemma_rms_norm
        args = (x, residual, layer.weight.data, layer.variance_epsilon)
    if fn is None:
        return self.native(x, residual)
    try:
        return fn(*args)
    except Exception as error:
        op = "gemma_rms_norm" if residual is None else "fused_add_gemma_rms_norm"
        note(error, self, op, args)
        raise


# ------------------------------------------------------------------------------ RMSNormGated


def _gated_facts(layer: Any) -> dict[str, dict[str, Any]]:
    facts = {
        **_weight_facts(layer.weight),
        "group_size": layer.group_size,
        "norm_before_gate": layer.norm_before_gate,
        "activation": layer.activation,
    }
    return {"rms_norm_gated": facts}


def _gated_forward(self: Any, x: Any, z: Any = None) -> Any:
    layer = self.layer
    args = (
        x,
        z,
        layer.weight.data,
        layer.eps,
        layer.group_size,
        layer.norm_before_gate,
        layer.activation,
    )
    try:
        return self.rms_norm_gated(*args)
    except Exception as error:
        note(error, self, "rms_norm_gated", args)
        raise


# --------------------------------------------------------------------------------- LayerNorm


def _layer_norm_facts(layer: Any) -> dict[str, dict[str, Any]]:
    facts = {
        **_weight_facts(layer.weight, layer.normalized_shape[0]),
        "has_bias": layer.bias is not None,
    }
    return {"layer_norm": facts}


def _layer_norm_forward(self: Any, x: Any) -> Any:
    layer = self.layer
    weight, bias = layer.weight, layer.bias
    args = (
        x,
        None if weight is None else weight.data,
        None if bias is None else bias.data,
        layer.eps,
    )
    try:
        return self.layer_norm(*args)
    except Exception as error:
        note(error, self, "layer_norm", args)
        raise


NORMS = (
    LayerSpec(
        name="rms_norm",
        paths=(f"{_MODULE}:RMSNorm", _FUNCTIONAL),
        facts=_rms_facts,
        forward=_rms_forward,
        functional=(_FUNCTIONAL,),
    ),
    LayerSpec(
        name="gemma_rms_norm",
        paths=(f"{_MODULE}:GemmaRMSNorm",),
        facts=_gemma_facts,
        forward=_gemma_forward,
        # Its forward for XPU writes x and the residual; those for CPU and CUDA do not.
        functional=(f"{_MODULE}:GemmaRMSNorm",),
    ),
    LayerSpec(
        name="rms_norm_gated",
        paths=(f"{_MODULE}:RMSNormGated",),
        facts=_gated_facts,
        forward=_gated_forward,
    ),
    LayerSpec(
        name="layer_norm",
        paths=(f"{_MODULE}:LayerNorm",),
        facts=_layer_norm_facts,
        forward=_layer_norm_forward,
    ),
)
