# SPDX-License-Identifier: Apache-2.0
"""What vendor.ascend serves, and the contracts that it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_fl.backends.vendor.ascend import register_ops  # noqa: F401  (importing marks them)
from vllm_fl.backends.vendor.ascend.ascend import backend
from vllm_fl.ops import CONTRACTS, OpContract

__all__ = ["NOT_FOR", "SERVED"]

SECTION, HEAD_SIZE = [16, 24, 24], 128
"""The sections that npu_mrope is known to take, and the head that they make up."""


def _with_section(
    make: Callable[..., tuple[Any, ...]], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    args = partial(make, head_size=HEAD_SIZE)(dtype, generator)
    return (*args[:6], SECTION, *args[7:])


def _held_to(contract: OpContract) -> OpContract:
    """The contract; of mrotary_embedding, whose cases have sections that npu_mrope does not take,
    one with those that it takes."""
    if contract.name != "mrotary_embedding":
        return contract
    cases = tuple(
        replace(case, make=partial(_with_section, case.make))
        for case in contract.cases
        if not any(word in case.name for word in ("partial", "odd", "prime", "interleaved"))
    )
    return replace(contract, cases=cases)


_BY_NAME = {contract.name: _held_to(contract) for contract in CONTRACTS}
SERVED = [(_BY_NAME[i.op_name], i) for i in backend.implementations if i.op_name in _BY_NAME]
"""(contract, implementation), the selector aside."""

NOT_FOR = {("dynamic_per_token_quant_int8", torch.float32)}
"""(op, dtype) that torch_npu has no kernel for."""
