# SPDX-License-Identifier: Apache-2.0
"""For every test: the settings of whoever runs the tests do not reach them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def vllms_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own CPU kernels left out, whether they were built or not. vLLM's refuse layers and
    calls, and lie below whatever a test registers at 110: some tests are about that."""
    from vllm_fl.backends.vendor.cpu import register_ops  # importing it marks the functions

    monkeypatch.setattr(register_ops.fl_backend, "_implementations", [])


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_FL_")}
    for name in kept:
        del os.environ[name]
    yield
    os.environ.update(kept)
