# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib

import pytest

from tests.backends.helpers import cpu_manager

pytestmark = pytest.mark.usefixtures("kernels")


def test_the_selector_names_a_class_of_vllms_that_exists(vllm_layers):
    path = cpu_manager().call("attention_backend")
    module, _, name = path.rpartition(".")
    assert name == "CPUAttentionBackend"
    assert getattr(importlib.import_module(module), name).get_name() == "CPU_ATTN"


@pytest.mark.parametrize("question", ({"use_mla": True}, {"use_sparse": True}), ids=str)
def test_latent_and_sparse_attention_are_refused_in_words(question):
    decision = cpu_manager().explain("attention_backend", **question)
    assert decision.winner_id is None
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert reasons["vendor.cpu"] == "vLLM's CPU attention has neither MLA nor sparse attention"
