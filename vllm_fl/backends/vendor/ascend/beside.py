# SPDX-License-Identifier: Apache-2.0
"""Living beside vllm-ascend, which brings a platform and layers of its own.

Its worker claims layers by class name when it is initialised, which is later than vLLM's general
plugins run, and dies of "Duplicate op name" where one is taken. What it claims is therefore known
here as data, and left alone from the start.
"""

from __future__ import annotations

import sys

__all__ = ["CLAIMED", "PLATFORM", "claims", "platform_is_active"]

PLATFORM = "vllm_ascend.platform.NPUPlatform"

CLAIMED = frozenset(
    {
        "ApplyRotaryEmb",
        "BailingMoELinearAttention",
        "ColumnParallelLinear",
        "Conv3dLayer",
        "CustomQwen2Decoder",
        "DeepseekScalingRotaryEmbedding",
        "GatedDeltaNetAttention",
        "GemmaRMSNorm",
        "LogitsProcessor",
        "MMEncoderAttention",
        "MRotaryEmbedding",
        "MergedColumnParallelLinear",
        "MoERunner",
        "MultiHeadLatentAttentionWrapper",
        "ParallelLMHead",
        "QKVParallelLinear",
        "QuickGELU",
        "RMSNorm",
        "RMSNormGated",
        "RelPosAttention",
        "ReplicatedLinear",
        "RotaryEmbedding",
        "RoutedExperts",
        "RowParallelLinear",
        "SiluAndMul",
        # Its own spelling: vLLM's class is SiluAndMulWithClamp, so this claims nothing.
        "SiluAndMulClamp",
        "VocabParallelEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
"""The names under which vllm-ascend registers layers in vLLM (commit 182b75ea, utils.py:703)."""


def platform_is_active() -> bool:
    """Whether vLLM chose vllm-ascend's platform. False while vLLM has not chosen, or is not
    imported at all: nothing is made to choose here."""
    platforms = sys.modules.get("vllm.platforms")
    platform = getattr(platforms, "_current_platform", None)
    chosen = type(platform)
    return f"{chosen.__module__}.{chosen.__qualname__}" == PLATFORM


def claims(class_name: str) -> str | None:
    """Why a layer class is left to vllm-ascend, or None."""
    if class_name in CLAIMED and platform_is_active():
        return f"vllm-ascend claims {class_name} on its platform"
    return None
