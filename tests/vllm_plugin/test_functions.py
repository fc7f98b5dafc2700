# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions, served once a model is loaded."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_fl.dispatch import DispatchFrozen, get_default_manager
from vllm_fl.dispatch.config import load_config
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.sampling import APPLY_REPETITION_PENALTIES, APPLY_TOP_K_TOP_P
from vllm_fl.vllm_plugin import hooks, plugin
from vllm_fl.vllm_plugin.functions import FUNCTIONS, FunctionSpec
from vllm_fl.vllm_plugin.functions.serve import bind, hook_module, records, release
from vllm_fl.vllm_plugin.layers import serve as layer_serve
from vllm_fl.vllm_plugin.routes import route_rows, rpc

PENALTIES, CHOICE = "apply_repetition_penalties", "apply_top_k_top_p"
CALLERS = ("vllm.v1.sample.rejection_sampler", "vllm.v1.worker.gpu.sample.states")


@pytest.fixture
def ops() -> Any:
    """vllm._custom_ops."""
    from vllm import _custom_ops

    return _custom_ops


@pytest.fixture
def sampler() -> Any:
    """The module of apply_top_k_top_p, with callers that imported it by name."""
    from vllm.v1.sample import rejection_sampler  # noqa: F401
    from vllm.v1.sample.ops import topk_topp_sampler

    return topk_topp_sampler


@pytest.fixture
def load(register: Callable[..., None]) -> Callable[..., None]:
    """load(PER_OP=...) registers the plugin and loads a model without layers."""

    def load(**settings: str) -> None:
        register(**settings)
        plugin._freezing(lambda: None)()

    return load


def penalty_arguments() -> tuple[torch.Tensor, ...]:
    case = next(c for c in APPLY_REPETITION_PENALTIES.cases if c.name == "odd size")
    args = case.make(torch.float32, torch.Generator().manual_seed(7))
    return tuple(a.clone() for a in args)


def choice_arguments(**drop: None) -> dict[str, Any]:
    case = next(c for c in APPLY_TOP_K_TOP_P.cases if c.name == "odd size")
    logits, k, p = case.make(torch.float32, torch.Generator().manual_seed(7))
    return {"logits": logits, "k": k, "p": p, **drop}


def record(op: str) -> Any:
    return next(record for record in records if record.spec.op == op)


def rows_of(op: str) -> list[dict[str, Any]]:
    return [row for row in route_rows() if row["op"] == op]


# --------------------------------------------------------------------- what is replaced, and when


def test_nothing_is_replaced_before_a_model_is_loaded(register, ops, sampler) -> None:
    before = getattr(ops, PENALTIES), getattr(sampler, CHOICE)
    register()
    assert (getattr(ops, PENALTIES), getattr(sampler, CHOICE)) == before
    assert records == []


def test_every_attribute_under_which_a_caller_looks_is_replaced_and_put_back(
    load, ops, sampler
) -> None:
    places = [(ops, PENALTIES), (sampler, CHOICE), (sys.modules[CALLERS[0]], CHOICE)]
    before = [getattr(*place) for place in places]
    load()
    after = [getattr(*place) for place in places]
    assert all(a is not b for a, b in zip(after, before, strict=True))
    assert after[1] is after[2]
    names = [hook.name for hook in hooks.installed()]
    assert {f"{module.__name__}.{name}" for module, name in places} <= set(names)
    plugin.unregister()
    assert [getattr(*place) for place in places] == before
    assert (records, route_rows()) == ([], [])


def test_the_replacement_says_what_it_replaces(load, ops) -> None:
    native = getattr(ops, PENALTIES)
    load()
    served = getattr(ops, PENALTIES)
    assert served.__wrapped__ is native
    assert (served.__name__, served.__doc__) == (native.__name__, native.__doc__)


def test_switched_off_nothing_is_replaced(register, ops) -> None:
    before = getattr(ops, PENALTIES)
    register(ENABLED="0")
    assert (hooks.installed(), hooks.awaited()) == ((), ())
    assert getattr(ops, PENALTIES) is before


