# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/conformance.py and memcheck.py, on a CPU."""

from __future__ import annotations

import importlib
import json

import torch

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops import CONTRACTS

DRY = ("--device", "cpu")


def load(name):
    return importlib.import_module(name)


def test_cases_go_on_where_an_ended_command_was(tmp_path, capsys):
    out = tmp_path / "cases.json"
    command = ["cases", str(out), "reference.torch", *DRY, "--ops", "silu_and_mul"]
    command += ["--dtypes", "float32", "--workers", "1"]
    assert load("conformance").main(command) == 0
    first = json.loads(out.read_text())
    count = len(first["results"])
    assert count > 5 and {r["status"] for r in first["results"]} == {"passed"}
    out.unlink()
    lines = out.with_suffix(".lines")
    kept = lines.read_text().splitlines()[: count - 2]
    lines.write_text("\n".join(kept) + '\n{"op": "half')
    assert load("conformance").main(command) == 0
    again = json.loads(out.read_text())["results"]
    assert sorted(r["case"] for r in again) == sorted(r["case"] for r in first["results"])
    assert again[: len(kept)] == [json.loads(line) for line in kept]
    assert f"CONFORMANCE reference.torch: {{'passed': {count}}}" in capsys.readouterr().out


def test_an_implementation_that_is_not_there_is_a_failure_with_its_reason(tmp_path):
    out = tmp_path / "cases.json"
    assert load("conformance").main(["cases", str(out), "vendor.nobody", *DRY]) == 1
    assert json.loads(out.read_text())["error"] == "it is not registered"


def test_a_batch_whose_rows_have_other_bits_is_named():
    conformance = load("conformance")
    contract = next(c for c in CONTRACTS if c.name == "silu_and_mul")

    def drifting(x):
        out = contract.reference(x)
        return out + 1 if x.shape[0] == 7 else out

    def impl(fn):
        return OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, fn, vendor="x")

    args = (torch.randn(512, 8),)
    right = conformance.all_batches(impl(contract.reference), contract, args, 3)
    assert right == {"batches": 171, "differ": []}
    assert conformance.all_batches(impl(drifting), contract, args, 3)["differ"] == [7]


def test_batches_take_slices_as_slices():
    seen = []
    contract = next(c for c in CONTRACTS if c.name == "rotary_embedding")

    def rope(*args):
        seen.append(args[1].stride())
        return contract.reference(*args)

    impl = OpImpl("rotary_embedding", "vendor.x", BackendImplKind.VENDOR, rope, vendor="x")
    sized = dict(load("kernel_points").batch_arguments("rotary_embedding", "float32", 512))
    found = load("conformance").all_batches(impl, contract, sized["16/8"](), 256)
    assert found == {"batches": 2, "differ": []}
    assert set(seen) == {(32 * 128, 1)}
