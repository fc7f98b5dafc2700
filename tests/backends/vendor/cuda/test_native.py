# SPDX-License-Identifier: Apache-2.0
"""Our own GPU kernels: what is registered, and what their guards say of metadata alone. Where the
extension was not built there is nothing to ask; docs/native-kernels.md says how the kernels
themselves are verified on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.backends.vendor.cuda.test_guards import on_cuda, on_gpu
from vllm_fl.backends.vendor.cuda import fl, register_ops
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.native import MODULES
from vllm_fl.ops import CONTRACTS, SIGNATURES

IMPLS = {impl.op_name: impl for impl in fl.backend.implementations}
DECLARED = {signature.op_name: signature for signature in SIGNATURES}
BY_NAME = {contract.name: contract for contract in CONTRACTS}
HALF = torch.bfloat16


def _built() -> bool:
    try:
        importlib.import_module(MODULES["cuda"])
    except ImportError:
        return False
    return True


needs_extension = pytest.mark.skipif(not _built(), reason="vllm_fl._C_cuda was not built")


def guard_of(op: str, *args: object) -> object:
    """The guard's answer, on metadata alone."""
    supports = IMPLS[op].supports
    assert supports is not None
    mode = FakeTensorMode()
    with mode:
        return supports(*(on_cuda(a, mode) for a in args))


# ------------------------------------------------------------------------------ registration


def test_it_registers_under_the_declared_signatures_before_vllms_kernels() -> None:
    registry = OpRegistry()
    for signature in SIGNATURES:
        registry.declare(signature)
    register_ops.register_builtins(registry)
    for op in IMPLS:
        priorities = {i.impl_id: i.priority for i in registry.get_implementations(op)}
        assert priorities["vendor.cuda.fl"] == 110 > priorities.get("vendor.cuda", 100)
    assert set(IMPLS) <= set(DECLARED)


def test_what_it_writes_is_what_the_contract_lets_it_write() -> None:
    for op, impl in IMPLS.items():
        assert set(impl.mutates) <= set(DECLARED[op].inplace), op
        assert impl.batch_invariant, op


def test_on_a_cpu_it_is_unavailable_for_the_device() -> None:
    decision = OpManager().explain("rms_norm")
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert "cuda" in reasons["vendor.cuda.fl"]


@pytest.mark.skipif(_built(), reason="vllm_fl._C_cuda was built")
def test_without_the_extension_a_guard_says_how_to_build_it() -> None:
    assert "VLLM_FL_DEVICE=cuda" in str(fl.backend.is_available())
    assert "VLLM_FL_DEVICE=cuda" in str(guard_of("silu_and_mul", torch.ones(2, 4)))


# ------------------------------------------------------------------------------------ guards


@needs_extension
@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_guard_refuses_tensors_on_the_cpu_and_says_where_they_are(op) -> None:
    args = BY_NAME[op].cases_for(HALF)[0].make(HALF, torch.Generator().manual_seed(0))
    assert "is on cpu, not on cuda" in str(IMPLS[op].supports(*args))


REFUSED = ("transposed", "tokens innermost", "fp8")
"""Cases that have to be refused: columns, and quantized caches."""


@needs_extension
@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_case_of_the_contract_is_taken_but_for_columns_and_quantized_caches(op) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in BY_NAME[op].cases_for(dtype):
            verdict = guard_of(op, *case.make(dtype, torch.Generator().manual_seed(0)))
            refused = any(word in case.name for word in REFUSED)
            assert (verdict is True) is not refused, (case.name, verdict)