def test_each_function_has_a_contract_that_names_it() -> None:
    contracts = {c.name: c for c in CONTRACTS}
    for spec in FUNCTIONS:
        contract = contracts[spec.op]
        sites = [site for site in contract.call_sites if site.where == spec.path]
        assert len(sites) == (0 if spec.stand_in else 1), spec.path
        for site in sites:
            assert spec.cpu == (site.device_types is None or "cpu" in site.device_types)
        assert set(spec.writes) <= set(contract.signature.inplace)


def test_each_call_site_that_is_a_function_is_served() -> None:
    served = {spec.path for spec in FUNCTIONS}
    sites = [site.where for contract in CONTRACTS for site in contract.call_sites]
    functions = [where for where in sites if where.partition(":")[2].islower()]
    assert set(functions) == {path for path in served if path in sites}
    assert {spec.path for spec in FUNCTIONS if not spec.stand_in} == set(functions)


# --------------------------------------------------------------------------- what a call gives


def test_penalties_are_written_into_the_logits_as_vllm_writes_them(load, ops) -> None:
    ours, theirs = penalty_arguments(), penalty_arguments()
    before = ours[0].clone()
    getattr(ops, PENALTIES)(*theirs)
    load()
    assert getattr(ops, PENALTIES)(*ours) is None
    assert torch.equal(ours[0], theirs[0])
    assert not torch.equal(ours[0], before)


def test_an_implementation_that_writes_in_place_is_given_the_logits_themselves(
    register, ops, register_impl
) -> None:
    given: list[torch.Tensor] = []

    def fn(logits, prompt_mask, output_mask, repetition_penalties):
        given.append(logits)
        return logits.add_(1)

    register()
    register_impl(PENALTIES, fn, mutates=("logits",))
    bind(FUNCTIONS)
    logits, *others = penalty_arguments()
    expected = logits + 1
    assert getattr(ops, PENALTIES)(logits, *others) is None
    assert given[0] is logits
    assert torch.equal(logits, expected)


def test_slices_of_logits_are_written_too(load, ops) -> None:
    load()
    ours, theirs = penalty_arguments(), penalty_arguments()
    wide = torch.zeros(ours[0].shape[0], 100)
    wide[:, : ours[0].shape[1]] = ours[0]
    getattr(ops, PENALTIES)(wide[:, : ours[0].shape[1]], *ours[1:])
    getattr(ops, PENALTIES).__wrapped__(*theirs)
    assert torch.equal(wide[:, : ours[0].shape[1]], theirs[0])
    assert not wide[:, ours[0].shape[1] :].any()


@pytest.mark.parametrize("drop", [{}, {"k": None}, {"p": None}], ids=["both", "p", "k"])
def test_top_k_and_top_p_give_what_vllm_gives(load, sampler, drop) -> None:
    expected = getattr(sampler, CHOICE)(**choice_arguments(**drop))
    load()
    assert torch.equal(getattr(sampler, CHOICE)(**choice_arguments(**drop)), expected)
    assert expected.isinf().any()
    assert record(CHOICE).called


def test_a_call_without_k_and_p_is_vllms_own_and_returns_the_logits_themselves(
    load, sampler
) -> None:
    load()
    arguments = choice_arguments(k=None, p=None)
    assert getattr(sampler, CHOICE)(**arguments) is arguments["logits"]
    assert not record(CHOICE).called


def test_an_exception_says_which_implementation_and_which_shapes(
    register, ops, register_impl
) -> None:
    def fn(logits, prompt_mask, output_mask, repetition_penalties):
        raise RuntimeError("broken")

    register()
    register_impl(PENALTIES, fn)
    bind(FUNCTIONS)
    with pytest.raises(RuntimeError, match="broken") as caught:
        getattr(ops, PENALTIES)(*penalty_arguments())
    [note] = caught.value.__notes__
    assert "implementation 'vendor.cpu.test' of op 'apply_repetition_penalties'" in note
    assert "float32[7, 61]" in note


