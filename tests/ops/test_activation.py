# SPDX-License-Identifier: Apache-2.0
"""Gates at which float32's exp overflows are right to give zero, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.ops import activation
from vllm_fl.testing import error_in_ulps

GATED = {
    "silu_and_mul": (lambda gate, up: torch.cat((gate, up), -1), ()),
    "mul_and_silu": (lambda gate, up: torch.cat((up, gate), -1), ()),
    "silu_and_mul_with_clamp": (lambda gate, up: torch.cat((gate, up), -1), (1.5,)),
    "swigluoai_and_mul": (lambda gate, up: torch.stack((gate, up), -1).flatten(-2), (1.0, 1.5)),
}
CONTRACTS = {contract.name: contract for contract in activation.CONTRACTS}


def arguments(name: str, gate: float):
    lay_out, scalars = GATED[name]
    gates = torch.full((1, 16), gate)
    return (lay_out(gates, torch.full((1, 16), 1e4)), *scalars)


@pytest.mark.parametrize("name", GATED)
def test_zero_is_right_where_the_exponential_overflows(name: str) -> None:
    contract, args = CONTRACTS[name], arguments(name, -89.0)
    limit = contract.tolerances[torch.float32].ulps
    assert error_in_ulps(contract, torch.zeros(1, 16), args) <= limit
    assert error_in_ulps(contract, contract.reference(*args), args) <= limit


@pytest.mark.parametrize("name", GATED)
def test_zero_is_wrong_where_it_does_not(name: str) -> None:
    contract, args = CONTRACTS[name], arguments(name, -80.0)
    assert error_in_ulps(contract, torch.zeros(1, 16), args) > 1000
    assert error_in_ulps(contract, contract.reference(*args), args) <= 8
