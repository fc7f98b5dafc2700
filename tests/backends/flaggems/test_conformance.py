# SPDX-License-Identifier: Apache-2.0
"""FlagGems' kernels against the contracts, on the contracts' own cases."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.backends.flaggems.interpreter import DTYPES, NOT_INTERPRETED
from tests.backends.helpers import name_of
from vllm_fl.backends.flaggems import register_ops
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.ops import CONTRACTS
from vllm_fl.testing import error_in_ulps

CONTRACT_OF = {contract.name: contract for contract in CONTRACTS}
SERVED = tuple(impl.op_name for impl in register_ops.backend.implementations)
INTERPRETED = tuple(op for op in SERVED if op not in NOT_INTERPRETED)

# NumPy, which interprets the kernels, warns of infinities that a GPU computes in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

each_case = pytest.mark.parametrize(
    ("op", "dtype", "index"),
    [
        pytest.param(op, dtype, index, id=f"{op}-{name_of(dtype)}-{case.name}")
        for op in INTERPRETED
        for dtype in CONTRACT_OF[op].tolerances
        if dtype in DTYPES
        for index, case in enumerate(CONTRACT_OF[op].cases_for(dtype))
    ],
)


def copies(args: tuple[object, ...]) -> tuple[object, ...]:
    """The same values in the same strides."""
    return tuple(
        a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a
        for a in args
    )


@each_case
def test_each_case_is_right_or_refused(
    gems: Mapping[str, OpImpl], op: str, dtype: torch.dtype, index: int
) -> None:
    contract, impl = CONTRACT_OF[op], gems[op]
    case = contract.cases_for(dtype)[index]

    def arguments() -> tuple[object, ...]:
        return case.make(dtype, torch.Generator().manual_seed(0))

    args = arguments()
    facts = contract.signature.facts_of(*args) if contract.signature.facts else {}
    layer, call = impl.supports_layer, impl.supports
    verdict = True if layer is None else layer(facts)
    if verdict is True and call is not None:
        verdict = call(*args)
    if verdict is not True:
        assert isinstance(verdict, str) and verdict
        return
    found = impl.fn(*args)
    assert error_in_ulps(contract, found, arguments()) <= contract.tolerances[dtype].for_output(0)
    changed = {
        name
        for name, now, before in zip(
            contract.signature.parameter_names, args, arguments(), strict=False
        )
        if isinstance(now, torch.Tensor) and not torch.equal(now.nan_to_num(), before.nan_to_num())
    }
    assert changed <= set(impl.mutates)


@pytest.mark.parametrize("op", INTERPRETED)
def test_most_cases_are_served(gems: Mapping[str, OpImpl], op: str) -> None:
    """A guard that refuses everything would pass the test above."""
    contract, impl = CONTRACT_OF[op], gems[op]
    dtype = next(d for d in DTYPES if d in contract.tolerances)
    verdicts = []
    for case in contract.cases_for(dtype):
        args = case.make(dtype, torch.Generator().manual_seed(0))
        facts = contract.signature.facts_of(*args) if contract.signature.facts else {}
        said = True if impl.supports_layer is None else impl.supports_layer(facts)
        if said is True and impl.supports is not None:
            said = impl.supports(*args)
        verdicts.append(said is True)
    assert sum(verdicts) > len(verdicts) / 2
