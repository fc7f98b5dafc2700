# SPDX-License-Identifier: Apache-2.0
"""Guards: read on metadata alone, and every guard of every implementation here is run so."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.testing.mutants import implementation
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.types import ACCEPTED, Rejected
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.testing.cases import arguments_of, cases_of
from vllm_fl.testing.guards import fake_verdict, verdict_on
from vllm_fl.testing.target import Target

X = torch.ones(2, 64)


def guarded(supports=None, supports_layer=None) -> Target:
    impl = implementation(
        SILU_AND_MUL, SILU_AND_MUL.reference, supports=supports, supports_layer=supports_layer
    )
    return Target(SILU_AND_MUL, impl)


def registered() -> list[Target]:
    """Every implementation with a guard, those for devices that are not here too."""
    manager = OpManager()
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot()
    return [
        Target(contract, impl)
        for contract in CONTRACTS
        for impl in snapshot.impls_by_op.get(contract.name, ())
        if impl.supports is not None or impl.supports_layer is not None
    ]


@pytest.mark.parametrize(
    "target", registered(), ids=lambda t: f"{t.contract.name}-{t.impl.impl_id}"
)
def test_every_guard_answers_on_fake_tensors_as_on_real_ones(target: Target) -> None:
    for dtype in target.contract.tolerances:
        for case in cases_of(target.contract, dtype).values():
            args = arguments_of(target.contract, case, dtype)
            said = fake_verdict(target, args)
            assert not isinstance(said, str), (case.name, said)
            assert said == verdict_on(target, args), case.name


def test_a_verdict_is_that_of_the_layer_guard_first() -> None:
    target = guarded(lambda x: "the call", lambda facts: "the layer")
    assert verdict_on(target, (X,)) == Rejected("the layer")
    assert verdict_on(guarded(lambda x: "the call", lambda facts: True), (X,)) == Rejected(
        "the call"
    )
    assert verdict_on(guarded(lambda x: True), (X,)) == ACCEPTED
    assert verdict_on(guarded(), (X,)) == ACCEPTED


@pytest.mark.parametrize(
    "supports",
    [
        lambda x: bool((x > 0).all()),
        lambda x: x.sum().item() > 0,
        lambda x: x.data_ptr() % 16 == 0,
        lambda x: len(x.tolist()) > 0,
        lambda x: x.numpy() is not None,
    ],
    ids=["bool", "item", "data_ptr", "tolist", "numpy"],
)
def test_reading_data_is_found(supports) -> None:
    said = fake_verdict(guarded(supports), (X,))
    assert isinstance(said, str)
    assert said.startswith("a guard reads more than metadata: on fake tensors it raised ")


def test_asking_for_metadata_is_no_reading() -> None:
    def supports(x: torch.Tensor) -> bool | str:
        known = (x.shape, x.stride(), x.dtype, x.device, x.storage_offset(), x.requires_grad)
        return len(known) == 6 and x.is_contiguous() and x.numel() == 128

    assert fake_verdict(guarded(supports), (X,)) == ACCEPTED


def test_a_fake_tensor_is_left_as_it_was() -> None:
    before = FakeTensor.data_ptr
    fake_verdict(guarded(lambda x: x.data_ptr() == 0), (X,))
    assert FakeTensor.data_ptr is before
