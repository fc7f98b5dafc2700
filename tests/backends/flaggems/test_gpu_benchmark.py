# SPDX-License-Identifier: Apache-2.0
"""What of benchmarks/gpu/flaggems.py can be shown without a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_fl.backends.flaggems import register_ops
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.arrays import bind_axes

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
CONTRACT_OF = {contract.name: contract for contract in CONTRACTS}
IMPLS = register_ops.backend.implementations


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("flaggems")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("flaggems", "flaggems_inputs"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.op_name)
def test_the_measured_call_fits_the_contract_and_passes_the_guards(
    benchmark: ModuleType, impl: OpImpl
) -> None:
    contract = CONTRACT_OF[impl.op_name]
    args = benchmark.inputs(impl.op_name, 32, "meta")
    bind_axes(contract.arrays, dict(zip(contract.signature.parameter_names, args, strict=False)))
    assert benchmark.verdict(contract, impl, args) is True


class Pipe(list[Any]):
    """Keeps what is sent."""

    send = list.append


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
def test_cases_are_checked_at_the_first_call_and_at_the_third(
    gems: Mapping[str, OpImpl], benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "loaded", lambda impl: impl.fn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pipe = Pipe()
    benchmark.check("fused_add_rms_norm", "float32", pipe)
    outcomes = {name: outcome for name, outcome, _ in pipe}
    assert outcomes["one token"] == "right"
    assert outcomes["no weight"] == "refused"
    assert set(outcomes.values()) == {"right", "refused"}


def test_a_wrong_kernel_and_one_that_raises_are_told(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            raise RuntimeError("no rows")
        return torch.zeros(*x.shape[:-1], x.shape[-1] // 2)

    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "loaded", lambda impl: kernel)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pipe = Pipe()
    benchmark.check("silu_and_mul", "float32", pipe)
    outcomes = {name: outcome for name, outcome, _ in pipe}
    assert outcomes["one token"] == "WRONG"
    assert outcomes["1-D"] == "raised"


def test_strides_survive_the_way_to_the_device(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    wide = torch.arange(24.0).view(4, 6)
    for x in (wide[:, 1:4], wide.t(), wide, wide[0, :0]):
        [moved] = benchmark.to_device((x,))
        assert torch.equal(moved, x)
        assert moved.stride() == x.stride()


def test_the_report_shows_what_is_wrong_and_what_is_missing(benchmark: ModuleType) -> None:
    text = benchmark.markdown(
        {
            "about": {"device": "H200", "versions": {"torch": "2.11.0"}, "date": "2026-12-01"},
            "right": {"rms_norm": {"bfloat16": {"a": ("right", 0), "b": ("WRONG", [9.0])}}},
            "cost": [
                {"op": "(empty kernel)", "gpu_us": 1.25},
                {"op": "rms_norm", "tokens": 32, "impl": "default.flaggems", "gpu_us": 2.0,
                 "host_us": 9.0, "host_us_through_flaggems": 40.0},
                {"op": "rms_norm", "tokens": 32, "impl": "vendor.cuda", "error": "no kernel"},
            ],
        }
    )  # fmt: skip
    assert "| rms_norm | bfloat16 | 1 | 0 | b: [9.0] |" in text
    assert "| rms_norm | 40.00 | 9.00 | - |" in text
    assert "an empty kernel: 1.25" in text
    assert "| rms_norm | - / - | 2.00 / no kernel | - / - | - / - |" in text
