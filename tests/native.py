# SPDX-License-Identifier: Apache-2.0
"""What goes first on a CPU in this installation: our kernels where they were built, else vLLM's.

The tests hold either way. Those that are about vLLM's kernels take ours out of the registry."""

from __future__ import annotations

from typing import Any

from vllm_fl.native import native_refusal

NATIVE = native_refusal("cpu") is None
CPU_IMPL = "vendor.cpu.fl" if NATIVE else "vendor.cpu"
CPU_PRIORITY = 110 if NATIVE else 100
CPU_NAMESPACE = "vllm_fl_C" if NATIVE else "_C"
"""As a profile names the kernels."""


def rejected(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A route's rejections, but for that of kernels which this installation lacks."""
    return [r for r in row["rejected"] if NATIVE or r["impl_id"] != "vendor.cpu.fl"]
