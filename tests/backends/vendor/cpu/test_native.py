# SPDX-License-Identifier: Apache-2.0
"""Our own CPU kernels: right for everything that their guards accept, in each instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.backends.helpers import (
    DTYPES,
    OnlyMetadata,
    assert_same,
    at_offset,
    bits,
    in_child,
    name_of,
    randn,
    threads,
)
from vllm_fl.backends.reference.impl import activation as reference_activation
from vllm_fl.backends.reference.impl import normalization as reference_normalization
from vllm_fl.backends.reference.impl import rotary as reference_rotary
from vllm_fl.native import native_refusal

if (refusal := native_refusal("cpu")) is not None:
    pytest.skip(refusal, allow_module_level=True)

from tests.backends.vendor.cpu import native_checks
from tests.backends.vendor.cpu.native_checks import IMPLS
from vllm_fl.backends.vendor.cpu.fl import kernels

ROOT = Path(__file__).parents[4]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
X86 = os.uname().machine in ("x86_64", "AMD64")


def calls(dtype, tokens=5):
    """One ordinary call of each op, on tensors of its own; the tokens come first."""
    weight, cache = randn((576,), dtype), randn((64, 64), dtype, seed=3)
    positions = (torch.arange(tokens) * 37) % 64
    x, residual = randn((tokens, 576), dtype, seed=1), randn((tokens, 576), dtype, seed=2)
    qkv = randn((tokens, 15 * 64), dtype)
    query, key, _ = qkv.split((9 * 64, 3 * 64, 3 * 64), dim=-1)
    return {
        "silu_and_mul": (randn((tokens, 300), dtype),),
        "mul_and_silu": (randn((tokens, 300), dtype),),
        "gelu_and_mul": (randn((tokens, 300), dtype), "none"),
        "rms_norm": (x.clone(), weight, 1e-5, None),
        "fused_add_rms_norm": (x.clone(), residual, weight, 1e-5, None),
        "gemma_rms_norm": (x.clone(), weight, 1e-5),
        "fused_add_gemma_rms_norm": (x.clone(), residual.clone(), weight, 1e-5),
        "rotary_embedding": (positions, query, key, 64, cache, True),
        "fused_qk_norm_rope": (
            qkv.clone(),
            9,
            3,
            3,
            64,
            1e-6,
            weight[:64],
            weight[64:128],
            cache,
            True,
            positions,
        ),
    }


# --------------------------------------------------------------------------- right everywhere


def test_hundreds_of_random_calls_and_every_case_of_the_contracts_are_within_tolerance():
    assert native_checks.check(count=40, seed=2) == []


@pytest.mark.skipif(not X86, reason="there is one instruction set to choose from")
@pytest.mark.parametrize("capability", ("DEFAULT", "AVX2", "AVX512"))
def test_each_instruction_set_is_within_tolerance(capability):
    """What a CPU without the wider ones would run, chosen as torch chooses for itself."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.vendor.cpu.native_checks", "12", "3"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability.lower(), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    if capability == "DEFAULT" or kernels.cpu_capability() in (capability, "AVX512"):
        assert reply["capability"] == capability
    assert reply["complaints"] == []


@EVERY_DTYPE
def test_gemmas_norms_are_those_of_the_weight_plus_one(dtype):
    x, residual = randn((5, 61), dtype), randn((5, 61), dtype, seed=1)
    weight = randn((61,), dtype, seed=2) / 4
    plus_one = weight.float() + 1  # float32 beside a half-precision x is no less exact
    assert_same(
        kernels.gemma_rms_norm(x, weight, 1e-5, None), kernels.rms_norm(x, plus_one, 1e-5, None)
    )
    assert_same(
        kernels.fused_add_gemma_rms_norm(x.clone(), residual.clone(), weight, 1e-5, None),
        kernels.fused_add_rms_norm(x.clone(), residual.clone(), plus_one, 1e-5, None),
    )


