# SPDX-License-Identifier: Apache-2.0
"""Small models for end-to-end tests, written to disk in a second and without a download."""

from pathlib import Path

__all__ = ["tiny_qwen3"]


def tiny_qwen3(path: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Write a Qwen3 of ``layers`` layers with seeded random float32 weights; return its folder.

    Its widths are divisible by two in every place that tensor parallelism splits, and it has the
    norms over query and key heads that make Qwen3 different. It has no tokenizer: load it with
    ``skip_tokenizer_init=True`` and give prompts as token ids below 1024.

    The weights keep the activations at unit scale, so greedy tokens depend on the prompt instead
    of settling on one; norm weights are spread around 1, so a norm that drops its weight shows.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # the norms
                weight.normal_(1.0, 0.2, generator=generator)
            elif name == "model.embed_tokens.weight":  # a lookup: each row is used as it is
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(path)
    return path
