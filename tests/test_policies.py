# SPDX-License-Identifier: Apache-2.0
"""The policies that ship with vllm_fl: they load, name what there is, and decide as they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vllm_fl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.config import load_config
from vllm_fl.dispatch.types import BackendImplKind, DeviceFacts, OpImpl
from vllm_fl.ops import CONTRACTS

POLICIES = sorted((Path(vllm_fl.__file__).parent / "policies").glob("*.yaml"))
NVIDIA = [path for path in POLICIES if path.stem.startswith("nvidia")]
LAYERS_OPS = {
    contract.name
    for contract in CONTRACTS
    if any(site.hook.endswith("forward") for site in contract.call_sites)
}
"""Operators that vLLM's layers call; the others are called by functions."""


@pytest.fixture(scope="module")
def manager() -> OpManager:
    manager = OpManager()
    manager.ensure_initialized()
    return manager


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.stem)
def test_a_shipped_policy_names_only_what_there_is_and_says_what_was_measured(
    path, manager
) -> None:
    config = load_config({}, shipped=path)
    snapshot = manager.registry.snapshot()
    config.check_against(snapshot)
    assert config.policy.per_op_order
    known = {i.impl_id for impls in snapshot.impls_by_op.values() for i in impls}
    named = {
        token.removeprefix("impl:")
        for _, tokens in config.policy.per_op_order
        for token in tokens
        if token.startswith("impl:")
    }
    assert named <= known
    text = path.read_text(encoding="utf-8")
    assert "benchmarks/RESULTS.md" in text and "easured" in text


@pytest.mark.parametrize("path", NVIDIA, ids=lambda p: p.stem)
def test_on_nvidia_no_layer_is_left_to_flaggems_because_of_its_priority(path, manager) -> None:
    """It is installed or not: what serves the layers of a vLLM with its extension is the same.
    Functions stay native where its kernels are, unless an order names another implementation."""
    policy = load_config({}, shipped=path).policy
    for op, impls in manager.registry.snapshot().impls_by_op.items():
        order = policy.order_for(op, "eager")
        ids = {impl.impl_id for impl in impls}
        if op in LAYERS_OPS and "default.flaggems" in ids:
            assert order.index("flagos") > 0, op
            assert "vendor.cuda" in ids, op
        assert policy.order_for(op, "compiled") == (), op


@pytest.mark.parametrize("path", NVIDIA, ids=lambda p: p.stem)
def test_on_nvidia_every_layer_op_that_our_kernels_could_serve_has_an_order(path, manager) -> None:
    """Else their priority would decide, on chips where nothing was measured too."""
    policy = load_config({}, shipped=path).policy
    snapshot = manager.registry.snapshot()
    ours = {
        op
        for op, impls in snapshot.impls_by_op.items()
        if op in LAYERS_OPS and "vendor.cuda.fl" in {impl.impl_id for impl in impls}
    }
    parts = {"rms_norm", "rotary_embedding"}  # their order is one for what fuses them
    assert ours >= {*parts, "gemma_rms_norm", "fused_qk_norm_rope"}
    without = {op for op in ours if not policy.order_for(op, "eager")}
    assert without <= {"fused_qk_norm_rope"}


@pytest.mark.parametrize(
    ("product", "ours", "winner"),
    [
        ("NVIDIA H200", True, "vendor.cuda.fl"),
        ("NVIDIA H200", False, "vendor.cuda"),
        ("NVIDIA A100-SXM4-80GB", True, "vendor.cuda"),
        ("Tesla T4", True, "vendor.cuda"),
    ],
)
def test_our_own_kernels_come_first_where_they_were_measured(product, ours, winner) -> None:
    device = DeviceFacts("cuda", "cuda", product, assumed=True, assumed_modules=("torch", "vllm"))
    assert (
        _winner(device, _kernels("vendor.cuda", 100), *ours * [_kernels("vendor.cuda.fl", 110)])
        == winner
    )


def test_without_vllms_extension_our_own_kernels_come_before_flaggems_on_any_chip() -> None:
    for product in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"):
        device = DeviceFacts("cuda", "cuda", product)
        absent = _kernels("vendor.cuda", 100, available=lambda: "no compiled extension")
        flaggems = _kernels("default.flaggems", 150)
        ours = _kernels("vendor.cuda.fl", 110)
        assert _winner(device, absent, ours, flaggems) == "vendor.cuda.fl"
        assert _winner(device, absent, flaggems) == "default.flaggems"


def _kernels(impl_id: str, priority: int, **fields: Any) -> OpImpl:
    def silu_and_mul(x: Any) -> Any:
        return x

    kind = BackendImplKind.VENDOR if impl_id.startswith("vendor") else BackendImplKind.DEFAULT
    if kind is BackendImplKind.VENDOR:
        fields["vendor"] = "cuda"
    return OpImpl("silu_and_mul", impl_id, kind, silu_and_mul, priority=priority, **fields)


def _winner(device: DeviceFacts, *impls: OpImpl) -> str | None:
    """What serves silu_and_mul under the policy that ships for a device."""
    manager = OpManager()
    manager.ensure_initialized()
    manager.set_device(device)
    for impl in manager.registry.snapshot().impls_by_op["silu_and_mul"]:
        manager.registry.unregister("silu_and_mul", impl.impl_id)
    manager.registry.register_many(impls)
    return manager.decide("silu_and_mul", mode="eager").winner_id
