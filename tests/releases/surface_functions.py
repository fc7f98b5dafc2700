# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that vllm_fl serves, or that a contract names as the place of its op."""

from __future__ import annotations

from .checks import Check, Does, Entry, Kind, Takes
from .functions import ImportedByNameIn, ServedFunction, TakesAmong, served_functions

__all__ = ["FUNCTIONS"]

SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
PENALTIES = "vllm.v1.sample.ops.penalties"
MOE = "vllm.model_executor.layers.fused_moe"

SINCE = {
    "vllm.model_executor.models.diffusion_gemma": "0.28.0",
    "vllm.v1.watermarking.gpu_sampler": "0.30.0",
    "vllm.model_executor.layers.fused_moe.experts.rdna3_moe": "0.30.0",
    "vllm.models.dots3_note.nvidia.vision_moe": "0.28.0",
    "vllm.models.hy_v4.nvidia.attention": "0.30.0",
    "vllm.v1.attention.backends.rocm_segmented_attn": "0.32.0",
    "vllm.models.deepseek_v32.attention": "0.28.0",
    "vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_moe": "0.33.0",
}
"""Callers that only some releases have, and the first of these."""

RDNA3 = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16_rdna3"
)
GONE = {
    RDNA3: "0.30.0",
    "vllm.model_executor.models.arctic": "0.30.0",
    "vllm.models.deepseek_v32.attention": "0.30.0",
    "vllm.models.deepseek_v32.nvidia.attention": "0.28.0",
}
"""Callers that only some releases have, and the first release without them."""

CHOSEN = {
    "vllm.v1.attention.backends.fa_utils": ("vllm.v1.attention.backends.flash_attn",),
    "vllm.model_executor.layers.fused_moe": (
        "vllm.model_executor.models.arctic",
        "vllm.model_executor.models.minicpm",
        "vllm.model_executor.models.moondream3",
    ),
}
"""Callers whose name is this function on one platform and something else on another, and who
imports it from them."""
CHOSEN_NAMES = ("reshape_and_cache_flash", "fused_experts")


def _own_name(function: ServedFunction, caller: str) -> Entry:
    checks: tuple[Check, ...] = (Kind("function"),)
    if function.name in CHOSEN_NAMES:
        checks = (ImportedByNameIn(CHOSEN[caller]),) if caller in CHOSEN else ()
    why = f"its own name for what is served as {function.op}"
    return Entry(f"{caller}:{function.name}", why, checks, SINCE.get(caller), GONE.get(caller))


SERVED = tuple(
    entry
    for function in {f.path: f for f in served_functions()}.values()
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
        *(_own_name(function, caller) for caller in function.callers),
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

OPAQUE = (
    Entry(
        f"{MOE}.runner.moe_runner:MoERunner._select_forward",
        "experts run inside an opaque operator, so that what they call is never traced",
        (Does("torch.ops.vllm.moe_forward"), Does("current_platform.is_cpu()")),
    ),
    *(
        Entry(
            path,
            "attention runs inside opaque operators, where the platform has them",
            (Does(f"torch.ops.vllm.{op}"), Does("self.use_direct_call")),
        )
        for path, op in (
            ("vllm.model_executor.layers.attention.attention:Attention.forward",
             "unified_kv_cache_update"),
            ("vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
             "unified_mla_kv_cache_update"),
        )
    ),
    Entry(
        "vllm.model_executor.kernels.linear.scaled_mm.triton:_w8a8_triton_block_scaled_mm_func",
        "the body of an opaque operator, which imports the function at each call",
        (Does("w8a8_triton_block_scaled_mm(qx, weight, x_scale, weight_scale, block_size, "
              "output_dtype)"),),
    ),
)  # fmt: skip

ASKED = (
    *(
        Entry(f"vllm.platforms:current_platform.{name}", why)
        for name, why in (
            ("dispatch_key", "whether the extension has kernels for this device"),
            ("is_cpu", "on a CPU vLLM calls few of the functions"),
            ("is_fp8_fnuz", "which FP8 its caches and activations hold"),
            ("opaque_attention_op", "whether a compiler sees what attention does"),
        )
    ),
    Entry("vllm.triton_utils:HAS_TRITON", "whether vLLM's own Triton kernels can run"),
    Entry(
        "vllm.utils.deep_gemm:is_deep_gemm_e8m0_used",
        "what per_token_group_quant_fp8 asks where it is not told of powers of two",
        (Takes(""),),
    ),
)

FUNCTIONS: tuple[Entry, ...] = (*SERVED, *SAMPLING, *OPAQUE, *ASKED)
