# SPDX-License-Identifier: Apache-2.0
"""vLLM ships three builds of its kernels for x86. Only the one for AVX512_BF16 rounds to
bfloat16; vendor.cpu leaves bfloat16 to the reference where another one is loaded."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backends.helpers import cpu_manager
from tests.backends.vendor.cpu.refusals import fused, gated, norm, rotary
from vllm_fl.backends.vendor.cpu.impl import common

pytestmark = pytest.mark.usefixtures("vllms_kernels_first")

REASON = "bfloat16 is truncated, not rounded: this CPU has no AVX512_BF16"
GUARDED = {
    "silu_and_mul": gated,
    "gelu_new": gated,
    "rms_norm": lambda dtype: norm(torch.ones(3, 64, dtype=dtype)),
    "fused_add_rms_norm": lambda dtype: fused(torch.ones(3, 64, dtype=dtype)),
    "rotary_embedding": lambda dtype: rotary(dtype=dtype),
}
SUM = """
import os, sys, torch
for library in sys.argv[1:]:
    if os.fork() == 0:
        torch.ops.load_library(library)
        places = []
        for dtype in (torch.bfloat16, torch.float16):
            x, residual, weight = (torch.ones(1, 8, dtype=dtype) for _ in range(3))
            residual.fill_(0.75 * torch.finfo(dtype).eps)
            torch.ops._C.fused_add_rms_norm(x, residual, weight[0], 1e-6)
            places.append((residual[0, 0].item() - 1) / torch.finfo(dtype).eps)
        print(os.path.basename(library), *places, flush=True)
        os._exit(0)
    os.wait()
"""
BUILDS = {
    "_C_AVX2.abi3.so": torch.cpu._is_avx2_supported(),
    "_C_AVX512.abi3.so": torch.cpu._is_avx512_supported(),
    "_C.abi3.so": torch.cpu._is_avx512_bf16_supported(),
}
"""vLLM's builds for x86, and whether this CPU can run them."""


@pytest.fixture(scope="module")
def places(kernels) -> dict[str, list[float]]:
    """For each build what 1 plus 3/4 of a last place adds, in last places: 1 if rounded, 0 if
    truncated; of bfloat16 and float16. A process can load one build only, so each has its own."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are builds for x86")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    [folder] = spec.submodule_search_locations
    builds = [str(Path(folder) / name) for name, can_run in BUILDS.items() if can_run]
    done = subprocess.run(
        [sys.executable, "-c", SUM, *builds], capture_output=True, text=True, check=True
    )
    answers = [line.split() for line in done.stdout.splitlines()]
    return {name: [float(x) for x in added] for name, *added in answers}


@pytest.mark.parametrize("build", ("_C_AVX2.abi3.so", "_C_AVX512.abi3.so"))
def test_builds_without_avx512_bf16_truncate_bfloat16_and_round_float16(places, build):
    if not BUILDS[build]:
        pytest.skip("this CPU cannot run that build")
    assert places[build] == [0, 1]


def test_the_build_for_avx512_bf16_rounds_both(places):
    if not BUILDS["_C.abi3.so"]:
        pytest.skip("this CPU cannot run that build")
    assert places["_C.abi3.so"] == [1, 1]


@pytest.mark.parametrize(
    "machine, instructions, expected",
    (("x86_64", True, True), ("x86_64", False, False), ("aarch64", False, True)),
)
def test_only_x86_without_the_instructions_is_left_out(
    monkeypatch, machine, instructions, expected
):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert common._rounds_bfloat16() is expected


@pytest.mark.parametrize("op", GUARDED)
def test_where_it_is_truncated_the_reference_serves_bfloat16_with_the_reason(
    monkeypatch, kernels, op
):
    monkeypatch.setattr(common, "DTYPES", frozenset({torch.float32, torch.float16}))
    manager = cpu_manager()
    decision = manager.explain(op, *GUARDED[op](dtype=torch.bfloat16))
    assert decision.winner_id == "reference.torch"
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert reasons["vendor.cpu"] == REASON
    assert manager.explain(op, *GUARDED[op](dtype=torch.float16)).winner_id == "vendor.cpu"
