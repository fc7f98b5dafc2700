# SPDX-License-Identifier: Apache-2.0
"""The activations of vLLM, gated ones and those of one argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .serve import LayerSpec, note

__all__ = ["ACTIVATIONS"]

_MODULE = "vllm.model_executor.layers.activation"


def _of_x(op: str) -> Callable[..., Any]:
    """The forward of a layer whose op takes nothing but the input."""

    def forward(self: Any, x: Any) -> Any:
        try:
            return getattr(self, op)(x)
        except Exception as error:
            note(error, self, op, (x,))
            raise

    return forward


def _gelu_forward(self: Any, x: Any) -> Any:
    approximate = self.layer.approximate
    try:
        return self.gelu_and_mul(x, approximate)
    except Exception as error:
        note(error, self, "gelu_and_mul", (x, approximate))
        raise


def _clamp_forward(self: Any, x: Any) -> Any:
    layer = self.layer
    args = (x, layer.swiglu_limit, layer.alpha, layer.beta)
    try:
        return self.silu_and_mul_with_clamp(*args)
    except Exception as error:
        note(error, self, "silu_and_mul_with_clamp", args)
        raise


def _swigluoai_forward(self: Any, x: Any) -> Any:
    layer = self.layer
    args = (x, layer.alpha, layer.limit)
    try:
        return self.swigluoai_and_mul(*args)
    except Exception as error:
        note(error, self, "swigluoai_and_mul", args)
        raise


def _fatrelu_forward(self: Any, x: Any) -> Any:
    args = (x, self.layer.threshold)
    try:
        return self.fatrelu_and_mul(*args)
    except Exception as error:
        note(error, self, "fatrelu_and_mul", args)
        raise


def _plain(name: str, class_name: str, op: str | None = None, *paths: str) -> LayerSpec:
    """A layer whose op takes nothing but the input.

    Args:
        op: its name, where it is not the layer's.
        paths: more classes.
    """
    served = op or name
    return LayerSpec(
        name=name,
        paths=(f"{_MODULE}:{class_name}", *paths),
        facts=lambda layer: {served: None},
        forward=_of_x(served),
    )


ACTIVATIONS = (
    _plain(
        "silu_and_mul",
        "SiluAndMul",
        None,
        "vllm.model_executor.hw_agnostic.layers.activation:SiluAndMul",
    ),
    _plain("mul_and_silu", "MulAndSilu"),
    LayerSpec(
        name="gelu_and_mul",
        paths=(f"{_MODULE}:GeluAndMul",),
        facts=lambda layer: {"gelu_and_mul": {"approximate": layer.approximate}},
        forward=_gelu_forward,
    ),
    LayerSpec(
        name="silu_and_mul_with_clamp",
        paths=(f"{_MODULE}:SiluAndMulWithClamp",),
        facts=lambda layer: {
            "silu_and_mul_with_clamp": {
                "limit": layer.swiglu_limit,
                "alpha": layer.alpha,
                "beta": layer.beta,
            }
        },
        forward=_clamp_forward,
    ),
    LayerSpec(
        name="swigluoai_and_mul",
        paths=(f"{_MODULE}:SwigluOAIAndMul",),
        facts=lambda layer: {"swigluoai_and_mul": {"alpha": layer.alpha, "limit": layer.limit}},
        forward=_swigluoai_forward,
    ),
    LayerSpec(
        name="fatrelu_and_mul",
        paths=(f"{_MODULE}:FatreluAndMul",),
        facts=lambda layer: {"fatrelu_and_mul": {"threshold": layer.threshold}},
        forward=_fatrelu_forward,
    ),
    _plain("gelu_new", "NewGELU"),
    _plain("gelu_fast", "FastGELU"),
    _plain("quick_gelu", "QuickGELU", "gelu_quick"),
    _plain("relu2", "ReLUSquaredActivation"),
)
