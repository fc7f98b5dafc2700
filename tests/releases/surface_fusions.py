# SPDX-License-Identifier: Apache-2.0
"""The modules of vLLM's models that several ops in one serve."""

from __future__ import annotations

from .checks import Entry, InOrder

__all__ = ["FUSED"]

QK_NORM_ROPE = ("vllm.model_executor.models.qwen3:Qwen3Attention",
                "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention")  # fmt: skip

FUSED = tuple(
    Entry(
        f"{path}.forward",
        "what fused_qk_norm_rope does is what happens between the projection and the attention",
        (
            InOrder(
                (
                    "qkv, _ = self.qkv_proj(hidden_states)",
                    "self.q_norm(q_by_head)",
                    "self.k_norm(k_by_head)",
                    "q, k = self.rotary_emb(positions, q, k)",
                    "attn_output = self.attn(q, k, v)",
                )
            ),
        ),
    )
    for path in QK_NORM_ROPE
)
