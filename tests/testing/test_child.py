# SPDX-License-Identifier: Apache-2.0
"""A device that fails takes its process with it, and no case but its own."""

from __future__ import annotations

import torch

from vllm_fl.dispatch import BackendImplKind, OpImpl
from vllm_fl.ops import activation
from vllm_fl.testing import check_implementation, child
from vllm_fl.testing.report import Kind


def test_after_a_device_error_the_case_is_a_crash_and_the_next_has_a_new_process(monkeypatch):
    broken: list[bool] = []

    def synchronize(device: str) -> None:
        if broken:
            raise RuntimeError("CUDA error: misaligned address\nand what else it says")

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            broken.append(True)
        return activation.SILU_AND_MUL.reference(x)

    monkeypatch.setattr(child, "synchronize", synchronize)
    impl = OpImpl(
        "silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu_and_mul, vendor="acme"
    )
    report = check_implementation(impl, dtypes=["float32"], compile=False)
    struck = {r.case for r in report.results if r.problems}
    sevens = {
        case.name
        for case in activation.SILU_AND_MUL.cases_for(torch.float32)
        if case.make(torch.float32, torch.Generator().manual_seed(0))[0].shape[0] == 7
    }
    assert struck and struck <= sevens
    assert {f.kind for f in report.failures} == {Kind.CRASH}
    assert all(
        "the device failed: CUDA error: misaligned address" in f.what for f in report.failures
    )
    assert len(report.results) > len(struck)