@pytest.mark.parametrize("weight", [None, torch.ones(64)], ids=["functional", "in place"])
def test_every_argument_that_vllms_function_writes_is_written(weight) -> None:
    """The reference, which is functional, serves the norm without a weight; a kernel the other."""
    module = module_of("def act(x, residual): raise NotImplementedError")
    spec = FunctionSpec(
        op="fused_add_rms_norm",
        path=f"{DEFINES}:act",
        arguments=lambda x, residual: (x, residual, weight, 1e-6),
        writes=("x", "residual"),
    )
    bind((spec,))
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    total = x + residual
    assert module.act(x, residual) is None
    assert torch.equal(residual, total)
    expected = torch.nn.functional.rms_norm(total, (64,), eps=1e-6)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"PER_OP": f"{CHOICE}=native"},
            f"the order for {CHOICE} names native (from environment variable VLLM_FL_PER_OP)",
        ),
        ({"OOT_BLACKLIST": CHOICE}, "the OOT lists leave it native"),
        ({"OOT_WHITELIST": PENALTIES}, "the OOT lists leave it native"),
    ],
    ids=["order", "blacklist", "whitelist"],
)
def test_a_function_that_stays_native_is_untouched_and_listed_with_its_reason(
    load, ops, sampler, settings, reason
) -> None:
    places = [(sampler, CHOICE), (sys.modules[CALLERS[0]], CHOICE)]
    before = [getattr(*place) for place in places]
    load(**settings)
    assert [getattr(*place) for place in places] == before
    [row] = rows_of(CHOICE)
    assert (row["impl_id"], row["kind"], row["bound"], row["calls"]) == ("native", "native", 1, 0)
    assert row["reason"] == reason
    assert getattr(ops, PENALTIES).__wrapped__  # the other one is served


def test_with_kernels_of_vllms_own_the_reference_alone_is_no_reason(load, ops, monkeypatch) -> None:
    monkeypatch.setattr(layer_serve, "platform_has_kernels", lambda: True)
    before = getattr(ops, PENALTIES)
    load()
    assert getattr(ops, PENALTIES) is before
    [row] = rows_of(PENALTIES)
    assert row["reason"] == "only the reference could serve it; vLLM's own kernel is faster"


def test_an_order_that_names_the_reference_is_followed_all_the_same(load, ops, monkeypatch) -> None:
    monkeypatch.setattr(layer_serve, "platform_has_kernels", lambda: True)
    load(PER_OP=f"{PENALTIES}=reference")
    assert getattr(ops, PENALTIES).__wrapped__


def test_a_release_whose_function_takes_more_is_left_native() -> None:
    module = module_of("def act(x, flag=False): return x")
    bind((spec_of("act"),))
    [row] = rows_of(PENALTIES)
    assert row["reason"] == "vLLM's function takes flag, which vllm_fl does not know"
    assert not hasattr(module.act, "__wrapped__")


def test_a_release_without_the_function_says_so() -> None:
    module_of("")
    bind((spec_of("act"),))
    assert rows_of(PENALTIES)[0]["reason"] == "this vLLM has no vllm.fl_test_defines:act"


def test_a_function_that_somebody_else_replaced_stays_theirs() -> None:
    module = module_of("def act(x): return x")
    theirs = module.act = lambda x: x
    bind((spec_of("act"),))
    assert module.act is theirs
    assert rows_of(PENALTIES)[0]["reason"] == f"{__name__} replaced it"


def test_a_caller_that_somebody_else_gave_another_function_keeps_it(log) -> None:
    module = module_of("def act(x): return x")
    caller = module_of("", CALLER)
    theirs = caller.act = lambda x: x
    get_default_manager().configure(load_config({"VLLM_FL_LOG_LEVEL": "INFO"}))
    bind((spec_of("act"),))
    assert caller.act is theirs
    assert module.act.__wrapped__
    assert any(f"{CALLER}.act is {__name__}'s; left as it is" in line for line in log)


def test_the_choice_is_frozen_with_that_of_the_layers(load, register_impl) -> None:
    load()
    with pytest.raises(DispatchFrozen, match=f"the order of op '{PENALTIES}'"):
        get_default_manager().configure(load_config({"VLLM_FL_PER_OP": f"{PENALTIES}=native"}))


def test_the_next_model_is_decided_for_anew(load, ops) -> None:
    before = getattr(ops, PENALTIES)
    load()
    assert getattr(ops, PENALTIES) is not before
    get_default_manager().thaw()
    load(PER_OP=f"{PENALTIES}=native")
    assert getattr(ops, PENALTIES) is before


# ------------------------------------------------------------------- who imports it, and when

DEFINES, CALLER = "vllm.fl_test_defines", "vllm.fl_test_calls"


