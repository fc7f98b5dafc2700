# SPDX-License-Identifier: Apache-2.0
"""Small models for end-to-end tests, written to disk in a second and without a download."""

from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "tiny"]

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
"""Divisible by two in every place that tensor parallelism splits."""

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # the classes of transformers, and what is particular about the family
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    # norms over query and key heads
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": False}),
    # experts, two of eight for each token, and no other MLP
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
    # norms that add 1 to their weight, gelu, embeddings that are scaled and tied
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    # local and global layers, each kind with a rotary table of its own
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 128,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
}


def tiny(path: Path, family: str, *, layers: int = 2, seed: int = 0) -> Path:
    """Write a model of ``layers`` layers with seeded random float32 weights; return its folder.

    It has no tokenizer: load it with ``skip_tokenizer_init=True`` and give prompts as token ids
    below 1024.

    The weights keep the activations at unit scale, so greedy tokens depend on the prompt instead
    of settling on one; norm weights are spread around their neutral value, so a norm that drops
    its weight shows. Where the embeddings are tied, a token's own row would win each time: there
    they are small, and what the layers add is not.
    """
    import torch
    import transformers

    config_class, model_class, more = FAMILIES[family]
    config = getattr(transformers, config_class)(**SIZES, num_hidden_layers=layers, **more)
    tied = config.tie_word_embeddings
    neutral = 0.0 if family.startswith("gemma") else 1.0
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # the norms
                weight.normal_(neutral, 0.2, generator=generator)
            elif name == "model.embed_tokens.weight":  # a lookup: each row is used as it is
                weight.normal_(0.0, 0.005 if tied else 1.0, generator=generator)
            else:
                scale = 2.0 if tied and name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                weight.normal_(0.0, scale * weight.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(path)
    return path
