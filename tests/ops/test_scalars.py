# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest
import torch

from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.scalars import read_scalar, scalar_types

BY_NAME = {contract.name: contract for contract in CONTRACTS}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_scalar_of_an_op_that_ships_has_a_type_and_its_own_values_pass(contract) -> None:
    names = contract.signature.parameter_names
    assert set(scalar_types(contract)) == set(names) - set(contract.arrays)
    for dtype in contract.tolerances:
        for case in contract.cases_for(dtype):
            args = case.make(dtype, torch.Generator().manual_seed(0))
            for name, value in zip(names, args, strict=False):
                if name not in contract.arrays:
                    wanted = list(value) if isinstance(value, tuple) else value
                    assert read_scalar(contract, name, value) == wanted


@pytest.mark.parametrize(
    ("op", "name", "value", "wanted"),
    [
        ("rms_norm", "epsilon", 1, 1.0),
        ("rms_norm", "variance_size", None, None),
        ("mrotary_embedding", "mrope_section", (8, 4, 4), [8, 4, 4]),
        ("w8a8_block_fp8_matmul", "output_dtype", "float16", torch.float16),
        ("per_token_group_quant_fp8", "dtype", "torch.float8_e4m3fn", torch.float8_e4m3fn),
        ("gelu_and_mul", "approximate", "tanh", "tanh"),
        ("rotary_embedding", "is_neox", False, False),
    ],
)
def test_a_value_is_read_as_its_type(op: str, name: str, value, wanted) -> None:
    found = read_scalar(BY_NAME[op], name, value)
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("op", "name", "value", "wanted"),
    [
        ("rms_norm", "epsilon", "abc", "a number, found 'abc' of type str"),
        ("rms_norm", "epsilon", True, "a number, found True of type bool"),
        ("rms_norm", "epsilon", None, "a number, found None of type NoneType"),
        ("rms_norm", "epsilon", [1], "a number, found [1] of type list"),
        ("rms_norm", "epsilon", 10**400, f"a number, found 1{'0' * 56}... of type int"),
        ("rms_norm", "variance_size", 1.5,
         "a whole number of 64 bits, or None, found 1.5 of type float"),
        ("rotary_embedding", "head_size", True,
         "a whole number of 64 bits, found True of type bool"),
        ("rotary_embedding", "head_size", 1 << 63,
         "a whole number of 64 bits, found 9223372036854775808 of type int"),
        ("rotary_embedding", "is_neox", 1, "True or False, found 1 of type int"),
        ("gelu_and_mul", "approximate", 1, "a word, found 1 of type int"),
        ("mrotary_embedding", "mrope_section", [8, 4.0],
         "a list of whole numbers such as [128,128], or None, found [8, 4.0] of type list"),
        ("w8a8_block_fp8_matmul", "output_dtype", "float61",
         "a dtype's name such as bfloat16, found 'float61' of type str"),
        ("w8a8_block_fp8_matmul", "output_dtype", "nn",
         "a dtype's name such as bfloat16, found 'nn' of type str"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_told_with_the_op(op, name, value, wanted: str) -> None:
    contract = BY_NAME[op]
    said = f"{op}: {name} must be {wanted}; the op is {contract.signature}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        read_scalar(contract, name, value)


def test_the_types_are_those_of_the_schema() -> None:
    """PyTorch's own parser agrees, as far as it tells integers and dtypes apart."""
    erased = {"SymInt": "int", "SymInt?": "Optional[int]", "ScalarType": "int",
              "ScalarType?": "Optional[int]", "int[]": "List[int]", "SymInt[]": "List[int]",
              "SymInt[]?": "Optional[List[int]]", "int[]?": "Optional[List[int]]"}  # fmt: skip
    for contract in CONTRACTS:
        schema = torch._C.parse_schema(contract.name + contract.schema)
        parsed = {a.name: str(a.type) for a in schema.arguments if a.name not in contract.arrays}
        assert {n: erased.get(k, k) for n, k in scalar_types(contract).items()} == parsed
