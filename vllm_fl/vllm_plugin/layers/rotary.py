# SPDX-License-Identifier: Apache-2.0
"""RotaryEmbedding, and through inheritance Llama3, YaRN, linear and NTK scaling.

Others (MRotaryEmbedding, Deepseek's) only share its base class and keep their own mathematics."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note

__all__ = ["ROTARY_EMBEDDING"]


def _facts(layer: Any) -> dict[str, dict[str, Any]]:
    facts = {
        "head_size": layer.head_size,
        "rotary_dim": layer.rotary_dim,
        "is_neox": layer.is_neox_style,
    }
    return {"rotary_embedding": facts}


def _forward(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
    layer = self.layer
    cache = layer._match_cos_sin_cache_dtype(query)
    args = (positions, query, key, layer.head_size, cache, layer.is_neox_style)
    try:
        return self.rotary_embedding(*args)
    except Exception as error:
        note(error, self, "rotary_embedding", args)
        raise


def _refuses(layer: Any) -> str | None:
    if layer.use_flashinfer:
        return "it uses FlashInfer"
    if getattr(layer, "use_aiter", False):
        return "it uses AITER"
    return None


ROTARY_EMBEDDING = LayerSpec(
    name="rotary_embedding",
    paths=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",),
    facts=_facts,
    forward=_forward,
    refuses=_refuses,
    root="RotaryEmbeddingBase",
)
