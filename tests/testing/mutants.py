# SPDX-License-Identifier: Apache-2.0
"""Deliberately wrong implementations, each with what the kit has to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops.contract import OpContract
from vllm_fl.testing import Kind

__all__ = ["Mutant", "implementation"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong implementation.

    Attributes:
        name: what is wrong with it.
        contract: the op's.
        fn: the implementation.
        kinds: any of these names what is wrong.
        says: a word that a failure of one of those kinds has.
        dtype: the dtype to check in.
        settings: further fields of the OpImpl, e.g. mutates.
        cases: the only cases to run; empty for all.
        timeout: seconds for a case.
    """

    name: str
    contract: OpContract
    fn: Callable[..., Any]
    kinds: tuple[Kind, ...]
    says: str = ""
    dtype: str = "float32"
    settings: tuple[tuple[str, Any], ...] = ()
    cases: tuple[str, ...] = ()
    timeout: float = 30.0

    @property
    def impl(self) -> OpImpl:
        """As it would be registered."""
        return replace(implementation(self.contract, self.fn), **dict(self.settings))


def implementation(contract: OpContract, fn: Callable[..., Any], **settings: Any) -> OpImpl:
    """A vendor's implementation of an op."""
    return OpImpl(
        op_name=contract.name,
        impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR,
        fn=fn,
        vendor="acme",
        priority=100,
        **settings,
    )
