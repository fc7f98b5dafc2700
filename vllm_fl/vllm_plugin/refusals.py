# SPDX-License-Identifier: Apache-2.0
"""What PlatformFL cannot serve, told from a configuration before anything is loaded.

Each refusal is a sentence: what, why, and what to do. What stands here was read in vLLM's sources:
kernels of the compiled extension that are reached on a platform out of vLLM's tree, and places
that know vLLM's own platforms only. The rest runs on Triton and on PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ROUTING", "refusals", "sentence", "why_unserved"]

ROUTING = ("topk_softmax", "moe_align_block_size", "moe_sum")
"""What a mixture of experts asks of vLLM's extension."""

_ELSEWHERE = "use a vLLM with its compiled extension, or the vendor's own platform plugin"

_PACKAGES = ("bitsandbytes", "torchao")
"""Quantizations whose kernels come with a package of their own."""

_SELECTIVE_SCAN = "selective_scan_fwd, Mamba's scan,"
_MINIMAX_M3 = "fused_minimax_m3_qknorm_rope_kv_insert"
_ARCHITECTURES = {
    "FalconMambaForCausalLM": _SELECTIVE_SCAN,
    "JambaForCausalLM": _SELECTIVE_SCAN,
    "JambaForSequenceClassification": _SELECTIVE_SCAN,
    "MambaForCausalLM": _SELECTIVE_SCAN,
    "K2HorizonForCausalLM": "rms_norm, which the model calls past vLLM's layers,",
    "MiniMaxM3MTP": _MINIMAX_M3,
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3,
}
"""Models that call the extension themselves, and what they call."""

_DRAFTS = ("dflash", "dspark")
"""Speculation whose draft models call the extension's rms_norm and rotary_embedding themselves."""

_FP8_SINCE = (8, 9)
"""Compute capability from which Triton compiles conversions to FP8."""


def sentence(vendor: str, what: str, why: str, advice: str = _ELSEWHERE) -> str:
    """A refusal as people read it."""
    return f"vllm_fl's platform for {vendor} does not serve {what}: {why}; {advice}"


def refusals(
    config: VllmConfig,
    vendor: str,
    *,
    device_type: str,
    capability: Callable[[], tuple[int, int] | None],
) -> Iterator[str]:
    """Why a configuration cannot be served, a sentence each.

    Args:
        capability: tells CUDA's compute capability; asked only where it matters.
    """
    for what, why, *advice in (
        *_of_devices(config, device_type),
        *_of_cache(config, capability),
        *_of_model(config),
        *_of_speculation(config),
    ):
        yield sentence(vendor, what, why, *advice)


def _of_devices(config: VllmConfig, device_type: str) -> Iterator[tuple[str, ...]]:
    if device_type != "cuda":
        yield (
            f"devices of PyTorch's type '{device_type}'",
            "vLLM's own worker drives devices of type 'cuda' only",
            "use the vendor's own platform plugin",
        )
    parallel = config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        yield (
            "more than one device (tensor, pipeline or data parallelism)",
            "vLLM captures graphs with the communicators of its own platforms only",
            f"use one device, or {_ELSEWHERE.removeprefix('use ')}",
        )


def _of_cache(
    config: VllmConfig, capability: Callable[[], tuple[int, int] | None]
) -> Iterator[tuple[str, ...]]:
    if config.kv_transfer_config is not None:
        yield (
            "a KV connector (transfer or offloading of the KV cache)",
            "its copies are kernels of vLLM's compiled extension, or ask for vLLM's own platform",
        )
    dtype = str(config.cache_config.cache_dtype)
    if dtype.startswith(("nvfp4", "turboquant", "ultraquant")) or dtype.endswith(("_inc", "_mla")):
        yield (
            f"a KV cache of type '{dtype}'",
            "vLLM's Triton attention has no such cache",
            "use --kv-cache-dtype auto or fp8",
        )
    elif "fp8" in dtype:
        found = capability()
        if found is not None and found < _FP8_SINCE:
            yield (
                f"a KV cache of type '{dtype}' on compute capability {found[0]}.{found[1]}",
                "Triton converts to FP8 from 8.9 on",
                "use --kv-cache-dtype auto",
            )


def _of_weights(model: Any, whose: str = "") -> Iterator[tuple[str, ...]]:
    """What holds for the served model and for the draft model of a speculator."""
    if model.quantization is not None and model.quantization not in _PACKAGES:
        yield (
            f"{whose}weights quantized as '{model.quantization}'",
            "the kernels are in vLLM's compiled extension, and are chosen on its own platforms",
            f"load unquantized weights, or {_ELSEWHERE}",
        )
    for name in model.architectures:
        if name in _ARCHITECTURES:
            kernel = _ARCHITECTURES[name]
            yield f"{whose}{name}", f"it calls {kernel} of vLLM's compiled extension"
    if model.use_mla:
        yield (
            f"{whose}multi-head latent attention (MLA)",
            "its cache is written and gathered by kernels of vLLM's compiled extension",
        )


def _of_model(config: VllmConfig) -> Iterator[tuple[str, ...]]:
    model = config.model_config
    if model is None:
        return
    yield from _of_weights(model)
    if model.is_encoder_decoder and not _shares_indices():
        yield (
            "encoder-decoder models",
            "this vLLM refuses two attention layers of one index on a platform out of its tree",
            "use vLLM 0.28 or later",
        )
    if not model.is_moe:
        return
    if config.lora_config is not None:
        yield (
            "LoRA adapters on a mixture of experts",
            "their tokens are sorted by moe_lora_align_block_size of vLLM's compiled extension",
            "merge the adapter into the weights",
        )
    unserved = [f"{op} ({why})" for op in ROUTING if (why := why_unserved(op)) is not None]
    if unserved:
        yield "mixtures of experts", f"nothing serves {', '.join(unserved)}"


def _of_speculation(config: VllmConfig) -> Iterator[tuple[str, ...]]:
    speculation: Any = config.speculative_config
    method = None if speculation is None else str(speculation.method)
    draft = getattr(speculation, "draft_model_config", None)
    if draft is not None and draft is not config.model_config:  # it is for n-grams
        yield from _of_weights(draft, "a draft model's ")
    if method in _DRAFTS:
        yield (
            f"speculative decoding by '{method}'",
            "its draft model calls rms_norm and rotary_embedding of vLLM's compiled extension",
            "use ngram, eagle or a draft model",
        )
    if method == "draft_model" and not _shares_indices():
        yield (
            "speculative decoding by a draft model",
            "this vLLM refuses two attention layers of one index on a platform out of its tree",
            "use ngram or eagle, or vLLM 0.28 or later",
        )


def _shares_indices() -> bool:
    """Whether vLLM asks the platform if two attention layers may have one index: since 0.28."""
    return hasattr(Platform, "check_runner_kv_caches_multi_layer")


def why_unserved(op: str) -> str | None:
    """Why no implementation takes an operator's place in vLLM, or None."""
    from ..dispatch.default import get_default_manager
    from ..dispatch.errors import DispatchError
    from .functions import FUNCTIONS

    manager = get_default_manager()
    if op not in {spec.op for spec in FUNCTIONS}:
        return "vllm_fl does not reach vLLM's function"
    if not manager.config.serves_layer(op):
        return "the OOT lists leave it native"
    try:
        decision = manager.decide(op, mode="eager", layer=True)
    except DispatchError as error:
        return str(error)
    return None if decision.winner is not None else decision.reason
