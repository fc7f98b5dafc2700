# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/kernels.py: what it measures, on a CPU, and what it says of it."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

IDS = {"ours": "vendor.cuda.fl", "vllm": "vendor.cuda", "flaggems": "default.flaggems"}


def load(name):
    return importlib.import_module(name)


def row(group="silu_and_mul", tokens=32, moved=10**6, us=None, why=None, **more):
    filled = {"empty": 0.7, "copy": 2.0, **(us or {})}
    return {
        "group": group, "op": group, "dtype": "bfloat16", "size": 4096, "tokens": tokens,
        "moved": moved, "us": filled, "rounds": {}, "why": why or {}, "host_us": {}, **more,
    }  # fmt: skip


def report(rows, left_out=()):
    about = {"date": "2026-12-01", "device": "a GPU", "python": "3.12", "versions": {"torch": "2"}}
    about["command"] = "python kernels.py OUT"
    return {"about": about, "columns": IDS, "rows": rows, "left_out": list(left_out), "seconds": 1}


def goal_of(rows, name):
    tables = load("kernel_tables")
    return next(g for g in tables.goals(rows) if g["goal"] == getattr(tables, name))


def test_a_decode_call_is_fast_enough_by_its_ratio_or_by_its_distance_from_empty():
    far = row(us={"ours": 2.0, "vllm": 2.2})
    assert goal_of([far], "DECODE_GOAL")["missed"] == 1
    assert goal_of([row(us={"ours": 2.0, "vllm": 2.7})], "DECODE_GOAL")["missed"] == 0
    assert goal_of([row(us={"ours": 0.99, "vllm": 1.0})], "DECODE_GOAL")["missed"] == 0
    assert goal_of([row(us={"ours": 2.0, "vllm": 2.2}, tokens=128)], "DECODE_GOAL")["rows"] == 0
    assert load("kernel_tables").verdict(far) == ["decode 0.846"]


def test_the_worst_row_of_a_goal_is_named_by_op_size_and_tokens():
    rows = [row(us={"ours": 1.0, "vllm": 1.0}), row(us={"ours": 1.1, "vllm": 1.0}, tokens=512)]
    found = goal_of(rows, "OURS_TO_VLLM")
    assert (found["missed"], found["worst"]) == (1, 1.1)
    assert found["where"] == "silu_and_mul, bfloat16, 4096, 512 tokens"


def test_a_large_call_is_held_to_the_copy_of_as_many_bytes():
    assert goal_of([row(moved=3 * 10**8, us={"ours": 2.2})], "COPY_GOAL")["missed"] == 1
    assert goal_of([row(moved=3 * 10**8, us={"ours": 2.1})], "COPY_GOAL")["missed"] == 0
    assert goal_of([row(moved=10**8, us={"ours": 9.0})], "COPY_GOAL")["rows"] == 0


def test_the_fusion_is_held_to_the_fastest_separate_kernels_and_to_inductor():
    us = {"ours": 2.0, "ours, separate": 5.0, "vllm, separate": 1.9, "torch.compile": 3.0}
    rows = [row("fused_qk_norm_rope", us=us)]
    assert goal_of(rows, "FUSION_GOAL")["worst"] == 0.95
    assert goal_of(rows, "INDUCTOR_GOAL")["missed"] == 0


def test_the_tables_name_implementations_and_give_reasons():
    rows = [
        row(us={"ours": 1.0, "vllm": 2.0}, host_us={"ours": 5.0}),
        row("gelu_and_mul", us={"ours": 1.0}, why={"flaggems": "not registered"}),
        row("mul_and_silu", us={"vllm": 1.0}),
    ]
    text = load("kernel_tables").markdown(report(rows, ["rms_norm bfloat16 4096 1"]))
    assert (
        "| bfloat16 | 4096 | 32 | 1.00 | 1.00 | 2.00 | 0.70 | 2.00 | 0.500 | 2.000 | met |" in text
    )
    assert "| gelu_and_mul | default.flaggems | 1 | not registered |" in text
    assert "### other gated activations and norms" in text
    assert "Out of time: 1 rows, rms_norm bfloat16 4096 1 first." in text
    assert "2026-12-01, a GPU, Python 3.12, torch 2. `python kernels.py OUT`" in text


def test_every_size_that_has_to_be_shown_is_measured():
    found = list(load("kernel_points").points())
    for group in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"):
        sizes = {(p.size, p.tokens) for p in found if p.group == group and p.dtype == "bfloat16"}
        assert len(sizes) == 5 * 9
        assert len([p for p in found if p.group == group and p.dtype == "float16"]) == 3
        compiled = [p for p in found if p.group == group]
        assert sum("torch.compile" in load("kernels").columns_of(p) for p in compiled) == 3
    for size in ("32/8", "16/8"):
        assert len([p for p in found if (p.group, p.size) == ("rotary_embedding", size)]) >= 9


@pytest.mark.parametrize("group", ["silu_and_mul", "rotary_embedding", "rms_norm of heads"])
def test_a_call_moves_as_many_bytes_as_its_arguments_and_outputs_have(group):
    [point] = [
        p
        for p in load("kernel_points").points()
        if p.group == group and p.tokens == 8 and p.size in (1024, "16/8")
    ]
    args = point.make()
    read = [a for a in args if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16]
    read = [a for a in read if a.shape[0] == 8]
    written = load("kernels").reference_of(point)(*args)
    written = written if isinstance(written, tuple) else (written,)
    assert sum(t.numel() * t.element_size() for t in (*read, *written)) == point.moved


def test_sets_of_arguments_rotate_through_more_than_the_cache():
    sets_of = load("kernels").sets_of
    assert sets_of(10**9, 20) == 2
    assert sets_of(20 << 20, 20) == 10
    assert sets_of(4096, 100) == 20
    assert all(100 % sets_of(moved, 100) == 0 for moved in (1, 10**6, 10**7))


def test_a_result_far_from_the_reference_takes_no_part():
    kernels, x = load("kernels"), torch.randn(4, 8)
    point = next(p for p in load("kernel_points").points() if p.group == "rms_norm")
    kernels.check(point, lambda x: x * 1.001, (x,), x)
    for wrong in (lambda x: x * 1.1, lambda x: x * float("nan")):
        with pytest.raises(kernels.Refused, match="WRONG"):
            kernels.check(point, wrong, (x,), x)


def test_a_dry_run_on_the_cpu_writes_json_and_tables(tmp_path, capsys):
    command = [str(tmp_path / "out"), "--device", "cpu", "--quick", "--tokens", "1", "--no-compile"]
    assert load("kernels").main([*command, "--groups", "silu_and_mul", "rotary_embedding"]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert [(r["group"], r["size"]) for r in data["rows"]] == [
        ("silu_and_mul", 4096), ("silu_and_mul", 7168), ("rotary_embedding", "32/8"),
    ]  # fmt: skip
    for found in data["rows"]:
        assert set(found["us"]) >= {"empty", "copy"}
        assert all(len(rounds) == 3 for rounds in found["rounds"].values())
        assert found["why"]["flaggems"].startswith("runs on cuda")
    assert "### Goals" in capsys.readouterr().out
    assert "### silu_and_mul" in (tmp_path / "out.md").read_text()
