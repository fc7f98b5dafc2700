# SPDX-License-Identifier: Apache-2.0
"""FlagGems' kernels against the contracts, on the contracts' own cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.backends.flaggems.interpreter import DTYPES, is_interpreted
from tests.backends.helpers import name_of
from vllm_fl.backends.flaggems import register_ops
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.ops import CONTRACTS, OpContract
from vllm_fl.ops.contract import Case
from vllm_fl.testing import worst_errors

CONTRACT_OF = {contract.name: contract for contract in CONTRACTS}
SERVED = tuple(impl.op_name for impl in register_ops.backend.implementations)

MOSTLY_REFUSED = {"grouped_topk": "most cases have no correction bias"}

CASES = [
    (op, dtype, case)
    for op in SERVED
    for dtype in CONTRACT_OF[op].tolerances
    if dtype in DTYPES
    for case in CONTRACT_OF[op].cases_for(dtype)
    if is_interpreted(op, case.name)
]
INTERPRETED = tuple(dict.fromkeys(op for op, _, _ in CASES))

# NumPy, which interprets the kernels, warns of infinities that a GPU computes in silence, and of
# how Triton uses it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

each_case = pytest.mark.parametrize(
    ("op", "dtype", "case"),
    [pytest.param(*case, id=f"{case[0]}-{name_of(case[1])}-{case[2].name}") for case in CASES],
)


def verdict(contract: OpContract, impl: OpImpl, args: tuple[Any, ...]) -> Any:
    """What the layer guard and then the call guard say."""
    facts = contract.signature.facts_of(*args) if contract.signature.facts else {}
    said = True if impl.supports_layer is None else impl.supports_layer(facts)
    return impl.supports(*args) if said is True and impl.supports is not None else said


@each_case
def test_each_case_is_right_or_refused(
    gems: Mapping[str, OpImpl], op: str, dtype: torch.dtype, case: Case
) -> None:
    contract, impl = CONTRACT_OF[op], gems[op]

    def arguments() -> tuple[Any, ...]:
        return case.make(dtype, torch.Generator().manual_seed(0))

    args = arguments()
    said = verdict(contract, impl, args)
    if said is not True:
        assert isinstance(said, str) and said
        return
    errors = worst_errors(contract, impl.fn(*args), arguments())
    limits = [contract.tolerances[dtype].for_output(i) for i in range(len(errors))]
    assert all(error <= limit for error, limit in zip(errors, limits, strict=True)), errors
    changed = {
        name
        for name, now, before in zip(
            contract.signature.parameter_names, args, arguments(), strict=False
        )
        if isinstance(now, torch.Tensor) and not torch.equal(bytes_of(now), bytes_of(before))
    }
    assert changed <= set(impl.mutates)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """So that NaN equals NaN."""
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("op", INTERPRETED)
def test_guards_do_not_refuse_everything(gems: Mapping[str, OpImpl], op: str) -> None:
    """Such a guard would pass the test above."""
    contract, impl = CONTRACT_OF[op], gems[op]
    dtype = next(d for d in DTYPES if d in contract.tolerances)
    cases = contract.cases_for(dtype)
    made = (case.make(dtype, torch.Generator().manual_seed(0)) for case in cases)
    served = sum(verdict(contract, impl, args) is True for args in made)
    assert served >= (4 if op in MOSTLY_REFUSED else len(cases) / 2)


def test_enough_ops_are_shown() -> None:
    assert len(INTERPRETED) >= 10


def test_scales_of_groups_are_right(gems: Mapping[str, OpImpl]) -> None:
    """The values behind them are FP8, which is not interpreted."""
    contract, impl = CONTRACT_OF["per_token_group_quant_fp8"], gems["per_token_group_quant_fp8"]
    for case in contract.cases_for(torch.float32):
        args = case.make(torch.float32, torch.Generator().manual_seed(0))
        if verdict(contract, impl, args) is not True:
            continue
        error = worst_errors(contract, impl.fn(*args), args)[1]
        assert error <= contract.tolerances[torch.float32].for_output(1), case.name