@EVERY_DTYPE
@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
@pytest.mark.parametrize("rotary_dim", (64, 40, 2))
@pytest.mark.parametrize("wide", (False, True), ids=("", "float32 weights"))
def test_the_fusion_gives_the_bits_of_the_kernels_one_after_the_other(
    dtype, is_neox, rotary_dim, wide
):
    qkv = randn((6, 8 * 64), dtype)[:, 64:]  # slices of wider rows
    q_weight, k_weight = (
        randn((64,), dtype, seed=s).to(torch.float32 if wide else dtype) for s in (1, 2)
    )
    cache, positions = randn((50, rotary_dim), dtype, seed=3), torch.arange(6) * 7
    q, k, v = qkv.split((4 * 64, 2 * 64, 64), dim=-1)
    normed = [
        kernels.rms_norm(x.unflatten(-1, (-1, 64)), weight, 1e-5, None).flatten(-2)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    expected = torch.cat((*kernels.rotary_embedding(positions, *normed, 64, cache, is_neox), v), -1)
    found = kernels.fused_qk_norm_rope(
        qkv, 4, 2, 1, 64, 1e-5, q_weight, k_weight, cache, is_neox, positions
    )
    assert found is qkv
    assert_same(found, expected)


def test_a_position_beyond_the_cache_is_told_before_anything_is_written():
    args = calls(torch.float32)["fused_qk_norm_rope"]
    qkv, before = args[0], args[0].clone()
    for wrong in (64, -1):
        positions = args[-1].clone()
        positions[-1] = wrong
        with pytest.raises(IndexError, match=f"position {wrong} of token 4 is not within the"):
            kernels.fused_qk_norm_rope(*args[:-1], positions)
    assert_same(qkv, before)


def test_weights_and_caches_that_lie_in_the_projection_are_read_as_they_were():
    qkv, *args = calls(torch.float32)["fused_qk_norm_rope"]
    args[5], args[6] = qkv[0, :64], qkv[1, 64:128]
    args[7] = qkv.as_strided((64, 64), (1, 1), 3)
    apart = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected = kernels.fused_qk_norm_rope(qkv.clone(), *apart)
    assert_same(kernels.fused_qk_norm_rope(qkv, *args), expected)


SPECIAL = (float("inf"), -float("inf"), float("nan"), 6e4, -6e4, 0.0, -0.0, -120.0, 120.0)


@EVERY_DTYPE
@pytest.mark.parametrize("approximate", (None, "none", "tanh"), ids=("silu", "erf", "tanh"))
def test_infinities_and_nan_pass_a_gate_as_in_the_reference(dtype, approximate):
    gate = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL))
    up = torch.tensor(SPECIAL).repeat(len(SPECIAL))
    x = torch.cat((gate, up)).to(dtype)[None]
    if approximate is None:
        found = kernels.silu_and_mul(x)
        exact = reference_activation.silu_and_mul(x.float())
    else:
        found = IMPLS["gelu_and_mul"].fn(x, approximate)
        exact = reference_activation.gelu_and_mul(x.double(), approximate)
    expected = exact.to(dtype)
    assert expected.isnan().any() and expected.isinf().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()], expected[expected.isinf()])


@EVERY_DTYPE
def test_infinities_and_nan_are_normed_as_in_the_reference(dtype):
    x = randn((4, 70), dtype)
    x[:, 3] = torch.tensor(SPECIAL[:4])
    zero, weight = torch.zeros_like(x), randn((70,), dtype)
    found = (
        kernels.rms_norm(x, weight, 1e-5, None),
        *kernels.fused_add_rms_norm(x.clone(), zero.clone(), weight, 1e-5, None),
    )
    expected = (
        reference_normalization.rms_norm(x, weight, 1e-5),
        *reference_normalization.fused_add_rms_norm(x, zero, weight, 1e-5),
    )
    for one, other in zip(found, expected, strict=True):
        assert other.isnan().any()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf(), other.isinf())


