# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions as an accelerator's worker finds them, with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_fl.vllm_plugin.functions import FUNCTIONS, serve


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not on its CPU platform, and has no extension."""
    monkeypatch.setattr(serve, "on_cpu", lambda: False)
    monkeypatch.setattr(serve, "has_kernels", lambda names: not list(names))


@pytest.fixture
def load(elsewhere: None, register: Callable[..., None]) -> Callable[..., None]:
    """load(PER_OP=...) registers the plugin and binds the functions, as after a model's load."""

    def load(*, compiled: bool = False, **settings: str) -> None:
        register(**settings)
        serve.bind(FUNCTIONS, compiled=compiled)

    return load


@pytest.fixture
def chosen() -> Callable[..., str]:
    """chosen(path): the implementation that serves a function of vLLM, or why none does."""

    def chosen(path: str, op: str | None = None) -> str:
        [record] = [r for r in serve.records if r.spec.path == path and op in (None, r.spec.op)]
        [served] = record.ops
        binding = served.binding
        return served.native_reason if binding is None else str(binding.decision.winner_id)

    return chosen
