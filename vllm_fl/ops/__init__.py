# SPDX-License-Identifier: Apache-2.0
"""Op contracts, one file per family: the single home of each op's meaning.

An op's facts are what a vLLM layer knows for certain when it is built: sizes, the weight, the
style. The input's dtype is not among them, because a layer learns it with each call.
"""

from __future__ import annotations

from ..dispatch.registry import OpRegistry
from ..dispatch.types import OpSignature
from . import (
    activation,
    attention,
    cache,
    moe,
    normalization,
    qk_norm_rope,
    quantization,
    rotary,
    sampling,
)
from .attention import ATTENTION_BACKEND
from .contract import OpContract

__all__ = ["CONTRACTS", "SIGNATURES", "OpContract", "register_builtins"]

CONTRACTS: tuple[OpContract, ...] = (
    *activation.CONTRACTS,
    *normalization.CONTRACTS,
    *rotary.CONTRACTS,
    *qk_norm_rope.CONTRACTS,
    *cache.CONTRACTS,
    *attention.CONTRACTS,
    *moe.CONTRACTS,
    *quantization.CONTRACTS,
    *sampling.CONTRACTS,
)

SIGNATURES: tuple[OpSignature, ...] = (
    *(contract.signature for contract in CONTRACTS),
    ATTENTION_BACKEND,
)


def register_builtins(registry: OpRegistry) -> None:
    """Declare every op of vllm_fl."""
    for signature in SIGNATURES:
        registry.declare(signature)
