# SPDX-License-Identifier: Apache-2.0
"""Attention: merging of partial results, and the selector of a backend class."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, half_and_single

__all__ = ["ATTENTION_BACKEND", "CONTRACTS", "MERGE_ATTN_STATES"]

ATTENTION_BACKEND = OpSignature.parse(
    "attention_backend(use_mla=False, use_sparse=False)",
    selector=True,
    summary="The dotted path of the attention backend class for this device.",
)

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def _empty_is_minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """An empty part's logsumexp: FlashAttention 3 says -inf, FlashAttention 2 says inf."""
    return torch.where(lse == float("inf"), float("-inf"), lse)


def _merge(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    merged_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results, in the dtype that the parts have; nothing is rounded to another."""
    prefix = _empty_is_minus_infinity(prefix_lse)
    suffix = _empty_is_minus_infinity(suffix_lse)
    largest = torch.maximum(prefix, suffix)
    empty = largest == float("-inf")
    prefix_sum, suffix_sum = (prefix - largest).exp(), (suffix - largest).exp()
    both = prefix_sum + suffix_sum
    prefix_share, suffix_share = (
        (part / both).transpose(0, 1).unsqueeze(-1) for part in (prefix_sum, suffix_sum)
    )
    output = prefix_output * prefix_share + suffix_output * suffix_share
    output = output.masked_fill(empty.transpose(0, 1).unsqueeze(-1), 0.0)
    lse = (both.log() + largest).masked_fill(empty, float("-inf"))
    if merged_tokens is None:
        return output, lse
    merged = torch.arange(lse.shape[1], device=lse.device) < merged_tokens
    return (
        torch.where(merged[:, None, None], output, suffix_output),
        torch.where(merged, lse, suffix_lse),
    )


def _merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, lse = _merge(
        prefix_output.float(),
        prefix_lse.float(),
        suffix_output.float(),
        suffix_lse.float(),
        prefill_tokens_with_context,
    )
    if output_scale is None:
        output = output.to(prefix_output.dtype)
    else:
        output = (output / output_scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return output, lse if return_lse else None


def _fake(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = prefix_output.dtype if output_scale is None else torch.float8_e4m3fn
    output = prefix_output.new_empty(prefix_output.shape, dtype=dtype)
    if return_lse:
        return output, prefix_lse.new_empty(prefix_lse.shape, dtype=torch.float32)
    return output, output.new_empty(0)  # a torch op cannot return None


def _facts(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> dict[str, Any]:
    return {"num_heads": prefix_output.shape[1], "head_size": prefix_output.shape[2]}


def _exact(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, lse = _merge(
        prefix_output, prefix_lse, suffix_output, suffix_lse, prefill_tokens_with_context
    )
    if output_scale is not None:
        output = (output / output_scale).clamp(-_FP8_MAX, _FP8_MAX)
    return output, lse if return_lse else None


def _magnitude(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """The shares of both parts, and of the logsumexp the larger one, of which log(1 .. 2) is
    added."""
    terms, lse = _merge(
        prefix_output.abs(),
        prefix_lse,
        suffix_output.abs(),
        suffix_lse,
        prefill_tokens_with_context,
    )
    if output_scale is not None:
        # Saturation ends the error as well.
        terms = (terms / output_scale).clamp(max=_FP8_MAX)
    return terms, lse.abs().nan_to_num(posinf=0.0).clamp(min=1.0) if return_lse else None


def _inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    tokens: int = 7,
    heads: int = 3,
    head_size: int = 16,
    padding: int = 0,
    transposed: bool = False,
    spread: float = 3.0,
    level: float = 0.0,
    magnitude: float = 1.0,
    empty: str = "",
    sign: float = -1.0,
    merged_tokens: int | None = None,
    scale: float | None = None,
    return_lse: bool = True,
    special: bool = False,
) -> tuple[Any, ...]:
    def part() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (tokens, heads, head_size + padding)
        output = (magnitude * torch.randn(shape, generator=generator)).to(dtype)
        lse = level + spread * torch.randn(tokens, heads, generator=generator)
        lse = lse.transpose(0, 1) if transposed else lse.transpose(0, 1).contiguous()
        return output[..., :head_size], lse

    (prefix_output, prefix_lse), (suffix_output, suffix_lse) = part(), part()

    def clear(output: torch.Tensor, lse: torch.Tensor, start: int) -> None:
        lse[:, start::3] = sign * float("inf")
        output[start::3] = 0.0

    if empty in ("prefix", "both"):
        clear(prefix_output, prefix_lse, 0)
    if empty in ("suffix", "both"):
        clear(suffix_output, suffix_lse, 0 if empty == "both" else 1)
    if special:
        prefix_output[0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        suffix_output[0, 0, 0] = -float("inf")
    return (
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        merged_tokens,
        None if scale is None else torch.tensor(scale),
        return_lse,
    )


_CASES: dict[str, dict[str, Any]] = {
    "several tokens": {},
    "one token": {"tokens": 1},
    "zero tokens": {"tokens": 0},
    "many tokens": {"tokens": 67},
    "odd and prime sizes": {"tokens": 5, "heads": 7, "head_size": 37},
    "one head": {"heads": 1, "head_size": 128},
    "heads of 512": {"tokens": 2, "head_size": 512},
    "no logsumexp": {"return_lse": False},
    "slices of padded heads": {"padding": 8},
    "permuted logsumexp": {"transposed": True},
    "no prefix": {"empty": "prefix"},
    "no suffix": {"empty": "suffix"},
    "no prefix, as FlashAttention 2 says it": {"empty": "prefix", "sign": 1.0},
    "no suffix, as FlashAttention 2 says it": {"empty": "suffix", "sign": 1.0},
    "neither": {"empty": "both"},
    "neither, as FlashAttention 2 says it": {"empty": "both", "sign": 1.0},
    "far apart": {"spread": 60.0},
    "large logsumexp": {"level": 1e4},
    "very negative logsumexp": {"level": -1e4},
    "some tokens with context": {"merged_tokens": 3},
    "no token with context": {"merged_tokens": 0},
    "all tokens with context": {"merged_tokens": 7},
    "tiny values": {"magnitude": 1e-3},
    "huge values": {"magnitude": 1e4},
    "inf and nan": {"special": True},
    "fp8": {"scale": 0.02},
    "fp8, some tokens with context": {"scale": 0.5, "merged_tokens": 3},
    "fp8, huge values saturate": {"scale": 2.0, "magnitude": 1e4},
}

MERGE_ATTN_STATES = OpContract(
    signature=OpSignature.parse(
        "merge_attn_states(prefix_output, prefix_lse, suffix_output, suffix_lse, "
        "prefill_tokens_with_context=None, output_scale=None, return_lse=True)",
        facts=_facts,
        fact_names=("num_heads", "head_size"),
        summary=(
            "Attention over the keys of both parts from attention over each: outputs are "
            "(tokens, heads, head_size), logsumexps (heads, tokens); a part with logsumexp -inf "
            "or inf is empty, and two give 0 and -inf; tokens from prefill_tokens_with_context "
            "on take the suffix alone; with output_scale the output is fp8_e4m3, divided by it; "
            "returns (output, logsumexp), the latter None if return_lse is False."
        ),
    ),
    schema=(
        "(Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse, "
        "SymInt? prefill_tokens_with_context=None, Tensor? output_scale=None, "
        "bool return_lse=True) -> (Tensor, Tensor)"
    ),
    reference=_merge_attn_states,
    fake=_fake,
    arrays={
        "prefix_output": "T[tokens, heads, head_size]",
        "prefix_lse": "float32[heads, tokens]",
        "suffix_output": "T[tokens, heads, head_size]",
        "suffix_lse": "float32[heads, tokens]",
        "output_scale": "(float32[] or float32[1])?",
    },
    results=("T|fp8[tokens, heads, head_size]", "float32[heads, tokens]?"),
    constraints=(
        "prefill_tokens_with_context is None or 0 <= prefill_tokens_with_context <= tokens",
    ),
    without={"leading shapes": "tokens are one dimension, as in vLLM's kernels"},
    exact=_exact,
    magnitude=_magnitude,
    call_sites=(
        CallSite(
            "vllm._custom_ops:merge_attn_states",
            "the function, which v1.attention.ops.merge_attn_states calls where the head size "
            "is a multiple of 16 bytes",
            device_types=("cuda",),
            note="vLLM on CPU merges with a PyTorch function of its own",
        ),
        CallSite(
            "vllm.v1.attention.ops.triton_merge_attn_states:merge_attn_states",
            "the function, which v1.attention.ops.merge_attn_states calls elsewhere",
            device_types=("cuda",),
        ),
    ),
    source="section 2.2 of https://arxiv.org/abs/2501.01005",
    cases=tuple(Case(name, partial(_inputs, **settings)) for name, settings in _CASES.items()),
    tolerances=half_and_single(
        half=(0.52, 4),
        single=(8, 4),
        why="the output is rounded once, from float32, in which two exponentials, a sum, a "
        "quotient, two products and a sum are each good to 1 ulp; the exponents are exact "
        "(Sterbenz) where they matter; of half precision's ulp 8 of float32 are 2^-10 at most; "
        "the logsumexp is float32 with every dtype: a logarithm and a sum",
    ),
)

CONTRACTS: tuple[OpContract, ...] = (MERGE_ATTN_STATES,)