@EVERY_DTYPE
@pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "gptj"))
def test_infinities_and_nan_turn_as_in_the_reference(dtype, is_neox):
    query, cache = randn((4, 64), dtype), randn((64, 32), dtype)
    query[:, 3] = torch.tensor(SPECIAL[:4])
    positions = torch.arange(4)
    expected, _ = reference_rotary.rotary_embedding(positions, query, None, 64, cache, is_neox)
    found, _ = kernels.rotary_embedding(positions, query, None, 64, cache, is_neox)
    assert expected.isnan().any() and expected.isinf().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def test_every_half_precision_value_survives_the_way_through_a_kernel():
    """The conversions, subnormals and all: a rotation by nothing is the identity."""
    cache = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), -1)
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(2**16).to(torch.int16).view(dtype).view(-1, 64)
        values = every[every.isfinite().all(-1)]
        turned = values.clone()
        positions = torch.zeros(len(values), dtype=torch.int64)
        kernels.rotary_embedding(positions, turned, None, 64, cache, True)
        assert torch.equal(turned, values)


def test_silu_keeps_its_precision_where_the_result_is_subnormal():
    gate = torch.linspace(-108, -80, 512)
    x = torch.cat((gate, torch.ones(512)))[None]
    exact = gate.double() * torch.sigmoid(gate.double())
    error = (kernels.silu_and_mul(x)[0].double() - exact).abs()
    limit = (exact.abs() * 2.0**-20).clamp_min(2.0**-148)
    assert (error <= limit).all()


# ---------------------------------------------------------------- the same whatever is around


@EVERY_DTYPE
def test_a_row_does_not_depend_on_the_batch_bit_for_bit(dtype):
    batch = calls(dtype, tokens=300)
    for op, args in batch.items():
        impl = IMPLS[op]
        single = []
        for i in (0, 1, 7, 150, 299):
            args_i = [
                a[i : i + 1].clone() if isinstance(a, torch.Tensor) and a.shape[0] == 300 else a
                for a in args
            ]
            single.append((i, impl.fn(*args_i)))
        for count in (2, 64, 300):
            part = [
                a[:count].clone() if isinstance(a, torch.Tensor) and a.shape[0] == 300 else a
                for a in args
            ]
            whole = impl.fn(*part)
            for i, alone in single:
                if i >= count:
                    continue
                for one, other in zip(native_checks.outputs_of(alone),
                                      native_checks.outputs_of(whole), strict=True):  # fmt: skip
                    assert_same(one, other[i : i + 1])


@EVERY_DTYPE
def test_neither_threads_nor_addresses_change_a_bit(dtype):
    results = []
    for count, offset in ((1, 0), (2, 0), (4, 3)):
        with threads(count):
            for op, args in calls(dtype, tokens=400).items():
                moved = [
                    at_offset(a, offset) if isinstance(a, torch.Tensor) and offset else a
                    for a in args
                ]
                results.append((op, IMPLS[op].fn(*moved)))
    per_run = len(results) // 3
    for i, (op, first) in enumerate(results[:per_run]):
        for run in (1, 2):
            other_op, other = results[run * per_run + i]
            assert op == other_op
            for one, two in zip(native_checks.outputs_of(first),
                                native_checks.outputs_of(other), strict=True):  # fmt: skip
                assert_same(two, one)


