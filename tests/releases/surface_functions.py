# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that vllm_fl serves, or that a contract names as the place of its op."""

from __future__ import annotations

from .checks import Does, Entry, Kind, Takes
from .functions import ImportedByNameIn, TakesAmong, served_functions

__all__ = ["FUNCTIONS"]

SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
PENALTIES = "vllm.v1.sample.ops.penalties"
UTILS = "vllm.model_executor.layers.quantization.utils"

SINCE = {
    "vllm.model_executor.models.diffusion_gemma": "0.28.0",
    "vllm.v1.watermarking.gpu_sampler": "0.30.0",
}
"""Callers that only some releases have, and the first of these."""

SERVED = tuple(
    entry
    for function in served_functions()
    for entry in (
        Entry(
            function.path,
            f"served as {function.op}; its attribute, and those of its callers, are replaced",
            (
                Kind("function"),
                TakesAmong(function.parameters),
                ImportedByNameIn(function.callers),
            ),
        ),
        *(
            Entry(
                f"{caller}:{function.name}",
                f"its own name for what is served as {function.op}",
                (Kind("function"),),
                SINCE.get(caller),
            )
            for caller in function.callers
        ),
    )
)

SAMPLING = (
    Entry(
        "vllm._custom_ops:apply_repetition_penalties_torch",
        "what the first model runner computes where vLLM has no kernel: it writes the logits",
        (
            Takes("logits, prompt_mask, output_mask, repetition_penalties"),
            Does("logits *= scaling"),
        ),
    ),
    Entry(
        "vllm.model_executor.layers.utils:apply_penalties",
        "looks the penalties up at each call, and goes on with the logits that they wrote",
        (
            Does("from vllm._custom_ops import apply_repetition_penalties"),
            Does(
                "apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)"
            ),
            Does("return logits"),
        ),
    ),
    Entry(
        f"{PENALTIES}:apply_all_penalties",
        "the first model runner's way to them",
        (
            Does(
                "return apply_penalties(logits, prompt_token_ids, output_tokens_t, "
                "presence_penalties, frequency_penalties, repetition_penalties)"
            ),
        ),
    ),
    Entry(
        "vllm.v1.sample.sampler:Sampler.apply_penalties",
        "the first model runner's way to them",
        (Does("sampling_metadata.no_penalties"), Does("sampling_metadata.repetition_penalties")),
    ),
    *(
        Entry(
            f"{SAMPLER}:TopKTopPSampler.{name}",
            "calls the module's attribute and goes on with what it returns",
            (Does("logits = apply_top_k_top_p(logits, k, p)"),),
        )
        for name in ("forward_cpu", "forward_native")
    ),
)

QUANTIZATION = tuple(
    Entry(path, "named by a contract; nothing of it is replaced yet", (Takes(taken),))
    for path, taken in (
        (
            "vllm._custom_ops:scaled_fp8_quant",
            "input, scale=None, num_token_padding=None, scale_ub=None, "
            "use_per_token_if_dynamic=False, output=None, group_shape=None",
        ),
        ("vllm._custom_ops:scaled_int8_quant", "input, scale=None, azp=None, symmetric=True"),
        (
            f"{UTILS}.fp8_utils:per_token_group_quant_fp8",
            "x, group_size, eps=1e-10, dtype=None, column_major_scales=False, "
            "tma_aligned_scales=False, out_q=None, use_ue8m0=None",
        ),
        (
            f"{UTILS}.fp8_utils:w8a8_triton_block_scaled_mm",
            "A, B, As, Bs, block_size, output_dtype=torch.float16",
        ),
        (f"{UTILS}.int8_utils:per_token_quant_int8", "x"),
    )
)

MOE = "vllm.model_executor.layers.fused_moe"

PLACES = tuple(
    Entry(path, "named by a contract; nothing of it is replaced yet", (TakesAmong(names),))
    for path, names in (
        (
            "vllm._custom_ops:reshape_and_cache_flash",
            ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype",
             "k_scale", "v_scale"),
        ),
        (
            "vllm._custom_ops:concat_and_cache_mla",
            ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale", "skip_scale"),
        ),
        (
            "vllm._custom_ops:merge_attn_states",
            ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse",
             "prefill_tokens_with_context", "output_scale"),
        ),
        ("vllm._custom_ops:moe_sum", ("input", "output", "topk_ids", "expert_map")),
        (
            "vllm._custom_ops:topk_softmax",
            ("topk_weights", "topk_ids", "token_expert_indices", "gating_output", "renormalize",
             "e_score_correction_bias", "is_padding"),
        ),
        (
            f"{MOE}.moe_align_block_size:moe_align_block_size",
            ("topk_ids", "block_size", "num_experts", "expert_map", "pad_sorted_ids",
             "ignore_invalid_experts", "return_scatter_idx"),
        ),
        (
            f"{MOE}.fused_moe:fused_experts",
            ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation",
             "apply_router_weight_on_input", "global_num_experts", "expert_map", "quant_config"),
        ),
        (
            f"{MOE}.router.grouped_topk_router:grouped_topk",
            ("hidden_states", "gating_output", "topk", "renormalize", "num_expert_group",
             "topk_group", "scoring_func", "routed_scaling_factor", "e_score_correction_bias"),
        ),
    )
)  # fmt: skip

FUNCTIONS: tuple[Entry, ...] = (*SERVED, *SAMPLING, *QUANTIZATION, *PLACES)