def _malformed() -> dict[str, tuple[str, tuple[Any, ...], str]]:
    """What lies elsewhere, or has another form than the kernels read: op, arguments, reason."""
    t, ints = on_gpu, torch.int64
    q, k, positions, cache = t(4, 128), t(4, 64), t(4, dtype=ints), t(16, 64)
    key, page, slots = t(4, 1, 64), t(2, 16, 1, 64), t(4, dtype=ints)
    scale, head = t(1, dtype=torch.float32), t(64)

    def rope(*args: object) -> tuple[object, ...]:
        return (*args[:3], 64, args[3], True)

    def pages(*args: object, kind: str = "auto") -> tuple[object, ...]:
        return (*args, kind, scale, scale)

    def fused(
        qkv: object = t(4, 256),
        heads: tuple[int, ...] = (2, 1, 1, 64),
        weights: tuple[object, ...] = (head, head),
        angles: object = cache,
        places: object = positions,
    ) -> tuple[object, ...]:
        return (qkv, *heads, 1e-6, *weights, angles, True, places)

    def cpu(*shape: int, dtype: torch.dtype = torch.float16) -> FakeTensor:
        return t(*shape, dtype=dtype, device="cpu")

    second = t(128, device="cuda:1")
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    every_second = on_cuda(torch.empty_strided((4,), (2,), dtype=ints, device="meta"), mode)
    return {
        "integers": ("silu_and_mul", (t(4, 64, dtype=torch.int32),), "dtype int"),
        "odd rows": ("gelu_and_mul", (t(4, 63), "none"), "which is odd"),
        "scalar": ("silu_and_mul", (t(),), "has no dimension"),
        "weight": ("rms_norm", (q, cpu(128), 1e-6), "weight is on cpu, not on cuda:0"),
        "second GPU": ("rms_norm", (q, second, 1e-6), "weight is on cuda:1, not on cuda:0"),
        "short weight": ("rms_norm", (q, t(64), 1e-6), "weight has shape [64]"),
        "variance": ("rms_norm", (q, None, 1e-6, 129), "variance_size 129"),
        "residual": ("fused_add_rms_norm", (q, cpu(4, 128), None, 1e-6), "residual is on cpu"),
        "shape of the residual": ("fused_add_rms_norm", (q, k, None, 1e-6), "shape [4, 64]"),
        "one row for all": (
            "fused_add_rms_norm",
            (t(1, 128).expand(4, 128), q, None, 1e-6),
            "x overlaps itself",
        ),
        "positions": ("rotary_embedding", rope(cpu(4, dtype=ints), q, k, cache), "positions is on"),
        "key": ("rotary_embedding", rope(positions, q, cpu(4, 64), cache), "key is on cpu"),
        "wide cache": ("rotary_embedding", rope(positions, q, k, t(16, 128)), "above head_size 64"),
        "flat cache": ("rotary_embedding", rope(positions, q, k, t(64)), "not two dimensions"),
        "no head": ("rotary_embedding", (positions, q, k, 0, cache, True), "head_size 0"),
        "tokens": ("rotary_embedding", rope(positions, t(3, 128), k, cache), "for 4 positions"),
        "float positions": ("rotary_embedding", rope(t(4), q, k, cache), "not int32 or int64"),
        "projection": ("fused_qk_norm_rope", fused(cpu(4, 256)), "qkv is on cpu"),
        "three dimensions": ("fused_qk_norm_rope", fused(t(1, 4, 256)), "not two dimensions"),
        "too few heads": ("fused_qk_norm_rope", fused(heads=(2, 1, 0, 64)), "qkv has rows of 256"),
        "negative heads": ("fused_qk_norm_rope", fused(heads=(5, -2, 1, 64)), "there are 5, -2"),
        "head weight": ("fused_qk_norm_rope", fused(weights=(head, q)), "k_weight has shape"),
        "weight elsewhere": (
            "fused_qk_norm_rope",
            fused(weights=(cpu(64), head)),
            "q_weight is on cpu",
        ),
        "angles of more": ("fused_qk_norm_rope", fused(angles=t(16, 66)), "rotary_dim 66"),
        "token count": ("fused_qk_norm_rope", fused(places=t(3, dtype=ints)), "3 position_ids"),
        "too many slots": (
            "reshape_and_cache_flash",
            pages(key, key, page, page, t(400, dtype=ints)),
            "400 slots",
        ),
        "another value": (
            "reshape_and_cache_flash",
            pages(key, t(4, 1, 32), page, page, slots),
            "value has shape [4, 1, 32]",
        ),
        "flat key": ("reshape_and_cache_flash", pages(k, k, page, page, slots), "[4, 64]"),
        "narrow page": (
            "reshape_and_cache_flash",
            pages(key, key, t(2, 16, 1, 32), t(2, 16, 1, 32), slots),
            "key_cache has shape [2, 16, 1, 32]",
        ),
        "page elsewhere": (
            "reshape_and_cache_flash",
            pages(key, key, cpu(2, 16, 1, 64), page, slots),
            "key_cache is on cpu",
        ),
        "page of another dtype": (
            "reshape_and_cache_flash",
            pages(key, key, t(2, 16, 1, 64, dtype=HALF), page, slots),
            "key_cache is c10::BFloat16",
        ),
        "unknown kind": (
            "reshape_and_cache_flash",
            pages(key, key, page, page, slots, kind="nvfp4"),
            "kv_cache_dtype 'nvfp4'",
        ),
        "every second slot": (
            "reshape_and_cache_flash",
            pages(key, key, page, page, every_second),
            "slot_mapping has shape [4] and strides [2]",
        ),
    }


with FakeTensorMode():
    MALFORMED = sorted(_malformed())


@needs_extension
@pytest.mark.parametrize("name", MALFORMED)
def test_what_lies_elsewhere_or_has_another_form_is_refused(name) -> None:
    with FakeTensorMode():
        op, args, said = _malformed()[name]
        supports = IMPLS[op].supports
        assert supports is not None
        assert said in str(supports(*args))


@needs_extension
def test_a_gradient_is_refused_but_not_where_none_is_taken() -> None:
    mode = FakeTensorMode()
    with mode:
        x = on_gpu(4, 64).requires_grad_()
        assert "a gradient of x is required" in str(IMPLS["silu_and_mul"].supports(x))
        with torch.no_grad():
            assert IMPLS["silu_and_mul"].supports(x) is True


@needs_extension
def test_its_operators_are_torchs_too_whichever_extension_is_loaded_first() -> None:
    for op in ("silu_and_mul", "fused_add_rms_norm_", "fused_qk_norm_rope_"):
        name = f"vllm_fl_C::{op}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
