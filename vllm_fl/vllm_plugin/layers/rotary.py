# SPDX-License-Identifier: Apache-2.0
"""RotaryEmbedding, and through inheritance Llama3, YaRN, linear and NTK scaling; and
MRotaryEmbedding.

Others (Deepseek's, Ernie's) only share a base class and keep their own mathematics."""

from __future__ import annotations

from typing import Any

from .serve import LayerSpec, note

__all__ = ["ROTARIES"]

_MROTARY = "vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding"


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


def _mrotary_facts(layer: Any) -> dict[str, dict[str, Any]]:
    section = layer.mrope_section
    facts = {
        **_facts(layer)["rotary_embedding"],
        "mrope_section": tuple(section) if section else None,
        "mrope_interleaved": layer.mrope_interleaved,
    }
    return {"mrotary_embedding": facts}


def _mrotary_forward(
    self: Any, positions: Any, query: Any, key: Any = None, offsets: Any = None
) -> Any:
    layer = self.layer
    if key is None or offsets is not None:  # what vLLM's own forwards make of it
        return self.native(positions, query, key, *(() if offsets is None else (offsets,)))
    args = (
        positions,
        query,
        key,
        layer.head_size,
        layer._match_cos_sin_cache_dtype(query),
        layer.is_neox_style,
        layer.mrope_section,
        layer.mrope_interleaved,
    )
    try:
        return self.mrotary_embedding(*args)
    except Exception as error:
        note(error, self, "mrotary_embedding", args)
        raise


ROTARIES = (
    LayerSpec(
        name="rotary_embedding",
        paths=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",),
        facts=_facts,
        forward=_forward,
        refuses=_refuses,
        root="RotaryEmbeddingBase",
        elsewhere=(_MROTARY,),
    ),
    LayerSpec(
        name="mrotary_embedding",
        paths=(_MROTARY,),
        facts=_mrotary_facts,
        forward=_mrotary_forward,
        refuses=_refuses,
    ),
)
