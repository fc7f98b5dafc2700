# SPDX-License-Identifier: Apache-2.0
"""Repetition penalties, top-k and top-p: as vLLM computes them, and as their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_fl.ops.sampling import APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P
from vllm_fl.testing import worst_errors

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
penalize = APPLY_REPETITION_PENALTIES.reference
choose = APPLY_TOP_K_TOP_P.reference


def cases(contract):
    return pytest.mark.parametrize("case", contract.cases, ids=lambda c: c.name)


def arguments(case, dtype=torch.float32):
    return case.make(dtype, torch.Generator().manual_seed(3))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    )  # fmt: skip


# ----------------------------------------------------------------- repetition penalties


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases(APPLY_REPETITION_PENALTIES)
def test_penalties_are_vllms_bit_for_bit(case, dtype) -> None:
    from vllm._custom_ops import apply_repetition_penalties_torch

    args = arguments(case, dtype)
    expected = args[0].clone()
    apply_repetition_penalties_torch(expected, *args[1:])
    assert same(penalize(*args), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases(APPLY_REPETITION_PENALTIES)
def test_penalties_are_the_definition_in_float64(case, dtype) -> None:
    """A seen token's logit is divided by the penalty if it is above zero, else multiplied."""
    args = arguments(case, dtype)
    logits, in_prompt, in_output, penalties = (a.tolist() for a in args)
    exact = []
    for row, prompt, output, penalty in zip(logits, in_prompt, in_output, penalties, strict=True):
        exact.append(
            [
                value if not (a or b) else value / penalty if value > 0 else value * penalty
                for value, a, b in zip(row, prompt, output, strict=True)
            ]
        )
    expected = torch.tensor(exact, dtype=torch.float64).reshape(args[0].shape)
    found = penalize(*args)
    assert torch.equal(found.isnan(), expected.isnan())
    seen = args[1] | args[2]
    assert same(found[~seen], args[0][~seen])
    finite = expected.isfinite() & found.isfinite()
    assert torch.equal(found[~finite].nan_to_num(), expected.to(dtype)[~finite].nan_to_num())
    unit = torch.finfo(dtype).eps
    error = (found.double() - expected)[finite].abs()
    assert (error <= 1.01 * unit * expected[finite].abs() + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, p, o, r: torch.where(p | o, x / r.unsqueeze(1), x),
        lambda x, p, o, r: penalize(x, p, torch.zeros_like(o), r),
        lambda x, p, o, r: penalize(x, torch.zeros_like(p), o, r),
        lambda x, p, o, r: penalize(x, p, o, r.roll(1)),
        lambda x, p, o, r: penalize(x, p, o, r * r),
    ],
    ids=["sign", "prompt alone", "output alone", "another row", "twice"],
)
def test_wrong_penalties_are_told_from_right_ones(wrong) -> None:
    limit = APPLY_REPETITION_PENALTIES.tolerances[torch.float32].for_output(0)
    args = arguments(next(c for c in APPLY_REPETITION_PENALTIES.cases if c.name == "odd size"))
    [error] = worst_errors(APPLY_REPETITION_PENALTIES, penalize(*args), args)
    assert error <= limit
    [error] = worst_errors(APPLY_REPETITION_PENALTIES, wrong(*args), args)
    assert error > limit


# ------------------------------------------------------------------------- top-k and top-p


@pytest.mark.parametrize("allow_cpu_sync", [True, False])
@cases(APPLY_TOP_K_TOP_P)
def test_the_choice_is_vllms_bit_for_bit(case, allow_cpu_sync) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits, k, p = arguments(case)
    if not logits.shape[0] and p is None:
        pytest.skip("vLLM asks for the largest k of no rows")
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync)
    assert same(choose(logits, k, p), expected)


def definition(row: list[float], k: int, p: float) -> tuple[set[int], set[int]]:
    """(tokens that must stay, tokens that may stay), by sums in float64."""
    ranked = sorted(range(len(row)), key=lambda i: -row[i])
    finite = [i for i in ranked if row[i] > -INF]
    within = finite[:k]
    if len(within) < len(finite) and row[finite[len(within)]] == row[within[-1]]:
        # The k-th has equals beyond it, and how many of them count changes all probabilities.
        must = {i for i in within if row[i] > row[within[-1]]}
        best = {i for i in finite if row[i] == row[finite[0]]}
        certain = must if p == 1 else best if len(best) == 1 else set()
        return certain, {i for i in finite if row[i] >= row[within[-1]]}
    weights = {i: math.exp(row[i] - row[finite[0]]) for i in within}
    total = math.fsum(weights.values())
    must, may, before = set(), set(), 0.0
    for i in within:
        rounding = len(row) * 2.0**-22
        if before < p - rounding or i == finite[0]:
            must.add(i)
        if before < p + rounding:
            may.add(i)
        before += weights[i] / total
    # Equal logits stand for each other.
    for value in {row[i] for i in may - must} | ({row[i] for i in finite} & {row[i] for i in may}):
        equal = {i for i in within if row[i] == value}
        if not equal <= must:
            may |= equal
            must -= equal
    return must, may


