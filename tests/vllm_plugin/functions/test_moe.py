# SPDX-License-Identifier: Apache-2.0
"""What vLLM's experts call, served, with tensors of the CPU: it gives what the contracts say, where
vLLM's own function would have written it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from vllm_fl.ops.moe import (
    FUSED_EXPERTS,
    GROUPED_TOPK,
    MOE_ALIGN_BLOCK_SIZE,
    MOE_SUM,
    TOPK_SOFTMAX,
)
from vllm_fl.vllm_plugin.functions import moe

from .helpers import inputs, right, vllm_module

MOE = "vllm.model_executor.layers.fused_moe"


@pytest.fixture
def ops():
    return vllm_module("_custom_ops")


def room(tokens: int, topk: int, index: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What fused_topk allocates: weights, ids, row numbers."""
    return (
        torch.full((tokens, topk), float("nan")),
        torch.full((tokens, topk), -7, dtype=index),
        torch.full((tokens, topk), -7, dtype=torch.int32),
    )


# ------------------------------------------------------------------------------------ routing


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["odd and prime sizes", "bias, renormalized", "zero tokens"])
def test_weights_and_ids_are_written_where_vllm_wants_them(load, ops, name, index) -> None:
    args = inputs(TOPK_SOFTMAX, name)
    logits, topk, renormalize, bias, *_ = (*args, *(None,) * 5)
    weights, ids, rows = room(logits.shape[0], topk, index)
    load()
    assert ops.topk_softmax(weights, ids, rows, logits, bool(renormalize), bias) is None
    assert right(TOPK_SOFTMAX, (weights, ids.int()), args)
    assert bool((rows == -7).all())


def test_padding_is_handed_on(load, ops) -> None:
    logits = torch.randn(4, 8)
    padding = torch.tensor([False, True, False, True])
    weights, ids, rows = room(4, 2, torch.int32)
    load()
    ops.topk_softmax(weights, ids, rows, logits, True, is_padding=padding)
    assert bool((ids[padding] == -1).all()) and bool((ids[~padding] >= 0).all())


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_sigmoid_is_routed_as_one_group(load, ops, bias) -> None:
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    shift = torch.randn(16, generator=torch.Generator().manual_seed(2)) if bias else None
    weights, ids, rows = room(5, 4, torch.int32)
    load()
    ops.topk_sigmoid(weights, ids, rows, logits, True, shift)
    scores = logits.sigmoid()
    best = (scores if shift is None else scores + shift).topk(4).indices
    expected = scores.gather(1, best)
    expected = expected / expected.sum(dim=-1, keepdim=True)
    order, found_order = best.argsort(), ids.argsort()
    assert torch.equal(ids.gather(1, found_order).long(), best.gather(1, order))
    torch.testing.assert_close(weights.gather(1, found_order), expected.gather(1, order))


@pytest.mark.parametrize("by_name", [True, False])
def test_rows_of_padding_choose_nobody_by_a_sigmoid(load, ops, by_name) -> None:
    if "is_padding" not in inspect.signature(ops.topk_sigmoid).parameters:
        pytest.skip("this vLLM's topk_sigmoid knows no padding")
    load()
    logits, mask = torch.randn(4, 16), torch.tensor([False, True, False, True])
    plain, masked = ((torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32)) for _ in range(2))
    rows = torch.empty(4, 2, dtype=torch.int32)
    ops.topk_sigmoid(*plain, rows, logits, True, None)
    if by_name:
        ops.topk_sigmoid(*masked, rows, logits, True, None, is_padding=mask)
    else:
        ops.topk_sigmoid(*masked, rows, logits, True, None, 1.0, mask)
    for found, whole, nobody in zip(masked, plain, (0, -1), strict=True):
        assert torch.equal(found[~mask], whole[~mask])
        assert (found[mask] == nobody).all()


def test_groups_are_routed_by_a_function_that_returns_both(load, chosen) -> None:
    router = vllm_module("model_executor.layers.fused_moe.router.grouped_topk_router")
    args = inputs(GROUPED_TOPK, "sigmoid, bias")
    logits, topk, renormalize, groups, best, *rest = args
    load(PER_OP="grouped_topk=reference")
    assert chosen(f"{MOE}.router.grouped_topk_router:grouped_topk") == "reference.torch"
    result = router.grouped_topk(
        torch.empty(logits.shape[0], 3), logits, topk, renormalize, groups, best, *rest
    )
    assert right(GROUPED_TOPK, result, args)


# ------------------------------------------------------------------------- blocks and the sum


@pytest.mark.parametrize("name", ["several tokens", "experts elsewhere", "padded room"])
def test_blocks_are_made_under_each_name_that_the_experts_know(load, name) -> None:
    module = vllm_module("model_executor.layers.fused_moe.moe_align_block_size")
    experts = vllm_module("model_executor.layers.fused_moe.experts.triton_moe")
    load()
    assert experts.moe_align_block_size is module.moe_align_block_size
    args = inputs(MOE_ALIGN_BLOCK_SIZE, name)
    result = experts.moe_align_block_size(*args)
    for found, expected in zip(result, MOE_ALIGN_BLOCK_SIZE.reference(*args), strict=True):
        assert torch.equal(found, expected)


def test_positions_of_the_choices_are_vllms_own_business() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    assert moe._align(ids, 16, 4, return_scatter_idx=True) is None


