# SPDX-License-Identifier: Apache-2.0
"""Logits on their way to a sampled token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..dispatch.types import OpSignature
from .contract import CallSite, Case, OpContract, exactly, half_and_single

__all__ = ["APPLY_REPETITION_PENALTIES", "APPLY_TOP_K_TOP_P", "CONTRACTS"]

_Tensors = tuple[torch.Tensor | None, ...]


# ----------------------------------------------------------------- repetition penalties


def _apply_repetition_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_mask: torch.Tensor,
    repetition_penalties: torch.Tensor,
) -> torch.Tensor:
    """One product with a factor, as vLLM computes it where it has no kernel."""
    penalties = torch.where(prompt_mask | output_mask, repetition_penalties.unsqueeze(1), 1.0)
    return (logits * torch.where(logits > 0, 1.0 / penalties, penalties)).contiguous()


def _like_logits(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _penalty_inputs(
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    pad: int = 0,
    permuted: bool = False,
    low: float = 0.5,
    high: float = 2.0,
    specials: bool = False,
) -> tuple[Any, ...]:
    seqs, vocab = shape
    logits = (scale * torch.randn(seqs, vocab + pad, generator=generator)).to(dtype)
    if permuted:
        logits = logits.t().contiguous().t()
    if specials:
        for column, value in enumerate((float("inf"), -float("inf"), float("nan"), 0.0, -0.0)):
            logits[:, column::7] = value
    seen = torch.rand(2, seqs, vocab + pad, generator=generator) < 0.3
    penalties = torch.rand(seqs, generator=generator) * (high - low) + low
    return (logits[:, :vocab], seen[0, :, :vocab], seen[1, :, :vocab], penalties.to(dtype))


_PENALTY_CASES = tuple(
    Case(name, partial(_penalty_inputs, shape, **changes))
    for name, shape, changes in (
        ("one token", (1, 128), {}),
        ("zero tokens", (0, 128), {}),
        ("odd size", (7, 61), {}),
        ("prime vocabulary", (3, 4099), {}),
        ("vocabulary of one", (5, 1), {}),
        ("tiny values", (3, 128), {"scale": 1e-3}),
        ("huge values", (3, 128), {"scale": 1e4}),
        ("slice of wider rows", (5, 128), {"pad": 19}),
        ("permuted", (5, 128), {"permuted": True}),
        ("penalty of one changes nothing", (4, 128), {"low": 1.0, "high": 1.0}),
        ("penalty below one rewards", (4, 128), {"low": 0.25, "high": 0.9}),
        ("inf and nan, and zeros", (4, 128), {"specials": True}),
    )
)

APPLY_REPETITION_PENALTIES = OpContract(
    signature=OpSignature.parse(
        "apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)",
        inplace=("logits",),
        summary=(
            "Where a token was seen, in the prompt or in the output, a positive logit is divided "
            "by its sequence's penalty and any other is multiplied by it. logits: (seqs, vocab), "
            "masks: bool, penalties: (seqs,), above zero; vLLM gives float32."
        ),
    ),
    schema=(
        "(Tensor logits, Tensor prompt_mask, Tensor output_mask, Tensor repetition_penalties) "
        "-> Tensor"
    ),
    reference=_apply_repetition_penalties,
    fake=_like_logits,
    arrays={
        "logits": "T[seqs, vocab]",
        "prompt_mask": "bool[seqs, vocab]",
        "output_mask": "bool[seqs, vocab]",
        "repetition_penalties": "T[seqs]",
    },
    results=("T[seqs, vocab]",),
    without={"leading shapes": "logits are one row for each sequence, as vLLM has them"},
    batched=("logits", "prompt_mask", "output_mask", "repetition_penalties"),
    call_sites=(
        CallSite(
            "vllm._custom_ops:apply_repetition_penalties",
            "the module's attribute, which model_executor.layers.utils imports at each call",
            note="the first model runner",
        ),
        CallSite(
            "vllm.v1.worker.gpu.sample.penalties:apply_penalties",
            "the module's attribute; the packed masks are unpacked for the op, and PyTorch applies "
            "the other two penalties to its result",
            device_types=("cuda",),
            note="the second model runner (the default where vLLM has Triton and the model allows "
            "it), whose own Triton kernel does all three: served where a policy asks for it",
        ),
    ),
    source="https://arxiv.org/abs/1909.05858, section 4.1",
    cases=_PENALTY_CASES,
    tolerances=half_and_single(
        half=1.51,
        single=1.51,
        why="a quotient is rounded once (0.5 ulp); as a product with the reciprocal it is rounded "
        "twice, and the reciprocal's half ulp weighs up to 1 ulp in the product's binade",
    ),
)


# ------------------------------------------------------------------------ top-k and top-p


def _apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    if (k is None and p is None) or not logits.shape[0]:
        return logits.clone(memory_format=torch.contiguous_format)
    if k is not None and p is None and logits.device.type == "cpu":
        return _largest_only(logits, k)
    ascending, order = logits.sort(dim=-1)
    if k is not None:
        kth = ascending.gather(1, logits.shape[1] - k.long().unsqueeze(1))
        ascending = ascending.masked_fill(ascending < kth, -float("inf"))
    if p is not None:
        dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p.unsqueeze(1)
        dropped[:, -1] = False
        ascending = ascending.masked_fill(dropped, -float("inf"))
    return logits.new_empty(logits.shape).scatter_(1, order, ascending)


def _largest_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Without sorting the vocabulary. The number of values to find is read from the device,
    which on others than the CPU would wait for it."""
    limited = k < logits.shape[1]
    wanted = k.long().masked_fill(~limited, 1).unsqueeze(1)
    kth = logits.topk(int(wanted.max()), dim=-1).values.gather(1, wanted - 1)
    kth = kth.masked_fill(~limited.unsqueeze(1), -float("inf"))
    return logits.masked_fill(logits < kth, -float("inf"))


