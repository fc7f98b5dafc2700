# SPDX-License-Identifier: Apache-2.0
"""The traps of torch_npu, each shown twice: the call that vendor.ascend makes, or its guard,
passes a check; what stands there without it does not pass the same check."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.vendor.ascend.device import to_cpu, to_npu
from tests.backends.vendor.ascend.harness import STATE, LimitError
from tests.backends.vendor.ascend.served import SERVED
from vllm_fl.backends.vendor.ascend import impl as impl_package
from vllm_fl.backends.vendor.ascend.ascend import backend, backend_310p, backend_a5
from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops import CONTRACTS
from vllm_fl.testing import outputs_of, worst_errors

CONTRACT = {contract.name: contract for contract in CONTRACTS}
IMPL = {impl.op_name: impl for _, impl in SERVED}
DTYPE = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def manager(impl: OpImpl) -> OpManager:
    """A dispatcher with an implementation, and the reference behind it."""
    contract = CONTRACT[impl.op_name]
    behind = OpImpl(
        impl.op_name, "reference.torch", BackendImplKind.REFERENCE, contract.reference, priority=50
    )
    registry = OpRegistry()
    registry.plugins = ()
    registry.declare(contract.signature)
    registry.register_many([replace(impl, origin=None), behind])
    return OpManager(registry, config=Config(), device=facts_of("ascend"))


def is_right(impl: OpImpl, args: tuple[Any, ...], found: Any = None) -> None:
    """The dispatched call gives what the contract says, and writes nothing of the caller's."""
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    given = to_npu(args)
    result = manager(impl).call(impl.op_name, *given)
    contract = CONTRACT[impl.op_name]
    dtype = next(a.dtype for a in before if isinstance(a, torch.Tensor) and a.is_floating_point())
    limit = contract.tolerances[dtype]
    for index, error in enumerate(worst_errors(contract, to_cpu(outputs_of(result)), before)):
        assert error <= limit.for_output(index), f"output {index} is off by {error} ulps"
    for now, then in zip(args, before, strict=True):
        assert not isinstance(now, torch.Tensor) or torch.equal(now, then), (
            "an argument was written"
        )


# -------------------------------------------------------------------------- the unsafe calls


def rope_of_the_first_table(positions, query, key, head_size, cos_sin_cache, is_neox):
    query, key = query.clone(), key.clone()
    torch.ops.atb._npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def rope_that_writes(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1)[:, None].contiguous() for t in (cos, sin))
    heads = [t.view(t.shape[0], -1, head_size) for t in (query, key)]
    q, k = torch.ops.npu.npu_apply_rotary_pos_emb(*heads, cos, sin, layout="TND")
    return q.view(query.shape), k.view(key.shape)


def rstd_as_the_residual(x, residual, weight, epsilon, variance_size=None):
    y, rstd, _ = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon=epsilon)
    return y, rstd.expand(x.shape).to(x.dtype)


def cache_of_the_default_layout(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    torch.ops.npu.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


def cache_with_padding(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )
    return key_cache, value_cache


def weights_as_they_come(
    gating_output, topk, renormalize=False, e_score_correction_bias=None, is_padding=None
):
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(gating_output, k=topk)
    return weights.float(), ids


def renormalized_by_the_operator(
    gating_output,
    topk,
    renormalize,
    num_expert_group,
    topk_group,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    e_score_correction_bias=None,
):
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        gating_output,
        topk,
        k_group=topk_group,
        group_count=num_expert_group,
        renorm=1,
    )
    return weights, ids


def routing_by_default(
    hidden_states,
    w1,
    w2,
    topk_weights,
    topk_ids,
    activation="silu",
    apply_router_weight_on_input=False,
    global_num_experts=-1,
    expert_map=None,
    w1_bias=None,
    w2_bias=None,
):
    return torch.ops.npu.npu_moe_init_routing_v2(hidden_states, topk_ids, expert_num=w1.shape[0])


def gelu_in_one_call(x, approximate="none"):
    return torch.ops.npu.npu_gelu_mul(x, approximate=approximate)