def test_the_sum_is_written_into_vllms_output(load, ops) -> None:
    args = inputs(MOE_SUM, "odd and prime sizes", torch.bfloat16)
    output = torch.empty(args[0].shape[0], args[0].shape[2], dtype=torch.bfloat16)
    load()
    assert ops.moe_sum(args[0], output) is None
    assert right(MOE_SUM, output, args, torch.bfloat16)


def test_rows_that_are_left_out_are_not_added(load, ops) -> None:
    args = inputs(MOE_SUM, "rows of experts elsewhere")
    output = torch.empty(args[0].shape[0], args[0].shape[2])
    load()
    ops.moe_sum(args[0], output, *args[1:])
    assert right(MOE_SUM, output, args)


# ------------------------------------------------------------------------------------ experts


def quantization(**changes: object) -> SimpleNamespace:
    """As much of a FusedMoEQuantConfig as is looked at."""
    nothing = dict.fromkeys(
        ("quant_dtype", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16",
         "ocp_mx_scheme", "w1_bias", "w2_bias")
    )  # fmt: skip
    return SimpleNamespace(**{**nothing, **changes})


def test_experts_are_mapped_with_their_activation_and_their_bias() -> None:
    x, w1, w2 = torch.randn(3, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    bias = torch.randn(4, 12), torch.randn(4, 8)
    config = quantization(w1_bias=bias[0], w2_bias=bias[1])
    gelu = SimpleNamespace(value="gelu")
    args = moe._experts(x, w1, w2, weights, ids, gelu, quant_config=config)
    assert args is not None
    assert right(FUSED_EXPERTS, FUSED_EXPERTS.reference(*args), args)
    assert args[5] == "gelu" and args[-2:] == bias
    assert moe._experts(x, w1, w2, weights, ids)[5] == "silu"


@pytest.mark.parametrize(
    "changes", [{"use_fp8_w8a8": True}, {"use_int4_w4a16": True}, {"quant_dtype": torch.int8}]
)
def test_quantized_experts_are_vllms_own_business(changes) -> None:
    x = torch.randn(3, 8)
    assert moe._experts(x, x, x, x, x, quant_config=quantization(**changes)) is None
    assert moe._experts(x, x, x, x, x, SimpleNamespace(value="unheard_of")) is None


# --------------------------------------------------------------------------------- activation

ACTIVATIONS = {
    "SILU": lambda x: F.silu(x[:, :8]) * x[:, 8:],
    "GELU": lambda x: F.gelu(x[:, :8]) * x[:, 8:],
    "GELU_TANH": lambda x: F.gelu(x[:, :8], approximate="tanh") * x[:, 8:],
    "SWIGLUOAI": lambda x: (
        (gate := x[:, ::2].clamp(max=7.0))
        * torch.sigmoid(1.702 * gate)
        * (x[:, 1::2].clamp(-7.0, 7.0) + 1)
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_the_experts_stands_in_for_a_kernel_that_is_missing(load, name) -> None:
    module = vllm_module("model_executor.layers.fused_moe.activation")
    kernel = vllm_module("model_executor.layers.fused_moe.modular_kernel")
    load()
    assert kernel.apply_moe_activation is module.apply_moe_activation
    x, output = 3 * torch.randn(5, 16), torch.empty(5, 8)
    returned = module.apply_moe_activation(module.MoEActivation[name], output, x)
    assert returned is output
    torch.testing.assert_close(output, ACTIVATIONS[name](x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("in_a_record", [False, True], ids=["arguments", "record"])
def test_a_limit_is_found_in_either_form_of_the_releases(in_a_record) -> None:
    silu, oai = (SimpleNamespace(value=v) for v in ("silu", "swigluoai_uninterleave"))
    limits = {"clamp_limit": 7.0, "alpha": 1.7, "beta": 1.0}
    given = {"activation_config": SimpleNamespace(**limits)} if in_a_record else limits
    x, out = torch.randn(2, 4), torch.empty(2, 2)
    assert moe._silu(silu, out, x, **given) is None
    assert moe._clamped_silu(silu, out, x, **given) == (x, 7.0, 1.0, 0.0)
    assert moe._clamped_silu(oai, out, x, **given) == (x, 7.0, 1.7, 1.0)
    assert moe._clamped_silu(silu, out, x) is None


def test_an_activation_without_a_kernel_stays_vllms_own(load) -> None:
    module = vllm_module("model_executor.layers.fused_moe.activation")
    load()
    x, output = torch.randn(3, 8), torch.empty(3, 8)
    module.apply_moe_activation(module.MoEActivation.SILU_NO_MUL, output, x)
    torch.testing.assert_close(output, F.silu(x))


def test_a_policy_of_the_layer_leaves_the_experts_activation_native(
    load, monkeypatch, chosen
) -> None:
    vllm_module("model_executor.layers.fused_moe.activation")
    load()
    assert not chosen(f"{MOE}.activation:apply_moe_activation", "silu_and_mul").startswith("vLLM's")
    monkeypatch.setattr("vllm_fl.vllm_plugin.functions.serve.has_kernels", lambda names: True)
    load(PER_OP="silu_and_mul=reference")
    assert chosen(f"{MOE}.activation:apply_moe_activation", "silu_and_mul") == (
        "vLLM's own kernel is here; silu_and_mul stands in for a missing one"
    )
