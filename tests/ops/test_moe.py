# SPDX-License-Identifier: Apache-2.0
"""The MoE ops against loops over tokens and experts in float64, and against vLLM's own code."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from vllm_fl.ops.contract import Case, OpContract
from vllm_fl.ops.moe import (
    CONTRACTS,
    FUSED_EXPERTS,
    GROUPED_TOPK,
    MOE_ALIGN_BLOCK_SIZE,
    MOE_SUM,
    TOPK_SOFTMAX,
)
from vllm_fl.ops.moe_experts import ACTIVATIONS
from vllm_fl.testing import outputs_of, worst_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def each_case(contract: OpContract):
    return pytest.mark.parametrize("case", contract.cases, ids=lambda c: c.name)


def make(contract: OpContract, name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return next(c for c in contract.cases if c.name == name).make(dtype, generator())


def named(contract: OpContract, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, defaults included."""
    given = dict(zip(contract.signature.parameter_names, args, strict=False))
    return {p.name: given.get(p.name, p.default) for p in contract.signature.parameters}


def within(contract: OpContract, result: Any, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    limits = contract.tolerances[dtype]
    errors = worst_errors(contract, result, args)
    return all(error <= limits.for_output(i) for i, error in enumerate(errors))


def vllm_module(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"vllm.model_executor.layers.fused_moe.{name}")


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> list[dict[int, float]]:
    """For each token its experts and their weights."""
    return [
        dict(zip(chosen, row, strict=True))
        for chosen, row in zip(ids.tolist(), weights.tolist(), strict=True)
    ]


# --------------------------------------------------------------------------------- topk_softmax


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    terms = [math.exp(x - largest) for x in logits]
    total = math.fsum(terms)
    return [t / total for t in terms]


@each_dtype
@each_case(TOPK_SOFTMAX)
def test_topk_softmax_is_a_loop_over_tokens(case, dtype) -> None:
    args = case.make(dtype, generator())
    a = named(TOPK_SOFTMAX, args)
    weights, ids = TOPK_SOFTMAX.reference(*args)
    assert weights.dtype is torch.float32 and ids.dtype is torch.int32
    rows = a["gating_output"].double()
    for token, found in enumerate(by_expert(weights, ids)):
        if a["is_padding"] is not None and a["is_padding"][token]:
            assert found == {-1: 0.0}
            continue
        assert len(found) == a["topk"]
        if not rows[token].lt(math.inf).all() or rows[token].isnan().any():
            assert set(found.values()) == {0.0}
            continue
        scores = softmax(rows[token].tolist())
        bias = a["e_score_correction_bias"]
        offsets = [0.0] * len(scores) if bias is None else bias.double().tolist()
        choice = [s + o for s, o in zip(scores, offsets, strict=True)]
        best = sorted(choice, reverse=True)[: a["topk"]]
        for wanted, expert in zip(best, sorted(found, key=lambda e: -choice[e]), strict=True):
            assert choice[expert] == pytest.approx(wanted, rel=1e-5, abs=1e-30)
        total = math.fsum(scores[e] for e in found) if a["renormalize"] else 1.0
        for expert, weight in found.items():
            assert weight == pytest.approx(scores[expert] / total, rel=1e-5, abs=1e-30)


def test_topk_softmax_is_what_vllm_computes_in_pytorch() -> None:
    router = vllm_module("router.cpu_router")
    for case in TOPK_SOFTMAX.cases:
        if "bias" in case.name or "padding" in case.name or "inf" in case.name:
            continue  # vLLM's router has neither, and NaN is not defined there
        args = case.make(torch.float32, generator())
        logits, topk, renormalize = args[:3]
        theirs = router._softmax_topk(logits, topk, renormalize)
        assert within(TOPK_SOFTMAX, theirs, args, torch.float32), case.name


# --------------------------------------------------------------------------------- grouped_topk


def grouped(a: dict[str, Any], row: list[float]) -> tuple[list[float], list[float], list[int]]:
    """Scores, what decides, and the experts of the best groups of one token; and the distance
    from the last group that is taken to the first that is not."""
    if a["scoring_func"] == "softmax":
        scores = softmax(row)
    elif a["scoring_func"] == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    else:
        scores = row
    bias = a["e_score_correction_bias"]
    offsets = [0.0] * len(scores) if bias is None else bias.double().tolist()
    choice = [s + o for s, o in zip(scores, offsets, strict=True)]
    size = len(choice) // a["num_expert_group"]
    groups = [choice[i : i + size] for i in range(0, len(choice), size)]
    worth = [sum(sorted(g)[-(1 if bias is None else 2) :]) for g in groups]
    order = sorted(range(len(groups)), key=lambda g: -worth[g])
    allowed = [e for g in order[: a["topk_group"]] for e in range(g * size, (g + 1) * size)]
    return scores, choice, allowed


@each_dtype
@each_case(GROUPED_TOPK)
def test_grouped_topk_is_a_loop_over_tokens(case, dtype) -> None:
    args = case.make(dtype, generator())
    a = named(GROUPED_TOPK, args)
    weights, ids = GROUPED_TOPK.reference(*args)
    assert weights.dtype is torch.float32 and ids.dtype is torch.int32
    for token, found in enumerate(by_expert(weights, ids)):
        scores, choice, allowed = grouped(a, a["gating_output"][token].double().tolist())
        assert len(found) == a["topk"]
        # Scores of zero are equal, and so are groups of them.
        assert {e for e in found if abs(choice[e]) > 1e-30} <= set(allowed)
        best = sorted((choice[e] for e in allowed), reverse=True)[: a["topk"]]
        for wanted, expert in zip(best, sorted(found, key=lambda e: -choice[e]), strict=True):
            assert choice[expert] == pytest.approx(wanted, rel=1e-5, abs=1e-30)
        total = math.fsum(scores[e] for e in found) if a["renormalize"] else 1.0
        for expert, weight in found.items():
            expected = scores[expert] / total * a["routed_scaling_factor"]
            assert weight == pytest.approx(expected, rel=1e-5, abs=1e-30)


def vllm_grouped_topk(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    router = vllm_module("router.grouped_topk_router")
    native = getattr(router.grouped_topk, "_torchdynamo_orig_callable", router.grouped_topk)
    logits, *plain = args
    return native(logits, logits, *plain)


@each_dtype
def test_grouped_topk_is_what_vllm_computes_in_pytorch(dtype) -> None:
    """Scores rounded to the dtype of the logits, as vLLM has them, are within the tolerance."""
    compared = 0
    for case in GROUPED_TOPK.cases:
        args = case.make(dtype, generator())
        if args[5] == "none" or case.name == "zero tokens":
            continue  # vLLM's PyTorch takes logits alone, and asks for an ambiguous view
        assert within(GROUPED_TOPK, vllm_grouped_topk(args), args, dtype), case.name
        compared += 1
    assert compared > 15


def test_grouped_topk_is_what_vllms_router_for_cpus_computes() -> None:
    router = vllm_module("router.cpu_router")
    for case in GROUPED_TOPK.cases:
        args = case.make(torch.bfloat16, generator())
        if args[5] == "none" or case.name == "zero tokens":
            continue
        theirs = router._grouped_topk(*args)
        assert within(GROUPED_TOPK, theirs, args, torch.float32), case.name


def test_the_cases_keep_groups_apart_by_more_than_rounding() -> None:
    checked = 0
    for case in GROUPED_TOPK.cases:
        args = case.make(torch.bfloat16, generator())
        a = named(GROUPED_TOPK, args)
        if case.name in ("tiny values", "huge values"):
            continue  # nearly equal experts, and scores of zero
        for row in a["gating_output"].double():
            scores, _, allowed = grouped(a, row.tolist())
            for seed in range(3):
                noise = 2 * torch.rand(row.shape, generator=generator(seed)).double() - 1
                rounded = torch.tensor(scores).double() * (1 + 2.0**-8 * noise)
                again = grouped({**a, "scoring_func": "none"}, rounded.tolist())
                assert set(again[2]) == set(allowed), case.name
                checked += 1
    assert checked > 300


def test_an_unknown_way_to_score_is_an_error_that_lists_the_known_ones() -> None:
    args = make(GROUPED_TOPK, "one token")
    with pytest.raises(
        ValueError, match=r"'relu' is not known; valid: 'softmax', 'sigmoid', 'none'"
    ):
        GROUPED_TOPK.reference(*args[:5], "relu")


# ------------------------------------------------------------------------- moe_align_block_size


@each_case(MOE_ALIGN_BLOCK_SIZE)
def test_moe_align_block_size_is_a_loop_over_choices(case) -> None:
    args = case.make(torch.float32, generator())
    a = named(MOE_ALIGN_BLOCK_SIZE, args)
    block, experts = a["block_size"], a["num_experts"]
    choices = a["topk_ids"].flatten().tolist()
    mapping = None if a["expert_map"] is None else a["expert_map"].tolist()
    rows: dict[int, list[int]] = {}
    for number, expert in enumerate(choices):
        if not 0 <= expert < experts:
            continue
        if mapping is not None and a["ignore_invalid_experts"]:
            expert = mapping[expert]
            if expert < 0:
                continue
        rows.setdefault(expert, []).append(number)
    entries, owners = [], []
    for expert in sorted(rows):
        numbers = rows[expert]
        padding = -len(numbers) % block
        entries += numbers + [len(choices)] * padding
        owner = expert
        if mapping is not None and not a["ignore_invalid_experts"]:
            owner = mapping[expert]
        owners += [owner] * ((len(numbers) + padding) // block)
    sorted_ids, expert_ids, used = MOE_ALIGN_BLOCK_SIZE.reference(*args)
    assert {t.dtype for t in (sorted_ids, expert_ids, used)} == {torch.int32}
    assert used.tolist() == [len(entries)]
    assert sorted_ids[: len(entries)].tolist() == entries
    assert expert_ids[: len(owners)].tolist() == owners
    assert len(entries) <= sorted_ids.numel()


def test_the_outputs_have_the_sizes_that_vllm_gives_its_buffers(monkeypatch) -> None:
    helper = vllm_module("moe_align_block_size")
    monkeypatch.setattr(helper.ops, "moe_align_block_size", lambda *args: None)
    for case in MOE_ALIGN_BLOCK_SIZE.cases:
        ids, block, experts, expert_map, pad, ignore = case.make(torch.float32, generator())
        if expert_map is not None and not ignore:
            continue  # vLLM looks up what nobody wrote here
        theirs = helper.moe_align_block_size(ids, block, experts, expert_map, pad, ignore)
        ours = MOE_ALIGN_BLOCK_SIZE.reference(ids, block, experts, expert_map, pad, ignore)
        assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]


def test_the_order_within_an_expert_and_what_lies_behind_are_open() -> None:
    args = make(MOE_ALIGN_BLOCK_SIZE, "several tokens")
    sorted_ids, expert_ids, used = MOE_ALIGN_BLOCK_SIZE.reference(*args)
    turned = sorted_ids.clone()
    for start in range(0, used.item(), 16):
        turned[start : start + 16] = sorted_ids[start : start + 16].flip(0)
    turned[used:] = 3
    behind = expert_ids.clone()
    behind[used // 16 :] = 5
    assert not torch.equal(turned, sorted_ids)
    assert worst_errors(MOE_ALIGN_BLOCK_SIZE, (turned, behind, used), args) == (0, 0, 0)
    swapped = sorted_ids.clone()
    swapped[0], swapped[16] = sorted_ids[16], sorted_ids[0]
    assert max(worst_errors(MOE_ALIGN_BLOCK_SIZE, (swapped, expert_ids, used), args)) > 0


# -------------------------------------------------------------------------------------- moe_sum


@each_dtype
@each_case(MOE_SUM)
def test_moe_sum_is_a_sum_of_the_rows_that_count(case, dtype) -> None:
    args = case.make(dtype, generator())
    rows, ids, expert_map = (*args, None, None)[:3]
    found = MOE_SUM.reference(*args)
    assert found.dtype is dtype
    expected = torch.zeros(found.shape, dtype=torch.float64)
    for token in range(rows.shape[0]):
        kept = [
            k
            for k in range(rows.shape[1])
            if ids is None
            or (ids[token, k] >= 0 and (expert_map is None or expert_map[ids[token, k]] >= 0))
        ]
        for k in kept:
            expected[token] += rows[token, k].double()
    exact = MOE_SUM.exact(rows.double(), ids, expert_map)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-9, equal_nan=True)
    assert within(MOE_SUM, found, args, dtype)


# -------------------------------------------------------------------------------- fused_experts


def activate(name: str, row: torch.Tensor) -> torch.Tensor:
    """One row, one formula, in float64."""

    def silu(x):
        return x / (1 + torch.exp(-x))

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def gelu_tanh(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    plain = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
    if name.endswith("_no_mul"):
        if name == "relu2_no_mul":
            return torch.where(row > 0, row * row, 0.0)
        return plain[name.removesuffix("_no_mul")](row)
    if name == "swigluoai":
        gate, up = row[0::2].clamp(max=7.0), row[1::2].clamp(-7.0, 7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    gate, up = row[: row.numel() // 2], row[row.numel() // 2 :]
    if name == "swiglustep":
        return silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    return plain[name](gate) * up


def loop_over_choices(args: tuple[Any, ...]) -> torch.Tensor:
    a = named(FUSED_EXPERTS, args)
    output = torch.zeros_like(a["hidden_states"], dtype=torch.float64)
    for token, chosen in enumerate(a["topk_ids"].tolist()):
        for choice, expert in enumerate(chosen):
            if a["expert_map"] is not None:
                expert = -1 if expert < 0 else int(a["expert_map"][expert])
            if expert < 0:
                continue
            weight = float(a["topk_weights"][token, choice])
            row = a["w1"][expert].double() @ a["hidden_states"][token].double()
            if a["w1_bias"] is not None:
                row = row + a["w1_bias"][expert].double()
            if a["apply_router_weight_on_input"]:
                row, weight = row * weight, 1.0
            row = a["w2"][expert].double() @ activate(a["activation"], row)
            if a["w2_bias"] is not None:
                row = row + a["w2_bias"][expert].double()
            output[token] += weight * row
    return output


@each_dtype
@each_case(FUSED_EXPERTS)
def test_fused_experts_is_a_loop_over_tokens_and_their_experts(case, dtype) -> None:
    if case.dtypes is not None and dtype not in case.dtypes:
        dtype = case.dtypes[0]
    args = case.make(dtype, generator())
    expected = loop_over_choices(args)
    exact = FUSED_EXPERTS.exact(*(a.double() if _floats(a) else a for a in args))
    torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert within(FUSED_EXPERTS, FUSED_EXPERTS.reference(*args), args, dtype)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def test_every_activation_that_vllms_fused_experts_takes_is_known() -> None:
    theirs = vllm_module("activation")
    needs_more = {"situ", "swiglu_uninterleave", "swigluoai_uninterleave"}  # a limit, or betas
    taken = {member.value for member in theirs.MoEActivation} - needs_more - {"relu2"}
    assert taken <= set(ACTIVATIONS)


@pytest.mark.parametrize("name", ("swigluoai", "swiglustep"))
def test_activations_are_those_of_vllms_layers(name) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("vllm.model_executor.layers.activation")
        from vllm.config import VllmConfig, set_current_vllm_config

        cls = {"swigluoai": "SwigluOAIAndMul", "swiglustep": "SwigluStepAndMul"}[name]
        with set_current_vllm_config(VllmConfig()):
            layer = getattr(theirs, cls)()
    x = 5 * torch.randn(9, 32, generator=generator())
    assert torch.equal(ACTIVATIONS[name](x), layer.forward_native(x))


def test_an_unknown_activation_is_an_error_that_lists_the_known_ones() -> None:
    args = make(FUSED_EXPERTS, "one token")
    with pytest.raises(ValueError, match=r"activation 'tanh' is not known; valid: silu, gelu, "):
        FUSED_EXPERTS.reference(*args[:5], "tanh")


def with_roundings(args: tuple[Any, ...]) -> torch.Tensor:
    """Each stage rounded to the dtype of the tokens, as vLLM's Triton kernels store it."""
    a = named(FUSED_EXPERTS, args)
    dtype, experts = a["hidden_states"].dtype, a["w1"].shape[0]
    local = a["topk_ids"].long()
    if a["expert_map"] is not None:
        local = torch.where(local < 0, -1, a["expert_map"][local.clamp(min=0)].long())
    index = local.clamp(0, experts - 1)
    rows = torch.einsum("th,tknh->tkn", a["hidden_states"].float(), a["w1"][index].float())
    if a["w1_bias"] is not None:
        rows = rows + a["w1_bias"][index].float()
    weight = a["topk_weights"][..., None]
    if a["apply_router_weight_on_input"]:
        rows, weight = rows * weight, torch.ones_like(weight)
    inner = ACTIVATIONS[a["activation"]](rows.to(dtype).float()).to(dtype)
    parts = torch.einsum("tki,tkhi->tkh", inner.float(), a["w2"][index].float())
    if a["w2_bias"] is not None:
        parts = parts + a["w2_bias"][index].float()
    parts = (parts * weight).to(dtype)
    return torch.where(local[..., None] < 0, 0.0, parts.float()).sum(1).to(dtype)


@each_dtype
def test_roundings_between_the_stages_are_within_the_tolerance(dtype) -> None:
    for case in FUSED_EXPERTS.cases_for(dtype):
        for seed in range(3):
            args = case.make(dtype, generator(seed))
            assert within(FUSED_EXPERTS, with_roundings(args), args, dtype), case.name


@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "swigluoai"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_fused_experts_is_what_vllms_kernel_for_cpus_computes(activation, dtype) -> None:
    """That kernel takes packed weights, so it cannot stand in; it can confirm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm")
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        pytest.skip("this release of vLLM has no such kernel")
    make_args = FUSED_EXPERTS.cases[0].make.func
    args = make_args(
        dtype, generator(), tokens=9, experts=8, topk=3, hidden=64, inner=96, activation=activation
    )
    x, w1, w2, weights, ids = args[:5]
    output, packed = torch.empty_like(x), [torch.empty_like(w) for w in (w1, w2)]
    for weight, into in zip((w1, w2), packed, strict=True):
        torch.ops._C.prepack_moe_weight(weight, into, "vec")
    torch.ops._C.cpu_fused_moe(
        output, x, *packed, None, None, weights, ids, False, activation, "vec"
    )
    assert within(FUSED_EXPERTS, output, args, dtype)


# --------------------------------------------------------------------- wrong ones are found out


def _changed(contract: OpContract, *args: Any, **changes: Any) -> Any:
    """The reference, called with other arguments than it was given."""
    values = named(contract, args)
    return contract.reference(**{**values, **{n: f(values) for n, f in changes.items()}})


def changed(contract: OpContract, **changes: Any):
    return partial(_changed, contract, **changes)


def moved(contract: OpContract, f: Any):
    """The reference, whose outputs are changed."""
    return lambda *args: f(outputs_of(contract.reference(*args)), named(contract, args))


def biased_weights(outputs, a):
    weights, ids = outputs
    return weights + a["e_score_correction_bias"][ids.long()], ids


def best_single(outputs, a):
    """Ranks groups by their best expert alone, bias or not."""
    choice = a["gating_output"].float().sigmoid() + a["e_score_correction_bias"]
    chosen = choice.argsort(dim=-1, descending=True)[:, : a["topk"]]
    return a["gating_output"].float().sigmoid().gather(1, chosen), chosen.int()


def summed_in_place(rows, *_):
    total = rows[:, 0].clone()
    for k in range(1, rows.shape[1]):
        total += rows[:, k]
    return total


WRONG: dict[str, tuple[OpContract, Any, str, torch.dtype]] = {
    "renormalized nevertheless": (
        TOPK_SOFTMAX,
        changed(TOPK_SOFTMAX, renormalize=lambda a: True),
        "top 8 of 256",
        torch.bfloat16,
    ),
    "1024 experts looked at": (
        TOPK_SOFTMAX,
        lambda logits, *rest: TOPK_SOFTMAX.reference(logits[:, :1024], *rest),
        "2053 experts",
        torch.float32,
    ),
    "logits taken for packed": (
        TOPK_SOFTMAX,
        lambda logits, *rest: TOPK_SOFTMAX.reference(
            torch.as_strided(logits, logits.shape, (logits.shape[1], 1)), *rest
        ),
        "slice of wider rows",
        torch.bfloat16,
    ),
    "bias in the weights": (
        TOPK_SOFTMAX,
        moved(TOPK_SOFTMAX, biased_weights),
        "bias",
        torch.float32,
    ),
    "bias ignored": (
        TOPK_SOFTMAX,
        changed(TOPK_SOFTMAX, e_score_correction_bias=lambda a: None),
        "bias, renormalized",
        torch.float32,
    ),
    "one expert twice": (
        TOPK_SOFTMAX,
        moved(TOPK_SOFTMAX, lambda o, a: (o[0], o[1][:, :1].expand_as(o[1]))),
        "inf and nan",
        torch.float32,
    ),
    "padding routed": (
        TOPK_SOFTMAX,
        changed(TOPK_SOFTMAX, is_padding=lambda a: None),
        "padding",
        torch.float16,
    ),
    "softmax in half precision": (
        TOPK_SOFTMAX,
        moved(TOPK_SOFTMAX, lambda o, a: (o[0].bfloat16().float(), o[1])),
        "top 8 of 256",
        torch.bfloat16,
    ),
    "no groups": (
        GROUPED_TOPK,
        changed(GROUPED_TOPK, topk_group=lambda a: a["num_expert_group"]),
        "sigmoid, bias, as in DeepSeek-V3",
        torch.bfloat16,
    ),
    "groups by their best expert": (
        GROUPED_TOPK,
        moved(GROUPED_TOPK, best_single),
        "sigmoid, bias",
        torch.float32,
    ),
    "not scaled": (
        GROUPED_TOPK,
        changed(GROUPED_TOPK, routed_scaling_factor=lambda a: 1.0),
        "scaled",
        torch.bfloat16,
    ),
    "softmax for sigmoid": (
        GROUPED_TOPK,
        changed(GROUPED_TOPK, scoring_func=lambda a: "softmax"),
        "sigmoid",
        torch.bfloat16,
    ),
    "padding counted": (
        MOE_ALIGN_BLOCK_SIZE,
        changed(MOE_ALIGN_BLOCK_SIZE, topk_ids=lambda a: a["topk_ids"].clamp(min=0)),
        "padding",
        torch.float32,
    ),
    "experts elsewhere keep their blocks": (
        MOE_ALIGN_BLOCK_SIZE,
        changed(MOE_ALIGN_BLOCK_SIZE, ignore_invalid_experts=lambda a: False),
        "experts elsewhere are ignored",
        torch.float32,
    ),
    "a choice lost": (
        MOE_ALIGN_BLOCK_SIZE,
        moved(MOE_ALIGN_BLOCK_SIZE, lambda o, a: (o[0].masked_fill(o[0] == 0, 14), *o[1:])),
        "several tokens",
        torch.float32,
    ),
    "summed in half precision": (MOE_SUM, summed_in_place, "top 8", torch.bfloat16),
    "dropped rows multiplied by zero": (
        MOE_SUM,
        lambda rows, ids, expert_map: (rows * (ids >= 0)[..., None]).sum(1),
        "rows of padding",
        torch.float32,
    ),
    "expert_map ignored": (
        MOE_SUM,
        changed(MOE_SUM, expert_map=lambda a: None),
        "rows of experts elsewhere",
        torch.bfloat16,
    ),
    "weights on the wrong side": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, apply_router_weight_on_input=lambda a: False),
        "weights on the input",
        torch.bfloat16,
    ),
    "no weights": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, topk_weights=lambda a: torch.ones_like(a["topk_weights"])),
        "several tokens",
        torch.bfloat16,
    ),
    "gelu for gelu_tanh": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, activation=lambda a: "gelu"),
        "gelu_tanh",
        torch.float32,
    ),
    "gate and up exchanged": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, w1=lambda a: a["w1"].roll(a["w1"].shape[1] // 2, 1)),
        "wide",
        torch.bfloat16,
    ),
    "halves for alternate columns": (
        FUSED_EXPERTS,
        changed(
            FUSED_EXPERTS,
            w1=lambda a: torch.cat((a["w1"][:, ::2], a["w1"][:, 1::2]), dim=1),
        ),
        "swigluoai",
        torch.float16,
    ),
    "biases ignored": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, w2_bias=lambda a: None),
        "biases",
        torch.bfloat16,
    ),
    "expert_map turned around": (
        FUSED_EXPERTS,
        changed(
            FUSED_EXPERTS,
            expert_map=lambda a: torch.where(
                a["expert_map"] < 0, -1, a["w1"].shape[0] - 1 - a["expert_map"]
            ),
        ),
        "experts elsewhere",
        torch.bfloat16,
    ),
    "the last column left out": (
        FUSED_EXPERTS,
        changed(FUSED_EXPERTS, w2=lambda a: a["w2"].clone().index_fill_(2, torch.tensor([18]), 0)),
        "odd and prime sizes",
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_found_out_by_a_case(name) -> None:
    contract, wrong, case, dtype = WRONG[name]
    args = make(contract, case, dtype)
    assert not within(contract, wrong(*args), args, dtype)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_no_case_is_harder_than_a_right_implementation(contract) -> None:
    for dtype in contract.tolerances:
        for seed in (1, 2, 3):
            for case in contract.cases_for(dtype):
                assert isinstance(case, Case)
                args = case.make(dtype, generator(seed))
                assert within(contract, contract.reference(*args), args, dtype), case.name