def test_python_threads_may_call_at_once():
    x = randn((64, 600), torch.bfloat16)
    expected, wrong = kernels.silu_and_mul(x), []

    def work():
        for _ in range(50):
            if not torch.equal(kernels.silu_and_mul(x), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_after_a_threaded_call_a_forked_child_runs_decode_steps():
    """They are too small for a thread, of which a fork has none; the count is not touched."""
    with threads(2):
        kernels.silu_and_mul(randn((512, 3072), torch.bfloat16))
        x = randn((8, 3072), torch.bfloat16)
        expected = kernels.silu_and_mul(x)

        def experiment():
            torch.set_num_threads(2)
            args = calls(torch.bfloat16, tokens=8)
            for op in args:
                IMPLS[op].fn(*args[op])
            return torch.equal(kernels.silu_and_mul(x), expected)

        assert in_child(experiment) == "returned True"


# --------------------------------------------------------------------------- what is written


@EVERY_DTYPE
def test_results_are_the_arguments_where_they_are_written_in_place(dtype):
    args = calls(dtype)
    x, residual, *_ = args["fused_add_rms_norm"]
    version = x._version
    out, total = kernels.fused_add_rms_norm(*args["fused_add_rms_norm"])
    assert out is x and total is residual
    assert x._version > version
    found = kernels.rotary_embedding(*args["rotary_embedding"])
    assert found[0] is args["rotary_embedding"][1] and found[1] is args["rotary_embedding"][2]
    assert kernels.rotary_embedding(*args["rotary_embedding"][:2], None, 64,
                                    *args["rotary_embedding"][4:])[1] is None  # fmt: skip


def test_the_values_beside_query_and_key_stay():
    qkv = randn((5, 7 * 64), torch.float16)
    query, key, value = qkv.split((3 * 64, 2 * 64, 2 * 64), dim=-1)
    kept = value.clone()
    cache = randn((64, 64), torch.float16)
    kernels.rotary_embedding(torch.arange(5), query, key, 64, cache, True)
    assert_same(value, kept)


@EVERY_DTYPE
def test_where_x_and_residual_overlap_both_stay_and_new_tensors_hold_the_results(dtype):
    weight, memory = randn((64,), dtype, seed=7), randn((4, 64), dtype)
    for x, residual in ((memory, memory), (memory[:3], memory[1:]), (memory[1:], memory[:3])):
        kept = memory.clone()
        expected = kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, None)
        assert_same(kernels.fused_add_rms_norm(x, residual, weight, 1e-5, None), expected)
        assert_same(memory, kept)


def test_a_weight_inside_of_x_or_residual_is_read_as_it_was_given():
    for of_x in (True, False):
        x, residual = randn((4, 64), torch.float32, seed=1), randn((4, 64), torch.float32, seed=2)
        weight = (x if of_x else residual)[0]
        expected = kernels.fused_add_rms_norm(
            x.clone(), residual.clone(), weight.clone(), 1e-5, None
        )
        kept = x.clone(), residual.clone()
        assert_same(kernels.fused_add_rms_norm(x, residual, weight, 1e-5, None), expected)
        assert_same((x, residual), kept)


@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
def test_positions_inside_of_the_query_are_those_that_were_checked(index):
    memory = torch.zeros(64 * 64)
    query, cache = memory.view(64, 64), randn((16, 64), torch.float32) + 1e20
    positions = memory.view(index)[64:128]
    positions.fill_(3)
    expected, _ = kernels.rotary_embedding(positions.clone(), query.clone(), None, 64, cache, True)
    kernels.rotary_embedding(positions, query, None, 64, cache, True)
    assert torch.equal(bits(query), bits(expected))


def test_a_cache_that_lies_in_the_query_or_key_is_read_as_it_was_given():
    for of_key in (True, False):
        memory = randn((16, 64), torch.float32)
        other, positions = randn((8, 64), torch.float32, seed=3), torch.arange(8) + 8
        query, key = (other, memory[8:]) if of_key else (memory[8:], other)
        expected = kernels.rotary_embedding(
            positions, query.clone(), key.clone(), 64, memory.clone(), True
        )
        assert_same(kernels.rotary_embedding(positions, query, key, 64, memory, True), expected)


def test_a_key_that_is_the_query_is_turned_once():
    query, cache = randn((5, 128), torch.float32), randn((64, 64), torch.float32)
    expected, _ = kernels.rotary_embedding(torch.arange(5), query.clone(), None, 64, cache, True)
    found = kernels.rotary_embedding(torch.arange(5), query, query, 64, cache, True)
    assert found[0] is query and found[1] is query
    assert_same(query, expected)


