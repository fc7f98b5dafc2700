# SPDX-License-Identifier: Apache-2.0
"""Every case of every contract of activations, norms, rotary embeddings and their fusion, in every
dtype: the reference gives the bits of vLLM's own forward_native."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.backends.helpers import assert_same, name_of
from vllm_fl.ops import activation, normalization, qk_norm_rope, rotary
from vllm_fl.ops.contract import OpContract

LAYERS = "vllm.model_executor.layers"
CONTRACTS = {
    contract.name: contract
    for module in (activation, normalization, rotary, qk_norm_rope)
    for contract in module.CONTRACTS
}


@pytest.fixture(scope="module", autouse=True)
def _buildable() -> Iterator[None]:
    """vLLM's layers can be built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM and what it imports warn of themselves
        pytest.importorskip("vllm")
        from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        config = VllmConfig(compilation_config=CompilationConfig(mode=0))
        with set_current_vllm_config(config):
            yield


def layer_class(module: str, name: str) -> Any:
    cls = getattr(importlib.import_module(f"{LAYERS}.{module}"), name)
    if not hasattr(cls, "forward_native"):
        pytest.skip(f"{name} has no forward_native in this vLLM")
    return cls


def of_activation(name: str) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any) -> Any:
        return layer_class("activation", name)(*args).forward_native(x)

    return run


def with_parameter(weight: torch.Tensor | None) -> torch.nn.Parameter | None:
    return None if weight is None else torch.nn.Parameter(weight, requires_grad=False)


def rms_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
    made = _rms(x, weight, epsilon, variance_size)
    return made.forward_native(x)


def fused_add_rms_norm(
    x: Any, residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
) -> Any:
    return _rms(x, weight, epsilon, variance_size).forward_native(x, residual)


def _rms(x: Any, weight: Any, epsilon: float, variance_size: int | None) -> Any:
    made = layer_class("layernorm", "RMSNorm")(
        x.shape[-1], epsilon, variance_size, has_weight=weight is not None, dtype=x.dtype
    )
    if weight is not None:
        made.weight = with_parameter(weight)
    return made


def _gemma(weight: Any, epsilon: float) -> Any:
    made = layer_class("layernorm", "GemmaRMSNorm")(len(weight), epsilon)
    made.weight = with_parameter(weight)
    return made


def rms_norm_gated(
    x: Any,
    z: Any,
    weight: Any,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    act: str = "swish",
) -> Any:
    made = layer_class("layernorm", "RMSNormGated")(
        len(weight), epsilon, group_size, norm_before_gate, activation=act
    )
    made.weight = with_parameter(weight)
    return made.forward_native(x, z)


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
    made = layer_class("layernorm", "LayerNorm")(x.shape[-1], epsilon)
    made.weight, made.bias = with_parameter(weight), with_parameter(bias)
    return made.forward_native(x)


def _rotary(module: str, name: str, cache: Any, head_size: int, is_neox: bool, **more: Any) -> Any:
    cls = layer_class(f"rotary_embedding.{module}", name)
    made = cls(head_size, cache.shape[-1], 16, 10000.0, is_neox, cache.dtype, **more)
    made.cos_sin_cache = cache
    return made


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cache: Any, is_neox: bool
) -> Any:
    made = _rotary("base", "RotaryEmbedding", cache, head_size, is_neox)
    return made.forward_native(positions, query, key)


def mrotary_embedding(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    cache: Any,
    is_neox: bool,
    section: Any,
    interleaved: bool = False,
) -> Any:
    made = _rotary(
        "mrope", "MRotaryEmbedding", cache, head_size, is_neox,
        mrope_section=section, mrope_interleaved=interleaved,
    )  # fmt: skip
    return made.forward_native(positions, query, key)


def fused_qk_norm_rope(
    qkv: Any,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Any,
    k_weight: Any,
    cache: Any,
    is_neox: bool,
    positions: Any,
) -> Any:
    """As Qwen3's attention calls the layers."""
    heads = (num_heads_q, num_heads_k, num_heads_v)
    q, k, v = qkv.split([count * head_dim for count in heads], dim=-1)
    q = rms_norm(q.view(*q.shape[:-1], num_heads_q, head_dim), q_weight, eps).view(q.shape)
    k = rms_norm(k.view(*k.shape[:-1], num_heads_k, head_dim), k_weight, eps).view(k.shape)
    q, k = rotary_embedding(positions, q, k, head_dim, cache, is_neox)
    return torch.cat((q, k, v), dim=-1)


NATIVE: dict[str, Callable[..., Any]] = {
    "silu_and_mul": of_activation("SiluAndMul"),
    "mul_and_silu": of_activation("MulAndSilu"),
    "gelu_and_mul": of_activation("GeluAndMul"),
    "silu_and_mul_with_clamp": lambda x, limit, alpha=1.0, beta=0.0: of_activation(
        "SiluAndMulWithClamp"
    )(x, limit, alpha, beta),
    "swigluoai_and_mul": of_activation("SwigluOAIAndMul"),
    "fatrelu_and_mul": of_activation("FatreluAndMul"),
    "gelu_new": of_activation("NewGELU"),
    "gelu_fast": of_activation("FastGELU"),
    "gelu_quick": of_activation("QuickGELU"),
    "relu2": of_activation("ReLUSquaredActivation"),
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "gemma_rms_norm": lambda x, weight, epsilon: _gemma(weight, epsilon).forward_native(x),
    "fused_add_gemma_rms_norm": lambda x, residual, weight, epsilon: _gemma(
        weight, epsilon
    ).forward_native(x, residual),
    "rms_norm_gated": rms_norm_gated,
    "layer_norm": layer_norm,
    "rotary_embedding": rotary_embedding,
    "mrotary_embedding": mrotary_embedding,
    "fused_qk_norm_rope": fused_qk_norm_rope,
}

VIEWS = ("zero tokens", "heads permuted")
"""Rotary cases that vLLM's own forward refuses, because it asks for a view."""


def test_every_contract_of_these_families_is_compared() -> None:
    assert set(NATIVE) == set(CONTRACTS)


PAIRS = [
    pytest.param(contract, dtype, id=f"{contract.name}-{name_of(dtype)}")
    for contract in CONTRACTS.values()
    for dtype in contract.tolerances
]


@pytest.mark.parametrize(("contract", "dtype"), PAIRS)
def test_the_reference_is_vllms_native_bit_for_bit_in_every_case(
    contract: OpContract, dtype: torch.dtype
) -> None:
    compared = 0
    for case in contract.cases_for(dtype):
        args, again = (case.make(dtype, torch.Generator().manual_seed(2)) for _ in range(2))
        ours = contract.reference(*args)
        try:
            theirs = NATIVE[contract.name](*again)
        except RuntimeError as error:
            assert "view size" in str(error) or "reshape" in str(error) or "shape" in str(error)
            assert any(name in case.name for name in VIEWS), case.name
            continue
        assert_bits(ours, theirs, case.name)
        compared += 1
    assert compared >= len(contract.cases_for(dtype)) - 4


def assert_bits(ours: Any, theirs: Any, name: str) -> None:
    """Equal bits, but for NaN, whose sign and payload mean nothing."""
    for one, other in zip(
        ours if isinstance(ours, tuple) else (ours,),
        theirs if isinstance(theirs, tuple) else (theirs,),
        strict=True,
    ):
        if one is None:
            assert other is None, name
            continue
        assert torch.equal(one.isnan(), other.isnan()), name
        assert_same(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
