# SPDX-License-Identifier: Apache-2.0
"""Everything here runs inside the harness, which changes a process for good: `test_ascend.py` in
the folder above gives it one of its own, and no other session collects it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

RELEASE = os.environ.get("ASCEND_HARNESS", "")
"""The release of torch_npu whose schemas are defined; empty in any other session."""

collect_ignore_glob = [] if RELEASE else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def torch_npu() -> Iterator[object]:
    """The stand-in, with vendor.ascend loaded."""
    from tests.backends.vendor.ascend.harness import install
    from vllm_fl.backends.vendor.ascend.ascend import backend

    module = install(RELEASE)
    backend.load()
    yield module


@pytest.fixture(autouse=True)
def state(torch_npu: object) -> Iterator[object]:
    """The harness's state, as in a new process."""
    from tests.backends.vendor.ascend.harness import STATE

    STATE.reset()
    yield STATE
