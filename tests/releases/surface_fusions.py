# SPDX-License-Identifier: Apache-2.0
"""The modules of vLLM's models that several ops in one serve, and vLLM's own kernel for that."""

from __future__ import annotations

from .checks import Accepts, Does, Entry, InOrder
from .forms import OfForm, Recognised

__all__ = ["FUSED"]

QWEN3 = "vllm.model_executor.models.qwen3:Qwen3Attention"
QWEN3_MOE = "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention"
APERTUS = "vllm.model_executor.models.apertus:ApertusAttention"

FUSED = (
    *(
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
        for path in (QWEN3, QWEN3_MOE)
    ),
    Entry(
        "vllm",
        "fused_qk_norm_rope serves the modules of a known form, and these are they",
        (
            OfForm(
                (
                    Recognised(QWEN3),
                    Recognised(QWEN3_MOE),
                    Recognised(APERTUS, since="0.28.0"),
                )
            ),
        ),
    ),
    Entry(
        "vllm.v1.worker.worker_base:WorkerBase.get_model",
        "the loaded model, whose modules are looked at; its workers override it",
        (Accepts(()),),
    ),
    Entry(
        "vllm._custom_ops:fused_qk_norm_rope",
        "the kernel takes these, in this order, and one more that has a default",
        (
            Does(
                "torch.ops._C.fused_qk_norm_rope(qkv, num_heads_q, num_heads_k, num_heads_v, "
                "head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids, "
                "forced_token_heads_per_warp)"
            ),
        ),
    ),
)
