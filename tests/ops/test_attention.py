# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states, against attention over all keys at once."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from vllm_fl.ops.attention import ATTENTION_BACKEND, MERGE_ATTN_STATES
from vllm_fl.testing import outputs_of, worst_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
merge = MERGE_ATTN_STATES.reference
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
PLAIN = [case for case in MERGE_ATTN_STATES.cases if "fp8" not in case.name]
"""vLLM's form in PyTorch has no fp8 output."""


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (tokens, heads, head_size) and logsumexps (heads, tokens), one number after the
    other, in float64; over no keys, 0 and -inf."""
    tokens, heads, size = queries.shape
    output = torch.zeros(tokens, heads, size, dtype=torch.float64)
    lse = torch.full((heads, tokens), -math.inf, dtype=torch.float64)
    for token in range(tokens):
        for head in range(heads):
            query = queries[token, head].double()
            scores = [float(query @ key[head].double()) / math.sqrt(size) for key in keys]
            if not scores:
                continue
            total = math.fsum(map(math.exp, scores))
            lse[head, token] = math.log(total)
            for score, value in zip(scores, values, strict=True):
                output[token, head] += math.exp(score) / total * value[head].double()
    return output, lse


@pytest.mark.parametrize("split", (0, 1, 5, 11, 12))
def test_two_parts_merged_are_attention_over_all_keys(split) -> None:
    queries = torch.randn(4, 3, 8, generator=generator())
    keys = torch.randn(12, 3, 8, generator=generator(1))
    values = torch.randn(12, 3, 8, generator=generator(2))
    prefix = attention(queries, keys[:split], values[:split])
    suffix = attention(queries, keys[split:], values[split:])
    expected, expected_lse = attention(queries, keys, values)
    exact, exact_lse = MERGE_ATTN_STATES.exact(*prefix, *suffix)
    torch.testing.assert_close(exact, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(exact_lse, expected_lse, rtol=1e-13, atol=1e-14)
    output, lse = merge(*(t.float() for t in (*prefix, *suffix)))
    assert output.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_three_parts_may_be_merged_in_any_order() -> None:
    queries = torch.randn(3, 2, 8, generator=generator())
    keys = torch.randn(9, 2, 8, generator=generator(1))
    values = torch.randn(9, 2, 8, generator=generator(2))
    one, two, three = (
        attention(queries, keys[a:b], values[a:b]) for a, b in ((0, 2), (2, 2), (2, 9))
    )
    exact = MERGE_ATTN_STATES.exact
    left = exact(*exact(*one, *two), *three)
    right = exact(*one, *exact(*two, *three))
    for a, b, c in zip(left, right, attention(queries, keys, values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(a, c, rtol=1e-13, atol=1e-14)


def test_tokens_without_context_are_the_suffix_bit_for_bit() -> None:
    args = [torch.randn(s, generator=generator()) for s in ((5, 2, 8), (2, 5), (5, 2, 8), (2, 5))]
    args[0], args[2] = args[0].bfloat16(), args[2].bfloat16()
    output, lse = merge(*args, 3)
    assert torch.equal(output[3:], args[2][3:]) and torch.equal(lse[:, 3:], args[3][:, 3:])
    whole, whole_lse = merge(*args)
    assert torch.equal(output[:3], whole[:3]) and torch.equal(lse[:, :3], whole_lse[:, :3])


def test_an_empty_part_adds_nothing_and_two_give_zeros() -> None:
    output, lse = torch.randn(1, 1, 4), torch.tensor([[1.5]])
    nothing, empty = torch.zeros(1, 1, 4), torch.tensor([[math.inf]])
    for sign in (1, -1):
        for args in ((output, lse, nothing, sign * empty), (nothing, sign * empty, output, lse)):
            merged, merged_lse = merge(*args)
            assert torch.equal(merged, output) and torch.equal(merged_lse, lse)
        merged, merged_lse = merge(nothing, sign * empty, nothing, -empty)
        assert torch.equal(merged, nothing) and merged_lse.item() == -math.inf


@each_dtype
@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_it_is_what_vllm_computes_in_pytorch(case, dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("vllm.v1.attention.ops.merge_attn_states")
    if not hasattr(theirs, "_merge_attn_states_torch"):
        pytest.skip("this release of vLLM has no form in PyTorch")
    args = case.make(dtype, generator())
    *states, with_context, _, _ = args
    output, lse = torch.empty_like(states[0]), torch.empty_like(states[1])
    theirs._merge_attn_states_torch(output, *states, lse, with_context)
    found = merge(*states, with_context)
    torch.testing.assert_close(found[0], output, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], lse, rtol=0, atol=0)


def test_the_selector_of_a_backend_class_is_no_op() -> None:
    assert ATTENTION_BACKEND.selector
    assert ATTENTION_BACKEND.parameter_names == ("use_mla", "use_sparse")


# ------------------------------------------------------------------- wrong ones are found out


def shares(args: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    prefix, prefix_lse, suffix, suffix_lse = (t.to(dtype) for t in args[:4])
    a, b = prefix_lse.exp(), suffix_lse.exp()
    share = (a / (a + b)).transpose(0, 1).unsqueeze(-1)
    return prefix, suffix, share, (a + b).log()


def without_the_largest(*args):
    prefix, suffix, share, lse = shares(args)
    return (prefix * share + suffix * (1 - share)).to(args[0].dtype), lse


def in_half_precision(*args):
    prefix, suffix, share, _ = shares(args, args[0].dtype)
    return prefix * share + suffix * (1 - share), merge(*args)[1]


def swapped(*args):
    prefix, prefix_lse, suffix, suffix_lse, *rest = args
    return merge(prefix, suffix_lse, suffix, prefix_lse, *rest)


def infinity_taken_as_it_is(*args):
    states = [a.where(a != math.inf, 1e30) for a in args[:4]]
    return merge(*states, *args[4:])


def all_tokens_merged(*args):
    return merge(*args[:4], None, *args[5:])


def unscaled(*args):
    return merge(*args[:5], torch.ones(()), *args[6:])


def larger_logsumexp(*args):
    return merge(*args)[0], torch.maximum(args[1], args[3])


def last_head_left_out(*args):
    output, lse = merge(*args)
    output[:, -1] = 0
    return output, lse


WRONG = [
    (without_the_largest, "large logsumexp", torch.float32),
    (without_the_largest, "very negative logsumexp", torch.float32),
    (in_half_precision, "several tokens", torch.bfloat16),
    (in_half_precision, "several tokens", torch.float16),
    (swapped, "several tokens", torch.bfloat16),
    (infinity_taken_as_it_is, "no prefix, as FlashAttention 2 says it", torch.float32),
    (all_tokens_merged, "some tokens with context", torch.bfloat16),
    (all_tokens_merged, "no token with context", torch.float16),
    (unscaled, "fp8", torch.bfloat16),
    (larger_logsumexp, "several tokens", torch.float32),
    (last_head_left_out, "odd and prime sizes", torch.bfloat16),
]


@pytest.mark.parametrize(("wrong", "name", "dtype"), WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_a_wrong_implementation_is_found_out_by_a_case(wrong, name, dtype) -> None:
    case = next(c for c in MERGE_ATTN_STATES.cases if c.name == name)
    args = case.make(dtype, generator())
    tolerance = MERGE_ATTN_STATES.tolerances[dtype]
    errors = worst_errors(MERGE_ATTN_STATES, wrong(*args), args)
    assert any(error > tolerance.for_output(i) for i, error in enumerate(errors)), errors


@each_dtype
@pytest.mark.parametrize(
    "case", [c for c in PLAIN if "with context" not in c.name], ids=lambda c: c.name
)
def test_products_and_sums_in_another_order_are_within_the_tolerance(case, dtype) -> None:
    """Shares from a sigmoid of the difference, and base 2, as kernels have it."""
    args = case.make(dtype, generator())
    prefix, prefix_lse, suffix, suffix_lse, _, _, return_lse = args
    clean = [torch.where(x == math.inf, -math.inf, x) for x in (prefix_lse, suffix_lse)]
    largest = torch.maximum(*clean).clamp(min=torch.finfo(torch.float32).min)
    a, b = (torch.exp2((x - largest) * math.log2(math.e)) for x in clean)
    inverse = torch.where(a + b > 0, 1 / (a + b), 0.0)
    left, right = ((x * inverse).t().unsqueeze(-1) for x in (a, b))
    output = torch.addcmul(prefix.float() * left, suffix.float(), right).to(dtype)
    lse = torch.log2(a + b) * math.log(2) + largest
    errors = worst_errors(MERGE_ATTN_STATES, (output, lse if return_lse else None), args)
    tolerance = MERGE_ATTN_STATES.tolerances[dtype]
    assert all(e <= tolerance.for_output(i) for i, e in enumerate(errors)), errors


def test_no_logsumexp_is_none_and_no_elements_as_a_torch_op() -> None:
    case = next(c for c in MERGE_ATTN_STATES.cases if c.name == "no logsumexp")
    args = case.make(torch.float32, generator())
    assert merge(*args)[1] is None
    assert outputs_of(MERGE_ATTN_STATES.fake(*args))[1].numel() == 0
