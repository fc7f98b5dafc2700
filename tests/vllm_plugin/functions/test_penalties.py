# SPDX-License-Identifier: Apache-2.0
"""The second model runner's penalties: its Triton kernel's arguments, mapped to the op."""

from __future__ import annotations

import pytest
import torch

from .helpers import vllm_module

REQUESTS, VOCAB = 6, 77


def arguments(seed: int = 0, drafts: bool = True) -> dict[str, torch.Tensor]:
    """As the sampler has them: 4 of 6 requests, two of which have drafts behind them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows = [5, 5, 5, 0, 3, 3, 1] if drafts else [5, 0, 3, 1]
    positions = [0, 1, 2, 0, 0, 1, 0] if drafts else [0] * 4
    counts = integers(0, 4, REQUESTS, VOCAB) * (integers(0, 3, REQUESTS, VOCAB) == 0)
    return {
        "logits": torch.randn(len(rows), VOCAB, generator=generator),
        "expanded_idx_mapping": torch.tensor(rows, dtype=torch.int32),
        "token_ids": integers(0, VOCAB, len(rows) + 3).int(),
        "expanded_local_pos": torch.tensor(positions, dtype=torch.int32),
        "repetition_penalty": torch.tensor([1.0, 2.0, 0.7, 1.0, 1.3, 1.5]),
        "frequency_penalty": torch.tensor([0.3, 0.0, 0.0, 0.0, 0.1, 0.2]),
        "presence_penalty": torch.tensor([0.0, 0.5, 0.0, 0.0, 0.1, -0.4]),
        "prompt_bin_mask": integers(-(2**31), 2**31, REQUESTS, -(-VOCAB // 32)).int(),
        "output_bin_counts": counts.int(),
    }


def by_hand(a: dict[str, torch.Tensor]) -> torch.Tensor:
    """One token after the other, in float64, as the kernel's source says it."""
    logits = a["logits"].double().clone()
    for token, (request, position) in enumerate(
        zip(a["expanded_idx_mapping"].tolist(), a["expanded_local_pos"].tolist(), strict=True)
    ):
        counts = a["output_bin_counts"][request].clone()
        for earlier in range(position):
            counts[a["token_ids"][token - position + earlier + 1]] += 1
        for word in range(VOCAB):
            bits = int(a["prompt_bin_mask"][request, word // 32])
            seen = (bits >> word % 32) & 1 or counts[word] > 0
            scale = float(a["repetition_penalty"][request]) if seen else 1.0
            value = logits[token, word]
            value = value / scale if value > 0 else value * scale
            value = value - a["frequency_penalty"][request].double() * counts[word]
            logits[token, word] = value - a["presence_penalty"][request].double() * (
                counts[word] > 0
            )
    return logits


@pytest.mark.parametrize("drafts", [False, True], ids=["one token each", "drafts"])
def test_all_three_penalties_are_applied_in_place(load, drafts) -> None:
    module = vllm_module("v1.worker.gpu.sample.penalties")
    given = arguments(drafts=drafts)
    expected = by_hand(given)
    load()
    assert module.apply_penalties(*given.values()) is None
    torch.testing.assert_close(given["logits"].double(), expected, rtol=1e-6, atol=1e-6)


def test_it_is_served_where_a_policy_asks_for_it(load, monkeypatch, chosen) -> None:
    """On a device for which vLLM tuned its kernel."""
    monkeypatch.setattr("vllm_fl.vllm_plugin.functions.serve.runs_triton", lambda: True)
    module = vllm_module("v1.worker.gpu.sample.penalties")
    path = "vllm.v1.worker.gpu.sample.penalties:apply_penalties"
    native = module.apply_penalties
    load()
    assert module.apply_penalties is native
    assert chosen(path) == (
        "vLLM's own kernel is here, and no order names an implementation of "
        "apply_repetition_penalties"
    )
    load(PER_OP="apply_repetition_penalties=reference")
    assert module.apply_penalties.__wrapped__ is native
    assert chosen(path) == "reference.torch"
