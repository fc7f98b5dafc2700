# SPDX-License-Identifier: Apache-2.0
"""Guards: what they say, and that they say it of metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..dispatch.types import ACCEPTED, Rejected, Verdict, as_verdict
from .target import Target, facts_of

__all__ = ["fake_arguments", "fake_verdict", "verdict_on"]


def verdict_on(target: Target, args: tuple[Any, ...]) -> Verdict:
    """What the layer guard and then the call guard say of a call."""
    impl = target.impl
    if impl.supports_layer is not None:
        verdict = as_verdict(
            impl.supports_layer(facts_of(target, args)), default_reason="its layer guard says no"
        )
        if isinstance(verdict, Rejected):
            return verdict
    if impl.supports is not None:
        return as_verdict(impl.supports(*args), default_reason="its call guard says no")
    return ACCEPTED


def fake_arguments(args: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any, ...]:
    """The arguments without data: same sizes, strides, dtypes, devices."""
    return tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)


def fake_verdict(target: Target, args: tuple[Any, ...]) -> Verdict | str:
    """What the guards say of fake tensors, or how they failed on them."""
    with FakeTensorMode() as mode, _without_addresses():
        try:
            return verdict_on(target, fake_arguments(args, mode))
        except Exception as error:
            return (
                "a guard reads more than metadata: on fake tensors it raised "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )


@contextmanager
def _without_addresses() -> Iterator[None]:
    """A fake tensor answers 0 when it is asked for its address; inside, it refuses."""

    def refuse(self: FakeTensor) -> int:
        raise RuntimeError("a fake tensor has no address")

    FakeTensor.data_ptr = refuse
    try:
        yield
    finally:
        del FakeTensor.data_ptr
