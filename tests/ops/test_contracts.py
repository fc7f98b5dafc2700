# SPDX-License-Identifier: Apache-2.0
"""The contracts themselves: references against float64, tolerances that can fail."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.dispatch import OpManager
from vllm_fl.ops import CONTRACTS, SIGNATURES
from vllm_fl.testing import outputs_of, worst_errors

PAIRS = [
    pytest.param(contract, dtype, id=f"{contract.name}-{dtype}")
    for contract in CONTRACTS
    for dtype in contract.tolerances
]


def cases(contract, dtype):
    for case in contract.cases_for(dtype):
        yield case.name, case.make(dtype, torch.Generator().manual_seed(1))


def beyond(contract, function, dtype) -> list[str]:
    """The cases and outputs in which a function is farther from the truth than it may be."""
    tolerance = contract.tolerances[dtype]
    return [
        f"{name}, output {index}: {error:.3g} ulp"
        for name, args in cases(contract, dtype)
        for index, error in enumerate(worst_errors(contract, function(*args), args))
        if not error <= tolerance.for_output(index)
    ]


@pytest.mark.parametrize(("contract", "dtype"), PAIRS)
def test_the_reference_is_within_its_own_tolerance_of_float64(contract, dtype) -> None:
    assert beyond(contract, contract.reference, dtype) == []


@pytest.mark.parametrize(("contract", "dtype"), PAIRS)
def test_every_implementation_here_is_within_the_tolerance(contract, dtype) -> None:
    manager = OpManager()
    assert beyond(contract, lambda *args: manager.call(contract.name, *args), dtype) == []


@pytest.mark.parametrize(("contract", "dtype"), PAIRS)
def test_the_tolerance_refuses_a_result_that_is_off_by_two_in_a_hundred(contract, dtype) -> None:
    def off(*args):
        first, *rest = outputs_of(contract.reference(*args))
        if not first.dtype.is_floating_point:
            return (first + 1, *rest)
        moved = first.float() * (1.02 if first.dtype.itemsize > 1 else 1.3)  # fp8 steps by 1/8
        return (moved.to(first.dtype), *rest)

    assert beyond(contract, off, dtype)


def test_the_inplace_schemas_mark_exactly_what_the_signature_says() -> None:
    schemas = {c.name: c.inplace_schema for c in CONTRACTS}
    assert schemas == {
        "silu_and_mul": None,
        "gelu_and_mul": None,
        "rms_norm": None,
        "fused_add_rms_norm": "(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, "
        "float epsilon, SymInt? variance_size=None) -> ()",
        "rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, "
        "SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()",
        "reshape_and_cache_flash": "(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, "
        "Tensor v_scale) -> ()",
        "concat_and_cache_mla": "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor scale) -> ()",
        "merge_attn_states": None,
        "topk_softmax": None,
        "grouped_topk": None,
        "moe_align_block_size": None,
        "moe_sum": None,
        "fused_experts": None,
        "scaled_fp8_quant": None,
        "per_token_group_quant_fp8": None,
        "w8a8_block_fp8_matmul": None,
        "dynamic_per_token_quant_int8": None,
        "apply_repetition_penalties": "(Tensor(a!) logits, Tensor prompt_mask, "
        "Tensor output_mask, Tensor repetition_penalties) -> ()",
        "apply_top_k_top_p": "(Tensor(a!) logits, Tensor? k, Tensor? p) -> ()",
    }


def test_every_contract_has_the_nasty_cases_and_a_reasoned_tolerance() -> None:
    assert len(SIGNATURES) == len(CONTRACTS) + 1  # the selector has no contract
    for contract in CONTRACTS:
        names = " ".join(case.name for case in contract.cases)
        for needed in ("zero tokens", "one token", "odd", "huge values"):
            assert needed in names or needed in contract.without, (contract.name, needed)
        for tolerance in contract.tolerances.values():
            assert len(tolerance.why) > 40
