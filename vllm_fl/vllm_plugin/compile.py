# SPDX-License-Identifier: Apache-2.0
"""Eager or compiled: which of the two questions a layer asks."""

from __future__ import annotations

from typing import Any

__all__ = ["LEFT_TO_COMPILER", "layer_mode"]

LEFT_TO_COMPILER = "left to the compiler"


def layer_mode() -> str:
    """ "eager" or "compiled", from the configuration of the model that is being built.

    Compiled means that Dynamo will trace the layer's forward; graphs captured without it
    (mode NONE) count as eager.
    """
    from vllm.config import CompilationMode, get_current_vllm_config

    config: Any = get_current_vllm_config().compilation_config
    return "eager" if config.mode in (None, CompilationMode.NONE) else "compiled"