@cases(APPLY_TOP_K_TOP_P)
def test_the_choice_is_the_definition_in_float64(case) -> None:
    logits, k, p = arguments(case)
    out = choose(logits, k, p)
    for index, row in enumerate(logits.tolist()):
        must, may = definition(
            row,
            len(row) if k is None else int(k[index]),
            1.0 if p is None else float(p[index]),
        )
        kept = {i for i, value in enumerate(out[index].tolist()) if value > -INF}
        assert kept, index
        assert must <= kept <= may, (index, must - kept, kept - may)
        assert all(out[index, i] == logits[index, i] for i in kept)


def test_the_definition_is_no_formality() -> None:
    """Most rows of most cases are settled to the last token."""
    settled = total = 0
    for case in APPLY_TOP_K_TOP_P.cases:
        logits, k, p = arguments(case)
        for index, row in enumerate(logits.tolist()):
            must, may = definition(
                row,
                len(row) if k is None else int(k[index]),
                1.0 if p is None else float(p[index]),
            )
            total += 1
            settled += must == may
    assert settled > 0.6 * total


def judged(found: torch.Tensor, args: tuple) -> float:
    return max(worst_errors(APPLY_TOP_K_TOP_P, found, args))


LOGITS = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0, -1.0, -2.0]])


def kept(*indices: int) -> torch.Tensor:
    out = torch.full_like(LOGITS, -INF)
    out[:, list(indices)] = LOGITS[:, list(indices)]
    return out


@pytest.mark.parametrize(
    ("indices", "right"),
    [
        ((0, 2, 3, 4), True),  # all that equal the second
        ((0, 2), True),
        ((0, 4), True),
        ((0, 2, 4), True),
        ((0,), False),
        ((0, 1), False),
        ((2, 3), False),
        ((0, 1, 2), False),
        ((0, 2, 3, 4, 1), False),
    ],
    ids=str,
)
def test_of_those_that_equal_the_k_th_any_may_stay_but_no_fewer_than_k(indices, right) -> None:
    args = (LOGITS, torch.tensor([2]), None)
    assert (judged(kept(*indices), args) == 0) == right


@pytest.mark.parametrize(
    ("indices", "right"),
    [((0, 2), True), ((0, 3), True), ((0, 4), True), ((0, 2, 3), False), ((0,), False)],
    ids=str,
)
def test_of_equal_logits_at_the_boundary_of_p_any_may_stay_but_their_number_is_known(
    indices, right
) -> None:
    share = LOGITS.softmax(-1)[0]
    p = torch.tensor([float(share[0] + share[2] / 2)])
    assert (judged(kept(*indices), (LOGITS, None, p)) == 0) == right


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, k, p: choose(x, (k - 1).clamp(min=1), p),
        lambda x, k, p: choose(x, (k + 1).clamp(max=x.shape[1]), None),
        lambda x, k, p: choose(x, k, None),
        lambda x, k, p: choose(x, None, p),
        lambda x, k, p: choose(choose(x, None, p), k, None),
        lambda x, k, p: choose(x, k, p * 0.9),
        lambda x, k, p: choose(x, k, 1 - p),
        lambda x, k, p: choose(x, k, p).masked_fill(x == x.amax(-1, keepdim=True), -INF),
        lambda x, k, p: choose(x, k, p).nan_to_num(neginf=-1e9),
        lambda x, k, p: choose(x, k, p).log_softmax(-1),
        lambda x, k, p: choose(x.flip(0), k, p).flip(0),
    ],
    ids=[
        "k-1", "k+1", "without p", "without k", "p first", "less p", "the other p",
        "without the best", "-1e9", "normalized", "other rows",
    ],
)  # fmt: skip
def test_a_wrong_choice_is_told_from_a_right_one(wrong) -> None:
    names = ("odd size", "prime vocabulary")
    all_args = [arguments(c) for c in APPLY_TOP_K_TOP_P.cases if c.name in names]
    assert max(judged(choose(*args), args) for args in all_args) == 0
    assert max(judged(wrong(*args), args) for args in all_args) > 0


def test_nothing_is_written_and_nothing_given_is_returned() -> None:
    for contract in (APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P):
        for case in contract.cases:
            args = arguments(case)
            before = [a.clone() if a is not None else None for a in args]
            out = contract.reference(*args)
            for a, b in zip(args, before, strict=True):
                assert a is None or same(a, b), case.name
            assert not out.numel() or out.data_ptr() not in [
                a.data_ptr() for a in args if a is not None
            ]