@pytest.mark.parametrize("position", (-1, 64, 2**40))
def test_a_position_beyond_the_cache_raises_before_anything_is_written(position):
    query, cache = randn((2, 64), torch.float32), randn((64, 64), torch.float32)
    kept = query.clone()
    with pytest.raises(IndexError, match=rf"position {position} of token 1 is not within .* 64"):
        kernels.rotary_embedding(torch.tensor([3, position]), query, None, 64, cache, True)
    assert torch.equal(bits(query), bits(kept))


# ------------------------------------------------------------------------------------ guards


def long(shape):
    return torch.zeros(shape, dtype=torch.int64)


X = torch.zeros(3, 64)
CACHE = torch.zeros(8, 64)
QKV = torch.zeros(3, 4 * 64)
HEADS = (2, 1, 1, 64, 1e-6)
ONES = torch.ones(64)
REFUSED = {
    "float64": ("silu_and_mul", (X.double(),), "dtype double of x is not float32"),
    "scalar": ("silu_and_mul", (torch.tensor(1.0),), "x has no dimension"),
    "odd row": ("silu_and_mul", (torch.zeros(3, 5),), "x has rows of 5 elements, which is odd"),
    "columns": ("silu_and_mul", (torch.zeros(64, 3).t(),), "the last not 1"),
    "meta": ("silu_and_mul", (torch.zeros(3, 64, device="meta"),), "x is on meta"),
    "sparse": ("silu_and_mul", (X.to_sparse(),), "x is not a plain strided tensor"),
    "negative bit": (
        "silu_and_mul",
        (torch._neg_view(X),),
        "x is not a plain strided tensor",
    ),
    "gradient": ("silu_and_mul", (X.clone().requires_grad_(),), "a gradient of x is required"),
    "seven dimensions": (
        "silu_and_mul",
        (torch.zeros((4,) * 7 + (8,))[..., ::2, :].permute(6, 5, 4, 3, 2, 1, 0, 7)[..., ::2, :],),
        "more than 6 dimensions",
    ),
    "short weight": ("rms_norm", (X, torch.ones(63), 1e-5), "weight has shape [63], a row of x"),
    "weight in two dimensions": ("rms_norm", (X, torch.ones(1, 64), 1e-5), "weight has shape"),
    "strided weight": ("rms_norm", (X, torch.ones(128)[::2], 1e-5), "weight is not contiguous"),
    "integer weight": ("rms_norm", (X, long(64), 1e-5), "of weight is not float32"),
    "variance_size": ("rms_norm", (X, None, 1e-5, 65), "variance_size 65 is not within 0 and 64"),
    "negative variance_size": ("rms_norm", (X, None, 1e-5, -1), "variance_size -1"),
    "residual's shape": ("fused_add_rms_norm", (X, X[:2], None, 1e-5), "residual has shape"),
    "residual's dtype": ("fused_add_rms_norm", (X, X.half(), None, 1e-5), "residual is c10::Half"),
    "expanded x": (
        "fused_add_rms_norm",
        (torch.zeros(1, 64).expand(3, 64), X, None, 1e-5),
        "x overlaps itself",
    ),
    "overlapping rows": (
        "fused_add_rms_norm",
        (X, torch.zeros(200).as_strided((3, 64), (32, 1)), None, 1e-5),
        "residual overlaps itself",
    ),
    "positions' dtype": (
        "rotary_embedding",
        (torch.zeros(3), X, None, 64, CACHE, True),
        "positions are float, not int32 or int64",
    ),
    "too few positions": (
        "rotary_embedding", (long(2), X, None, 64, CACHE, True), "for 2 positions"),
    "head_size": ("rotary_embedding", (long(3), X, None, 48, CACHE[:, :48], True), "no multiple"),
    "head_size of nothing": ("rotary_embedding", (long(3), X, None, 0, CACHE, True), "rotary_dim"),
    "rotary_dim": ("rotary_embedding", (long(3), X, None, 32, CACHE, True), "above head_size 32"),
    "odd rotary_dim": ("rotary_embedding", (long(3), X, None, 64, CACHE[:, :33], True), "is odd"),
    "key's dtype": (
        "rotary_embedding", (long(3), X, X.half(), 64, CACHE, True), "key is c10::Half"),
    "key's shape": ("rotary_embedding", (long(3), X, X[:2], 64, CACHE, True), "for 3 positions"),
    "cache's shape": ("rotary_embedding", (long(3), X, None, 64, CACHE[0], True), "cos_sin_cache"),
    **{
        f"fusion, {name}": ("fused_qk_norm_rope", args, says)
        for name, (args, says) in {
            "three dimensions": (
                (QKV[None], *HEADS, ONES, ONES, CACHE, True, long(3)), "not two dimensions"),
            "overlapping rows": (
                (torch.zeros(1, 256).expand(3, 256), *HEADS, ONES, ONES, CACHE, True, long(3)),
                "qkv overlaps itself"),
            "heads": (
                (QKV, 2, 1, 2, 64, 1e-6, ONES, ONES, CACHE, True, long(3)),
                "qkv has rows of 256, not 2, 1 and 2 heads of 64"),
            "negative heads": (
                (QKV, 5, -1, 0, 64, 1e-6, ONES, ONES, CACHE, True, long(3)),
                "there are 5, -1 and 0 heads of 64"),
            "no size": (
                (QKV, 2, 1, 1, 0, 1e-6, ONES, ONES, CACHE, True, long(3)), "heads of 0"),
            "short weight": (
                (QKV, *HEADS, ONES[:63], ONES, CACHE, True, long(3)), "q_weight has shape [63]"),
            "strided weight": (
                (QKV, *HEADS, ONES, torch.ones(128)[::2], CACHE, True, long(3)),
                "k_weight is not contiguous"),
            "narrow weight": (
                (QKV, *HEADS, ONES.half(), ONES.half(), CACHE, True, long(3)),
                "q_weight is c10::Half, qkv is float"),
            "weights of two dtypes": (
                (QKV.half(), *HEADS, ONES.half(), ONES, CACHE.half(), True, long(3)),
                "q_weight is c10::Half, k_weight is float"),
            "cache's dtype": (
                (QKV, *HEADS, ONES, ONES, CACHE.half(), True, long(3)),
                "cos_sin_cache is c10::Half, qkv is float"),
            "cache's shape": (
                (QKV, *HEADS, ONES, ONES, CACHE[0], True, long(3)), "not two dimensions"),
            "rotary_dim": (
                (QKV, 8, 4, 4, 16, 1e-6, ONES[:16], ONES[:16], CACHE, True, long(3)),
                "above head_size 16"),
            "positions' dtype": (
                (QKV, *HEADS, ONES, ONES, CACHE, True, torch.zeros(3)), "not int32 or int64"),
            "too few positions": (
                (QKV, *HEADS, ONES, ONES, CACHE, True, long(2)),
                "there are 2 position_ids for 3 tokens"),
            "strided positions": (
                (QKV, *HEADS, ONES, ONES, CACHE, True, long(6)[::2]), "not contiguous"),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_guard_refuses_it_says_and_the_kernel_raises(name):
    op, args, says = REFUSED[name]
    verdict = IMPLS[op].supports(*args)
    assert isinstance(verdict, str) and says in verdict
    with pytest.raises(ValueError, match=r"\w"):
        IMPLS[op].fn(*args)


@EVERY_DTYPE
def test_guards_read_metadata_only(dtype):
    for op, args in calls(dtype).items():
        shown = [OnlyMetadata(a) if isinstance(a, torch.Tensor) else a for a in args]
        assert IMPLS[op].supports(*shown) is True


# torch's forward mode scripts its decompositions when it is first used, and warns of that itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_transforms_of_functions_and_forward_tangents_are_refused():
    x, tangent = randn((4, 64), torch.float32), torch.ones(4, 64)

    def refuse(t):
        assert "not a plain strided tensor" in kernels.supports_gated(t)
        return t

    torch.func.vmap(refuse)(x)
    torch.func.grad(lambda t: refuse(t).sum())(x)
    torch.func.functionalize(refuse)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        assert "forward-mode tangent" in kernels.supports_gated(dual)
        with pytest.raises(ValueError, match="forward-mode tangent"):
            kernels.silu_and_mul(dual)


def test_a_tensor_without_data_raises_instead_of_being_read():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises((ValueError, RuntimeError), match="data"):
        kernels.silu_and_mul(torch.zeros(3, 64))


def test_inside_no_grad_a_gradient_is_not_asked_for():
    with torch.no_grad():
        x = X.clone().requires_grad_()
        assert IMPLS["silu_and_mul"].supports(x) is True
        assert not kernels.silu_and_mul(x).requires_grad


def test_inference_tensors_are_written_too():
    with torch.inference_mode():
        x, residual = torch.ones(3, 64), torch.ones(3, 64)
        out, _ = kernels.fused_add_rms_norm(x, residual, None, 1e-5, None)
        assert out is x
    kernels.fused_add_rms_norm(x, residual, None, 1e-5, None)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    (
        (lambda: kernels.silu_and_mul(), TypeError, "expected 1 positional arguments, found 0"),
        (lambda: kernels.silu_and_mul(3), TypeError, "x must be a tensor, found int"),
        (lambda: kernels.rms_norm(X, None, "a", None), TypeError, "real number"),
        (lambda: kernels.rms_norm(X, None, 1e-5, 1.5), TypeError, "integer"),
    ),
)
def test_arguments_of_another_type_raise(call, error, says):
    with pytest.raises(error, match=says):
        call()


# ---------------------------------------------------------------------------------- torch.ops


@EVERY_DTYPE
def test_the_torch_ops_give_the_same_bits(dtype):
    ops = torch.ops.vllm_fl_C
    args = calls(dtype)
    x = args["silu_and_mul"][0]
    assert_same(ops.silu_and_mul(x), kernels.silu_and_mul(x))
    assert_same(ops.gelu_and_mul(x), kernels.gelu_and_mul(x))
    assert_same(ops.gelu_tanh_and_mul(x), kernels.gelu_tanh_and_mul(x))
    norm = args["rms_norm"][:3]
    assert_same(ops.rms_norm(*norm), kernels.rms_norm(*norm, None))
    assert_same(ops.gemma_rms_norm(*norm), kernels.gemma_rms_norm(*norm, None))
    for name in ("fused_add_rms_norm", "fused_add_gemma_rms_norm"):
        x, residual, weight, epsilon, _ = calls(dtype)["fused_add_rms_norm"]
        expected = getattr(kernels, name)(x.clone(), residual.clone(), weight, epsilon, None)
        getattr(ops, f"{name}_")(x, residual, weight, epsilon)
        assert_same((x, residual), expected)
    turned = calls(dtype)["rotary_embedding"]
    expected = kernels.rotary_embedding(*args["rotary_embedding"])
    ops.rotary_embedding_(*turned)
    assert_same((turned[1], turned[2]), expected)
    fused = calls(dtype)["fused_qk_norm_rope"]
    ops.fused_qk_norm_rope_(*fused)
    assert_same(fused[0], kernels.fused_qk_norm_rope(*args["fused_qk_norm_rope"]))


def test_a_profile_names_the_kernels():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for op, args in calls(torch.float32).items():
            IMPLS[op].fn(*args)
    found = {event.key for event in profile.key_averages()}
    assert {f"vllm_fl_C::{op.replace('gemma_', '')}" for op in IMPLS} <= found


# ------------------------------------------------------------------------------- the binary


def test_no_path_of_the_builder_is_in_the_binary():
    import vllm_fl._C

    content = Path(vllm_fl._C.__file__).read_bytes()
    for path in {str(ROOT), str(Path(torch.__file__).parent), sys.prefix, os.path.expanduser("~")}:
        if len(path) > 1:
            assert path.encode() not in content, path
