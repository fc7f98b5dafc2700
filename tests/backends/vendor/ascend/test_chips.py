# SPDX-License-Identifier: Apache-2.0
"""The 310P and the A5: what is served there conforms, and keeps off what is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.backends.vendor.ascend.device import to_npu
from tests.backends.vendor.ascend.harness import SOC_VERSIONS, STATE, LimitError
from tests.backends.vendor.ascend.served import SERVED
from tests.backends.vendor.ascend.test_conformance import conform, refusal
from vllm_fl.backends.vendor.ascend.ascend import CHIPS, backend, backend_310p, backend_a5
from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops import CONTRACTS

CONTRACT = {contract.name: contract for contract in CONTRACTS}
BACKENDS = {"310P": backend_310p, "A5": backend_a5}
EACH = [
    pytest.param(chip, impl, dtype, id=f"{chip}-{impl.op_name}-{str(dtype).partition('.')[2]}")
    for chip, other in BACKENDS.items()
    for impl in other.implementations
    for dtype in CONTRACT[impl.op_name].tolerances
]
ON_A2 = {impl.op_name: impl for _, impl in SERVED}
ON_310P = {impl.op_name: impl for impl in backend_310p.implementations}


def rand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("chip, impl, dtype", EACH)
def test_what_is_served_there_conforms(chip, impl, dtype):
    STATE.soc = chip
    served, refused = conform(CONTRACT[impl.op_name], impl, dtype)
    if chip == "310P" and dtype is torch.bfloat16:
        assert not served
        assert "x is bfloat16, which is not known to work on the 310P" in refused.values()
    else:
        assert len(served) > len(refused) / 4, refused
        assert any("zero tokens" in name for name in served)


@pytest.mark.parametrize("chip", BACKENDS)
def test_it_calls_the_operators_that_it_names_and_no_other(chip):
    STATE.soc = chip
    for impl in BACKENDS[chip].implementations:
        conform(CONTRACT[impl.op_name], impl, torch.float16)
    assert set(STATE.names()) == set(BACKENDS[chip].operators)


@pytest.mark.parametrize("chip", SOC_VERSIONS)
def test_each_backend_loads_on_its_own_chips_and_says_what_another_one_is(chip):
    STATE.soc = chip
    for one in (backend, *BACKENDS.values()):
        if chip in one.chips:
            one.load()
        else:
            said = rf"it is for {' and '.join(one.chips)}, and this chip is Ascend\w+ \(.*{chip}\)"
            with pytest.raises(RuntimeError, match=said):
                one.load()


def test_a_chip_that_is_not_known_is_nobody_s(monkeypatch):
    monkeypatch.setitem(SOC_VERSIONS, "A2", 103)
    for one in (backend, *BACKENDS.values()):
        with pytest.raises(RuntimeError, match=r"\(version 103, unknown\)"):
            one.load()


def test_the_chips_versions_do_not_overlap():
    versions = [version for chip in CHIPS.values() for version in chip]
    assert len(set(versions)) == len(versions)


@pytest.mark.parametrize(
    "op, args",
    [
        ("silu_and_mul", (rand(3, 2 * 24),)),
        ("gelu_quick", (rand(3, 64, dtype=torch.bfloat16),)),
    ],
)
def test_without_its_guard_the_310p_s_limit_is_met(op, args):
    STATE.soc = "310P"
    impl, given = ON_310P[op], to_npu(args)
    assert refusal(CONTRACT[op], impl, given) is not None
    with pytest.raises(LimitError):
        impl.fn(*given)


@pytest.mark.parametrize("chip", BACKENDS)
def test_the_fused_norm_of_a2_is_not_known_there(chip):
    STATE.soc = chip
    args = rand(3, 64), rand(3, 64), rand(64), 1e-6
    with pytest.raises(LimitError, match="A2 and A3"):
        ON_A2["fused_add_rms_norm"].fn(*to_npu(args))


@pytest.mark.parametrize(
    "chip, expected",
    [("A2", "vendor.ascend"), ("310P", "vendor.ascend.310p"), ("A5", "vendor.ascend.a5")],
)
def test_the_dispatcher_binds_the_one_for_the_chip_and_says_why_not_the_others(chip, expected):
    STATE.soc = chip
    registry = OpRegistry()
    registry.plugins = ()
    contract = CONTRACT["rms_norm"]
    registry.declare(contract.signature)
    for one in (backend, *BACKENDS.values()):
        [impl] = [i for i in one.implementations if i.op_name == "rms_norm"]
        registry.register_impl(replace(impl, origin=None))
    behind = BackendImplKind.REFERENCE
    registry.register_impl(
        OpImpl("rms_norm", "reference.torch", behind, contract.reference, priority=50)
    )
    manager = OpManager(registry, config=Config(), device=facts_of("ascend"))
    x, weight = to_npu((rand(3, 64), rand(64)))
    binding = manager.bind_op("rms_norm", facts=contract.signature.facts_of(x, weight, 1e-6))
    assert binding.decision.winner_id == expected
    binding.fn(x, weight, 1e-6)
    assert STATE.names() == ["npu_rms_norm"]
    reasons = {loser.impl_id: loser.reason for loser in binding.decision.losers}
    if chip != "A2":
        assert "it is for A2 and A3, and this chip is" in reasons["vendor.ascend"]