def spec_of(name: str) -> FunctionSpec:
    return FunctionSpec(
        op=PENALTIES,
        path=f"{DEFINES}:{name}",
        callers=(CALLER,),
        arguments=lambda x: (x, x > 0, x > 0, torch.full((len(x),), 2.0)),
        writes=("logits",),
    )


def module_of(code: str, name: str = DEFINES) -> types.ModuleType:
    """A module of vLLM's, as far as anybody can tell."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
    return module


@pytest.fixture(autouse=True)
def _no_modules_of_ours() -> Iterator[None]:
    yield
    for name in (DEFINES, CALLER):
        sys.modules.pop(name, None)


def test_a_module_that_is_imported_later_is_served_then_and_put_back() -> None:
    bind((spec_of("act"),))
    assert records == []
    module = module_of("def act(x): return x")
    native = module.act
    hook_module(module)
    served = module.act
    assert served is not native
    caller = module_of(f"from {DEFINES} import act", CALLER)
    hook_module(caller)
    assert caller.act is served
    release()
    assert (module.act, caller.act) == (native, native)
    assert hooks.installed() == ()


def test_the_plugin_waits_for_the_modules_that_are_not_there_yet(register) -> None:
    register()
    waited = {name for spec in FUNCTIONS for name in (spec.module_name, *spec.callers)}
    assert waited - set(sys.modules) <= set(hooks.awaited())


def test_a_copy_that_nobody_knows_of_calls_vllms_own_after_the_release() -> None:
    module = module_of("def act(x): x.fill_(5)")
    bind((spec_of("act"),))
    copy = module.act
    x = torch.tensor([[1.0, -1.0]])
    copy(x)
    assert x.tolist() == [[0.5, -1.0]]
    release()
    copy(x)
    assert x.tolist() == [[5.0, 5.0]]


def test_a_replacement_that_was_replaced_is_listed_as_native(load, ops) -> None:
    load()
    getattr(ops, PENALTIES)(*penalty_arguments())
    hook = record(PENALTIES).hooks[0]
    setattr(ops, PENALTIES, lambda *args: None)
    try:
        [row] = rows_of(PENALTIES)
        assert (row["impl_id"], row["reason"]) == (
            "native",
            "somebody replaced it after it was bound",
        )
    finally:
        setattr(ops, PENALTIES, hook.replacement)


# -------------------------------------------------------------------------------- the route table


def test_a_served_function_is_listed_from_its_first_call_on(load, ops) -> None:
    load()
    assert rows_of(PENALTIES) == []
    getattr(ops, PENALTIES)(*penalty_arguments())
    assert rows_of(PENALTIES) == [
        {
            "op": PENALTIES,
            "impl_id": "reference.torch",
            "kind": "reference",
            "mode": "eager",
            "bound": 1,
            "calls": 0,
            "reason": "highest priority available (50)",
            "rejected": [],
        }
    ]


def test_calls_are_counted_while_counting_is_on(load, ops) -> None:
    load()
    fn = get_default_manager().resolve(PENALTIES)
    rpc(None, "count")
    for _ in range(3):
        getattr(ops, PENALTIES)(*penalty_arguments())
    assert rows_of(PENALTIES)[0]["calls"] == 3
    rpc(None, "uncount")
    getattr(ops, PENALTIES)(*penalty_arguments())
    assert rows_of(PENALTIES)[0]["calls"] == 3
    assert record(PENALTIES).fn is fn  # nothing is between the caller's attribute and it
    rpc(None, "count")
    assert rows_of(PENALTIES)[0]["calls"] == 0


def test_a_call_that_a_guard_refuses_counts_for_what_really_ran(
    register, ops, register_impl
) -> None:
    def refuses(logits, prompt_mask, output_mask, repetition_penalties):
        return logits.shape[0] > 100 or "fewer than 100 sequences"

    register()
    register_impl(PENALTIES, APPLY_REPETITION_PENALTIES.reference, supports=refuses)
    bind(FUNCTIONS)
    rpc(None, "count")
    getattr(ops, PENALTIES)(*penalty_arguments())
    found = {row["impl_id"]: (row["calls"], row["reason"]) for row in rows_of(PENALTIES)}
    assert found["reference.torch"] == (1, "calls that vendor.cpu.test refuses")
    assert found["vendor.cpu.test"][0] == 0