def merged_as_they_come(
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    prefill_tokens_with_context=None,
    output_scale=None,
    return_lse=True,
):
    heads, tokens = prefix_lse.shape
    out, lse = torch.ops.npu.npu_attention_update(
        [x.t().reshape(-1) for x in (prefix_lse, suffix_lse)],
        [x.reshape(tokens * heads, -1) for x in (prefix_output, suffix_output)],
        1,
    )
    return out.view(prefix_output.shape), lse.view(tokens, heads).t()


# -------------------------------------------------------------------------------- the inputs


def rope_args(theta: float, head_size: int = 64) -> tuple[Any, ...]:
    half = torch.arange(head_size // 2) / (head_size // 2)
    angles = torch.arange(40)[:, None] * theta**-half
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(DTYPE)
    positions = torch.tensor([3, 0, 17, 39, 8])
    return positions, rand(5, 3 * head_size), rand(5, 2 * head_size), head_size, cache, True


def two_ropes(impl: OpImpl) -> None:
    is_right(impl, rope_args(10000.0))
    is_right(impl, rope_args(500.0))


def cache_args(slots: list[int]) -> tuple[Any, ...]:
    one = torch.ones(())
    tokens = (len(slots), 2, 32)
    caches = rand(4, 16, 2, 32), rand(4, 16, 2, 32) + 1
    return rand(*tokens), rand(*tokens) + 1, *caches, torch.tensor(slots), "auto", one, one


def parts(level: float, empty: float = 0.0) -> tuple[Any, ...]:
    prefix, suffix = (level + 3 * rand(2, n, dtype=torch.float32)[:, :5] for n in (5, 6))
    if empty:
        prefix[:, 1] = suffix[:, 1] = empty
    return rand(5, 2, 16), prefix, rand(5, 2, 17)[..., :16], suffix


def experts_args() -> tuple[Any, ...]:
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    ids = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    return rand(2, 32), rand(3, 32, 32) / 6, rand(3, 32, 16) / 6, weights, ids


@dataclass(frozen=True)
class Trap:
    """What is checked, on which op, and what stands where the safe call or the guard is not."""

    op: str
    check: Callable[[OpImpl], None]
    unsafe: Callable[..., Any] | None = None
    without: str = ""


def on(*args: Any) -> Callable[[OpImpl], None]:
    return lambda impl: is_right(impl, args)


TRAPS = {
    "the first rotary table serves every later model": Trap(
        "rotary_embedding", two_ropes, rope_of_the_first_table
    ),
    "a rotary operator writes what its schema does not say": Trap(
        "rotary_embedding", on(*rope_args(10000.0)), rope_that_writes
    ),
    "the second output of the fused norm is no residual": Trap(
        "fused_add_rms_norm",
        on(rand(5, 64), rand(5, 64), rand(64), 1e-6),
        rstd_as_the_residual,
    ),
    "a norm without a weight passes the schema": Trap(
        "rms_norm", on(rand(5, 64), None, 1e-6), without="guards"
    ),
    "a weight of another dtype": Trap(
        "rms_norm", on(rand(5, 64), rand(64, dtype=torch.float32), 1e-6), without="guards"
    ),
    "the cache's default layout is another": Trap(
        "reshape_and_cache_flash", on(*cache_args([7, 1, 33])), cache_of_the_default_layout
    ),
    "a padded token has no slot": Trap(
        "reshape_and_cache_flash", on(*cache_args([7, -1, 33])), cache_with_padding
    ),
    "routing weights are not renormalized, and rounded": Trap(
        "topk_softmax", on(rand(5, 8), 2, True), weights_as_they_come
    ),
    "the operator refuses to renormalize": Trap(
        "grouped_topk",
        on(rand(5, 16, dtype=torch.float32), 2, True, 4, 2),
        renormalized_by_the_operator,
    ),
    "the defaults of the routing are not supported": Trap(
        "fused_experts", on(*experts_args()), routing_by_default
    ),
    "two empty parts of attention are not a number": Trap(
        "merge_attn_states", on(*parts(0.0, empty=-float("inf"))), merged_as_they_come
    ),
    "a merged logsumexp of 1e5 is too coarse to weigh by": Trap(
        "merge_attn_states", on(*parts(1e5)), merged_as_they_come
    ),
    "gelu with its product takes short rows": Trap(
        "gelu_and_mul", on(rand(3, 2048)), gelu_in_one_call
    ),
    "k is 1024 at most, and no top-k is the vocabulary": Trap(
        "apply_top_k_top_p",
        on(rand(2, 2000, dtype=torch.float32), torch.tensor([2000, 5], dtype=torch.int32), None),
        without="guards",
    ),
    "a head that is no multiple of 32": Trap(
        "rotary_embedding", on(*rope_args(10000.0, head_size=48)), without="guards"
    ),
    "sections that the device refuses": Trap(
        "mrotary_embedding",
        on(torch.stack([rope_args(100.0)[0]] * 3), *rope_args(100.0)[1:], [16, 16, 0]),
        without="guards",
    ),
}
EACH = [pytest.param(trap, id=name) for name, trap in TRAPS.items() if trap.op in IMPL]


@pytest.mark.parametrize("trap", EACH)
def test_it_is_avoided(trap):
    trap.check(IMPL[trap.op])


@pytest.mark.parametrize("trap", EACH)
def test_without_the_guard_or_the_safe_call_it_springs(trap):
    impl = IMPL[trap.op]
    if trap.unsafe is None:
        unsafe = replace(impl, supports=None, supports_layer=None)
    else:
        unsafe = replace(impl, fn=trap.unsafe, available=backend.is_available)
    with pytest.raises((AssertionError, LimitError, RuntimeError)):
        trap.check(unsafe)


# ------------------------------------------------------------------------- what never happens


def test_the_unsafe_operators_are_never_called():
    for trap in TRAPS.values():
        if trap.op in IMPL:
            trap.check(IMPL[trap.op])
    unsafe = {"_npu_rotary_embedding", "npu_apply_rotary_pos_emb", "npu_gelu_mul"}
    assert STATE.calls and not unsafe & set(STATE.names())


def test_in_place_a_view_would_stay_as_it_was():
    impl = IMPL["fused_add_rms_norm"]
    args = rand(5, 128)[:, :64], rand(5, 64), rand(64), 1e-6
    expected = outputs_of(CONTRACT["fused_add_rms_norm"].reference(*args))
    given = to_npu(args)
    assert impl.supports(*given) == "x or residual is not contiguous"
    assert not torch.equal(to_cpu(outputs_of(impl.fn(*given)))[0], expected[0])


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
def test_each_of_both_guards_refuses_a_norm_without_a_weight(op):
    """Either would do in a layer; a call that is not a layer's has the second alone."""
    impl, x = IMPL[op], rand(5, 64)
    args = (x, None, 1e-6) if op == "rms_norm" else (x, rand(5, 64), None, 1e-6)
    facts = CONTRACT[op].signature.facts_of(*args)
    assert (
        impl.supports_layer(facts) == "the layer has no weight, without which the operator crashes"
    )
    assert impl.supports(*to_npu(args)) == "weight is None, with which the operator crashes"


def calls_of_operators() -> Iterator[tuple[str, int]]:
    """(operator, how many arguments it is given by position) of each call in the sources."""
    for path in Path(impl_package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.ops.npu."):
                yield node.func.attr, len(node.args)


def test_what_has_a_default_is_passed_by_keyword():
    """Releases put new parameters in between: a position would mean another one there."""
    found = list(calls_of_operators())
    known = {*backend.operators, *backend_310p.operators, *backend_a5.operators}
    assert {name for name, _ in found} == known
    for name, given in found:
        arguments = getattr(torch.ops.npu, name).default._schema.arguments
        required = [a for a in arguments if not a.kwarg_only and not a.has_default_value()]
        assert given == len(required), name


def test_an_error_of_the_device_propagates_with_the_op_and_is_followed_by_no_other():
    STATE.fails["npu_rms_norm"] = RuntimeError("call aclnnRmsNorm failed, error code is 561103")
    with pytest.raises(RuntimeError, match="561103") as caught:
        manager(IMPL["rms_norm"]).call("rms_norm", *to_npu((rand(5, 64), rand(64), 1e-6)))
    assert "vendor.ascend" in caught.value.__notes__[0]
