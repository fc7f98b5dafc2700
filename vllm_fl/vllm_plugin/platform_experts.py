# SPDX-License-Identifier: Apache-2.0
"""Experts for PlatformFL: vLLM's own Triton experts, which it gives to its own platforms alone.

On a platform out of its tree vLLM leaves a layer of experts without any, for a plugin to bring.
Those in its tree need Triton and four functions: routing, blocks, activation and sum, which
`functions.moe` serves where the compiled extension is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..dispatch.default import get_default_manager
from . import hooks

__all__ = ["METHOD", "await_method", "triton_experts"]

METHOD = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
"""The module whose layers choose their experts."""

_CHOOSE = "select_unquantized_moe_backend"
_KNOWN = ("auto", "triton", "humming")
"""Values of --moe-backend that mean Triton's experts for unquantized weights."""


_OF_THE_EXTENSION = {"situ": "situ_and_mul"}
"""Activations between the experts' products that have no op here, and their kernels."""

_OPS = {
    "silu": ("silu_and_mul", "silu_and_mul_with_clamp"),
    "gelu": ("gelu_and_mul",),
    "gelu_tanh": ("gelu_and_mul",),
    "swigluoai": ("swigluoai_and_mul",),
    "swigluoai_uninterleave": ("silu_and_mul_with_clamp",),
}
"""Activations to the ops that stand in for the extension's kernels."""


def await_method() -> None:
    """Let the layers choose Triton's experts, as soon as somebody imports them."""
    hooks.when_imported(METHOD, _hook)


def _hook(module: ModuleType) -> None:
    purpose = "Triton's experts on a platform out of vLLM's tree"
    hooks.install(module, _CHOOSE, _choosing, purpose=purpose)


def _choosing(original: Callable[..., Any] | None) -> Callable[..., Any]:
    assert original is not None

    @functools.wraps(original)
    def choose(moe_config: Any) -> tuple[Any, Any]:
        backend, experts = original(moe_config)
        return (backend, experts) if backend.name != "OOT" else triton_experts(moe_config)

    return choose


def triton_experts(moe_config: Any) -> tuple[Any, Any]:
    """vLLM's name of the backend, and the class of the experts.

    Raises:
        ValueError: another backend was asked for, the chip has no Triton, or the experts do not
            have the activation.
    """
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.triton_utils import HAS_TRITON

    from .refusals import sentence, why_unserved

    vendor = get_default_manager().device.vendor
    asked = str(moe_config.moe_backend)
    if asked not in _KNOWN:
        raise ValueError(
            sentence(
                vendor,
                f"experts by '{asked}'",
                "they need packages for vLLM's own platforms",
                "use --moe-backend triton, which is what is chosen where nothing is",
            )
        )
    if not HAS_TRITON:
        raise ValueError(
            sentence(
                vendor,
                "mixtures of experts",
                "the experts are a Triton kernel, and there is no Triton for this chip here",
                "install the vendor's Triton",
            )
        )
    if not TritonExperts._supports_activation(moe_config.activation):
        raise ValueError(
            sentence(
                vendor,
                f"experts with the activation '{moe_config.activation.value}'",
                "vLLM's Triton experts do not have it",
            )
        )
    kernel = _OF_THE_EXTENSION.get(moe_config.activation.value)
    if kernel is not None:
        raise ValueError(
            sentence(
                vendor,
                f"experts with the activation '{moe_config.activation.value}'",
                f"vLLM's Triton experts leave it to {kernel} of vLLM's compiled extension",
            )
        )
    for op in _OPS.get(moe_config.activation.value, ()):
        why = why_unserved(op)
        if why is not None:
            raise ValueError(
                sentence(
                    vendor,
                    f"experts with the activation '{moe_config.activation.value}'",
                    f"nothing serves {op} ({why})",
                    "let vllm_fl serve it",
                )
            )
    return UnquantizedMoeBackend.TRITON, TritonExperts
