# SPDX-License-Identifier: Apache-2.0
"""The test that the pytest plugin runs where a vendor has no test file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vendor import VendorCase

__all__ = ["test_conformance"]


def test_conformance(vllm_fl_case: VendorCase) -> None:
    """One case of one implementation in one dtype."""
    vllm_fl_case.check()
