# SPDX-License-Identifier: Apache-2.0
"""Quantization as linear layers and experts call for it."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.ops.quantization import DYNAMIC_PER_TOKEN_QUANT_INT8, W8A8_BLOCK_FP8_MATMUL
from vllm_fl.ops.quantization_fp8 import PER_TOKEN_GROUP_QUANT_FP8, SCALED_FP8_QUANT
from vllm_fl.vllm_plugin.functions import FUNCTIONS, quantization, serve
from vllm_fl.vllm_plugin.routes import route_rows

from .helpers import inputs, right, vllm_module

UTILS = "model_executor.layers.quantization.utils"


@pytest.fixture
def ops():
    return vllm_module("_custom_ops")


@pytest.mark.parametrize("name", ["odd size, static", "odd size, dynamic per token"])
def test_fp8_comes_with_the_scale_that_was_given_or_made(load, ops, name) -> None:
    args = inputs(SCALED_FP8_QUANT, name)
    x, scale, padding, bound, per_token, _ = args
    load()
    values, found = ops.scaled_fp8_quant(x, scale, padding, bound, per_token)
    assert found is scale if scale is not None else found.shape == (x.shape[0], 1)
    assert right(SCALED_FP8_QUANT, (values, None if scale is not None else found), args)


def test_fp8_is_written_into_vllms_output(load, ops) -> None:
    args = inputs(SCALED_FP8_QUANT, "odd size, dynamic")
    output = torch.zeros(args[0].shape, dtype=torch.float8_e4m3fn)
    load()
    values, scale = ops.scaled_fp8_quant(args[0], output=output)
    assert values is output
    assert right(SCALED_FP8_QUANT, (output, scale), args)
    assert quantization._scaled_fp8(args[0], output=output, num_token_padding=32) is None


@pytest.mark.parametrize("name", ["odd size", "aligned for TMA", "powers of two"])
def test_groups_of_fp8_have_the_strides_that_vllm_asks_for(load, name) -> None:
    module = vllm_module(f"{UTILS}.fp8_utils")
    args = inputs(PER_TOKEN_GROUP_QUANT_FP8, name)
    x, group_size, eps, dtype, column_major, aligned, ue8m0 = args
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    load()
    values, scales = module.per_token_group_quant_fp8(
        x, group_size, eps, dtype, column_major, aligned, out_q=out, use_ue8m0=ue8m0
    )
    assert values is out
    assert scales.stride() == PER_TOKEN_GROUP_QUANT_FP8.fake(*args)[1].stride()
    assert right(PER_TOKEN_GROUP_QUANT_FP8, (values, scales), args)


def test_without_a_word_on_powers_of_two_vllm_is_asked(monkeypatch) -> None:
    gemm = vllm_module("utils.deep_gemm")
    for used in (True, False):
        monkeypatch.setattr(gemm, "is_deep_gemm_e8m0_used", lambda used=used: used)
        assert quantization._group_fp8(torch.ones(2, 8), 4)[-1] is used


def test_int8_is_served_where_it_is_dynamic_and_symmetric(load, ops) -> None:
    args = inputs(DYNAMIC_PER_TOKEN_QUANT_INT8, "odd size")
    load()
    values, scale, azp = ops.scaled_int8_quant(args[0])
    assert scale.shape == (args[0].shape[0], 1) and azp is None
    assert right(DYNAMIC_PER_TOKEN_QUANT_INT8, (values, scale), args)
    utils = vllm_module(f"{UTILS}.int8_utils")
    assert right(DYNAMIC_PER_TOKEN_QUANT_INT8, utils.per_token_quant_int8(*args), args)
    x, scale = args[0], torch.ones(1)
    assert quantization._scaled_int8(x, scale) is None
    assert quantization._scaled_int8(x, symmetric=False) is None


def test_blocks_of_fp8_are_multiplied(load) -> None:
    module = vllm_module(f"{UTILS}.fp8_utils")
    args = inputs(W8A8_BLOCK_FP8_MATMUL, "several blocks", torch.bfloat16)
    load()
    result = module.w8a8_triton_block_scaled_mm(*args)
    assert right(W8A8_BLOCK_FP8_MATMUL, result, args, torch.bfloat16)
    assert quantization._blocks(*args[:5])[-1] is torch.float16
    assert quantization._blocks(args[0], args[1], args[2].half(), *args[3:]) is None


@pytest.mark.parametrize(
    "path", ["vllm._custom_ops:scaled_fp8_quant", "vllm._custom_ops:scaled_int8_quant"]
)
def test_what_linear_layers_call_is_native_in_a_compiled_model(load, ops, chosen, path) -> None:
    before = getattr(ops, path.partition(":")[2])
    load(compiled=True)
    assert chosen(path) == (
        "the compiler traces its callers; it is served where vLLM compiles nothing"
    )
    assert getattr(ops, path.partition(":")[2]) is before


def test_another_fp8_is_vllms_own_business(monkeypatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    x = torch.randn(2, 8)
    assert quantization._scaled_fp8(x) is None
    assert quantization._group_fp8(x, 4, use_ue8m0=False) is None


def test_on_a_cpu_no_route_is_listed_that_vllm_does_not_take(register, ops) -> None:
    register()
    serve.bind(FUNCTIONS)
    assert {record.spec.op for record in serve.records} <= {
        "apply_repetition_penalties",
        "apply_top_k_top_p",
    }
    assert route_rows() == []