def _same_shape(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _settled(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the contract leaves open: (tokens that may stay or go, bool (seqs, vocab); the
    least and the largest number of tokens that stay, (seqs,))."""
    vocab = logits.shape[1]
    values, order = logits.double().sort(dim=-1)
    finite = values > -float("inf")
    # A sum of `vocab` float32 terms is off by up to vocab * 2**-24 of itself, the softmax's own
    # sum by as much again, and its exponentials by a few units.
    slack = (2 * vocab + 8) * 2.0**-24
    outcomes = []  # 0: goes, 2: stays, 1: either
    for exactly_k in (False, True) if k is not None else (False,):
        inside = finite
        if k is not None:
            first = vocab - k.to(values.device).long().unsqueeze(1)
            rank = torch.arange(vocab, device=values.device)
            inside = finite & (rank >= first if exactly_k else values >= values.gather(1, first))
        stays = torch.full_like(order, 2)
        if p is not None:
            mass = values.masked_fill(~inside, -float("inf")).softmax(dim=-1).cumsum(dim=-1)
            bound = 1 - p.to(values).unsqueeze(1)
            stays = (mass > bound - slack).long() + (mass > bound + slack).long()
            stays[:, -1:] = 2
        outcomes.append(stays.masked_fill(~inside, 0))
    every = torch.stack(outcomes)
    least = (every == 2).sum(dim=-1).amin(dim=0)
    most = (every > 0).sum(dim=-1).amax(dim=0)
    # Of equal logits any may stand for another.
    group = torch.zeros_like(order)
    group[:, 1:] = (values[:, 1:] != values[:, :-1]).cumsum(dim=-1)
    low = torch.full_like(order, 2).scatter_reduce(1, group, every.amin(dim=0), "amin")
    high = torch.zeros_like(order).scatter_reduce(1, group, every.amax(dim=0), "amax")
    fixed = (low.gather(1, group) == 2) | (high.gather(1, group) == 0)
    return torch.zeros_like(finite).scatter(1, order, finite & ~fixed), least, most


def _canonical(outputs: _Tensors, args: tuple[Any, ...]) -> _Tensors:
    """(the logits, with 0 where the contract leaves a token open; by how many tokens each row
    keeps too many or too few)."""
    (found,) = outputs
    assert found is not None
    logits, k, p = (v.to(found.device) if torch.is_tensor(v) else v for v in args)
    left_open, least, most = _settled(logits, k, p)
    kept = ((found > -float("inf")) & (logits > -float("inf"))).sum(dim=-1)
    wrong = (kept - most).clamp(min=0) + (least - kept).clamp(min=0)
    return found.masked_fill(left_open, 0.0), wrong


def _choice_inputs(
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    k: int | str | None = "any",
    p: float | str | None = "any",
    scale: float = 1.0,
    pad: int = 0,
    permuted: bool = False,
    levels: int | None = None,
    masked: float = 0.0,
    index: torch.dtype = torch.int32,
) -> tuple[Any, ...]:
    """k and p: a value for all rows, or "any". levels: so many different logits, with ties."""
    seqs, vocab = shape
    logits = scale * torch.randn(seqs, vocab + pad, generator=generator)
    if levels is not None:
        logits = torch.randint(levels, logits.shape, generator=generator) / 2.0
    if masked:
        logits[torch.rand(logits.shape, generator=generator) < masked] = -float("inf")
        logits[:, 0] = 0.25  # no row is masked as a whole
    if permuted:
        logits = logits.t().contiguous().t()
    counts = torch.randint(1, vocab + 1, (seqs,), generator=generator)
    if k == "vocabulary":
        counts[:] = vocab
    elif isinstance(k, int):
        counts[:] = k
    shares = torch.rand(seqs, generator=generator) * 0.9 + 0.05
    if isinstance(p, float):
        shares[:] = p
    return (
        logits.to(dtype)[:, :vocab],
        None if k is None else counts.to(index),
        None if p is None else shares.to(dtype),
    )


_CHOICE_CASES = tuple(
    Case(name, partial(_choice_inputs, shape, **changes))
    for name, shape, changes in (
        ("one token", (1, 128), {}),
        ("zero tokens", (0, 128), {}),
        ("odd size", (7, 61), {}),
        ("prime vocabulary", (5, 997), {}),
        ("vocabulary of one", (3, 1), {}),
        ("k alone", (6, 128), {"p": None}),
        ("k of 64 bits", (6, 128), {"p": None, "index": torch.int64}),
        ("p alone", (6, 128), {"k": None}),
        ("neither", (4, 128), {"k": None, "p": None}),
        ("k is one", (4, 128), {"k": 1}),
        ("k is the vocabulary", (4, 128), {"k": "vocabulary"}),
        ("k alone is the vocabulary", (4, 128), {"k": "vocabulary", "p": None}),
        ("p is one", (4, 128), {"p": 1.0}),
        ("k is the vocabulary and p is one", (4, 128), {"k": "vocabulary", "p": 1.0}),
        ("p near zero keeps one", (4, 128), {"k": None, "p": 1e-6}),
        ("tiny values", (3, 128), {"scale": 1e-3}),
        ("huge values", (3, 128), {"scale": 1e4}),
        ("slice of wider rows", (5, 128), {"pad": 19}),
        ("permuted", (5, 128), {"permuted": True}),
        ("permuted, k alone", (5, 128), {"permuted": True, "p": None}),
        ("masked tokens", (5, 128), {"masked": 0.7}),
        ("fewer tokens left than k", (5, 128), {"masked": 0.9, "k": 100}),
        ("ties at the k-th", (5, 128), {"levels": 8, "k": 20, "p": None}),
        ("ties at p", (5, 128), {"levels": 8, "k": None}),
        ("ties at both", (5, 128), {"levels": 6, "k": 50}),
        ("all equal", (3, 128), {"levels": 1, "k": None, "p": 0.5}),
    )
)

APPLY_TOP_K_TOP_P = OpContract(
    signature=OpSignature.parse(
        "apply_top_k_top_p(logits, k, p)",
        inplace=("logits",),
        summary=(
            "Keeps in each row the k largest logits, then of these the most probable ones whose "
            "probabilities reach p together, at least one; the others become -inf. logits: "
            "float32 (seqs, vocab); k: (seqs,), 1 to vocab, or None; p: (seqs,), above 0 to 1, or "
            "None. Which of several equal logits stay is open, and so is whether all that equal "
            "the k-th do."
        ),
    ),
    schema="(Tensor logits, Tensor? k, Tensor? p) -> Tensor",
    reference=_apply_top_k_top_p,
    fake=_same_shape,
    arrays={"logits": "T[seqs, vocab]", "k": "index[seqs]?", "p": "T[seqs]?"},
    results=("T[seqs, vocab]",),
    canonical=_canonical,
    without={
        "leading shapes": "logits are one row for each sequence, as vLLM has them",
        "inf and nan": "with +inf or NaN there is no probability; masked tokens have -inf",
    },
    batched=("logits", "k", "p"),
    call_sites=(
        CallSite(
            "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
            "the module's attribute, and that of each module which imports it by name",
            note="both model runners; on CUDA and ROCm a fused sampler (FlashInfer, AITER) takes "
            "its place where it is in use",
        ),
    ),
    source="https://arxiv.org/abs/1904.09751, section 3.1 (top-p), 3.2 (top-k)",
    cases=_CHOICE_CASES,
    tolerances=exactly(
        torch.float32,
        why="a logit stays as it is or becomes -inf: nothing is rounded. Where rounding decides "
        "whether one stays, within the error of the sums, the contract leaves it open",
    ),
)

CONTRACTS = (APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P)
