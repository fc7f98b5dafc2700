# SPDX-License-Identifier: Apache-2.0
"""Cache writes as the attention backends call for them."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.ops.cache import CONCAT_AND_CACHE_MLA, RESHAPE_AND_CACHE_FLASH
from vllm_fl.vllm_plugin.functions import FUNCTIONS, cache, serve
from vllm_fl.vllm_plugin.layers.serve import ServedOp

from .helpers import inputs, vllm_module

TRITON = "v1.attention.ops.triton_reshape_and_cache_flash"


@pytest.mark.parametrize("case", RESHAPE_AND_CACHE_FLASH.cases, ids=lambda case: case.name)
def test_pages_are_written_in_place(load, case) -> None:
    if torch.float32 not in (case.dtypes or (torch.float32,)):
        pytest.skip("not for float32")
    ops, triton = vllm_module("_custom_ops"), vllm_module(TRITON)
    args = case.make(torch.float32, torch.Generator().manual_seed(3))
    again = case.make(torch.float32, torch.Generator().manual_seed(3))
    expected = RESHAPE_AND_CACHE_FLASH.reference(*args)
    load()
    assert ops.reshape_and_cache_flash(*args) is None
    assert triton.triton_reshape_and_cache_flash(*again) is None
    for written, twin, right in zip(args[2:4], again[2:4], expected, strict=True):
        as_bytes = [t.contiguous().view(torch.uint8) for t in (written, twin, right)]
        assert torch.equal(as_bytes[0], as_bytes[2]) and torch.equal(as_bytes[1], as_bytes[2])


def test_each_backend_finds_it_under_its_own_name(load) -> None:
    backend = vllm_module("v1.attention.backends.triton_attn")
    load()
    served = vllm_module(TRITON).triton_reshape_and_cache_flash
    assert backend.triton_reshape_and_cache_flash is served
    assert served.__wrapped__


@pytest.mark.parametrize(
    "changes",
    [{"kv_cache_dtype": "int8_per_token_head"}, {"interleaved_v_pack_factor": 2}, {"dims": 5}],
)
def test_another_layout_or_quantization_is_vllms_own_business(changes) -> None:
    args = list(inputs(RESHAPE_AND_CACHE_FLASH, "every slot"))
    assert cache._pages(*args) == tuple(args)
    pack = changes.get("interleaved_v_pack_factor", 0)
    args[5] = changes.get("kv_cache_dtype", args[5])
    if "dims" in changes:
        args[2] = args[2].unsqueeze(-1)
    assert cache._pages(*args, pack) is None


def test_a_platform_with_another_fp8_keeps_its_own_kernel(monkeypatch) -> None:
    from vllm.platforms import current_platform

    args = list(inputs(RESHAPE_AND_CACHE_FLASH, "every slot"))
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    assert cache._pages(*args) is not None  # unquantized
    args[5] = "fp8"
    assert cache._pages(*args) is None


def test_latents_are_written_in_place(load) -> None:
    ops = vllm_module("_custom_ops")
    args = inputs(CONCAT_AND_CACHE_MLA, "every slot")
    expected = CONCAT_AND_CACHE_MLA.reference(*args)
    load()
    assert ops.concat_and_cache_mla(*args) is None
    assert torch.equal(args[2], expected)
    assert cache._latent(*args, skip_scale=True) is None


def test_where_attention_is_traced_a_compiled_model_keeps_vllms_own(
    load, monkeypatch, chosen
) -> None:
    from vllm.platforms import current_platform

    path = "vllm._custom_ops:reshape_and_cache_flash"
    vllm_module("_custom_ops")
    load(compiled=True)
    assert chosen(path) == "reference.torch"  # this platform's attention is opaque
    monkeypatch.setattr(
        type(current_platform), "opaque_attention_op", classmethod(lambda cls: False)
    )
    load(compiled=True)
    assert chosen(path).startswith("the compiler traces its callers")
    load()
    assert chosen(path) == "reference.torch"


def test_what_nobody_asked_for_is_not_even_bound(register, register_impl, monkeypatch) -> None:
    """Binding loads kernel libraries; on a stock GPU most functions stay native."""
    vllm_module("_custom_ops")
    asked: list[str] = []

    def bind_served(op, facts, how, native, otherwise):
        if native is None:
            asked.append(op)
        return ServedOp(op, None, native or "")

    monkeypatch.setattr(serve, "bind_served", bind_served)
    monkeypatch.setattr(serve, "on_cpu", lambda: False)
    monkeypatch.setattr(serve, "has_kernels", lambda names: True)
    monkeypatch.setattr(serve, "runs_triton", lambda: True)
    monkeypatch.setattr(serve, "tuned_by_vllm", lambda: True)
    register()
    register_impl("moe_sum", lambda input, topk_ids=None, expert_map=None: input[:, 0])
    serve.bind(FUNCTIONS)
    assert asked == []
    register(PER_OP="moe_sum=reference")
    serve.bind(FUNCTIONS)
    assert asked == ["moe_sum"]


@pytest.mark.parametrize("kind", ["reference", "vendor"])
def test_on_another_vendors_chip_a_kernel_of_theirs_goes_before_vllms_triton(
    register, register_impl, monkeypatch, chosen, kind
) -> None:
    vllm_module(TRITON)
    monkeypatch.setattr(serve, "on_cpu", lambda: False)
    monkeypatch.setattr(serve, "runs_triton", lambda: True)
    register()
    if kind == "vendor":
        register_impl("reshape_and_cache_flash", RESHAPE_AND_CACHE_FLASH.reference)
    serve.bind(FUNCTIONS)
    said = chosen(f"vllm.{TRITON}:triton_reshape_and_cache_flash")
    assert (said == "vendor.cpu.test") is (kind == "vendor")
    assert said.startswith("vLLM's own kernel is here") is (kind == "reference")


@pytest.mark.parametrize("named", [True, False])
def test_a_call_that_the_named_one_refuses_is_vllms_own(
    register, register_impl, monkeypatch, chosen, named
) -> None:
    """Where vLLM's kernel is here: not that of somebody whom no order names."""
    module = vllm_module(TRITON)
    own: list[str] = []

    def triton_reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    ) -> None:
        own.append(kv_cache_dtype)

    triton_reshape_and_cache_flash.__module__ = module.__name__
    monkeypatch.setattr(serve, "on_cpu", lambda: False)
    monkeypatch.setattr(serve, "runs_triton", lambda: True)
    monkeypatch.setattr(serve, "tuned_by_vllm", lambda: False)
    register(**({"PER_OP": "reshape_and_cache_flash=vendor"} if named else {}))
    register_impl(
        "reshape_and_cache_flash",
        RESHAPE_AND_CACHE_FLASH.reference,
        supports=lambda *args: "it is quantized" if args[5] != "auto" else True,
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "triton_reshape_and_cache_flash", triton_reshape_and_cache_flash)
        serve.bind(FUNCTIONS)
        assert chosen(f"vllm.{TRITON}:triton_reshape_and_cache_flash") == "vendor.cpu.test"
        module.triton_reshape_and_cache_flash(*inputs(RESHAPE_AND_CACHE_FLASH, "one token"))
        assert own == []
        module.triton_reshape_and_cache_flash(*inputs(RESHAPE_AND_CACHE_FLASH, "fp8"))
        assert own == (["fp8"] if named else [])
        serve.release()
