# SPDX-License-Identifier: Apache-2.0
import json
import os
import types
from typing import Any

import pytest
import torch

from vllm_fl.dispatch import get_default_manager, with_preference
from vllm_fl.vllm_plugin import routes
from vllm_fl.vllm_plugin.layers.serve import records
from vllm_fl.vllm_plugin.routes import RPC_NAME, merge_rows, route_rows, rpc

WORKER = types.SimpleNamespace(rank=3)


@pytest.fixture
def rms_norm() -> type:
    from vllm.model_executor.layers.layernorm import RMSNorm

    return RMSNorm


@pytest.fixture
def silu_and_mul() -> type:
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul


def row(**changes: Any) -> dict[str, Any]:
    return {
        "op": "rms_norm",
        "impl_id": "vendor.cpu",
        "kind": "vendor",
        "mode": "eager",
        "bound": 1,
        "calls": 0,
        "reason": "highest priority available (100)",
        "rejected": [],
        **changes,
    }


def calls() -> dict[tuple[str, str], int]:
    return {(row["op"], row["impl_id"]): row["calls"] for row in route_rows() if row["calls"]}


# --------------------------------------------------------------------------------- the rows


def test_there_is_one_row_for_each_op_and_implementation(register, build, rms_norm) -> None:
    register()
    kept = [build(rms_norm, 64), build(rms_norm, 128)]
    assert route_rows() == [
        row(op="fused_add_rms_norm", bound=len(kept)),
        row(op="rms_norm", bound=len(kept)),
    ]


def test_layers_served_for_different_reasons_have_different_rows(register, build, rms_norm) -> None:
    register(PER_OP="fused_add_rms_norm=native")
    kept = [build(rms_norm, 64)]
    with with_preference("reference"):
        kept.append(build(rms_norm, 64))
    kept.append(build(rms_norm, 64, var_hidden_size=32))
    order = (
        "the order for fused_add_rms_norm names native (from environment variable VLLM_FL_PER_OP)"
    )
    found = [(r["op"], r["impl_id"], r["kind"], r["bound"], r["reason"]) for r in route_rows()]
    assert found == [
        ("fused_add_rms_norm", "native", "native", len(kept), order),
        ("rms_norm", "reference.torch", "reference", 1, "highest priority available (50)"),
        ("rms_norm", "reference.torch", "reference", 1, "prefer = reference (from policy_context)"),
        ("rms_norm", "vendor.cpu", "vendor", 1, "highest priority available (100)"),
    ]


def test_what_could_not_be_used_is_in_the_row_once_with_its_reason(
    register, build, rms_norm
) -> None:
    register()
    kept = [build(rms_norm, 64, var_hidden_size=32) for _ in range(3)]
    assert route_rows()[1] == row(
        impl_id="reference.torch",
        kind="reference",
        bound=len(kept),
        reason="highest priority available (50)",
        rejected=[{"impl_id": "vendor.cpu", "reason": "variance_size 32 is given"}],
    )


def test_without_layers_there_are_no_rows() -> None:
    assert route_rows() == []


def test_the_rows_are_json_and_survive_it(register, build, rms_norm) -> None:
    register()
    layers = build(rms_norm, 64), build(rms_norm, 20)
    rpc(WORKER, "count")
    for layer in layers:
        layer(torch.zeros(2, layer.hidden_size, dtype=torch.float64))
    answer = rpc(WORKER)
    assert json.loads(json.dumps(answer)) == answer


# ------------------------------------------------------------------------------------ counting


def test_counting_swaps_the_bound_functions_and_puts_them_back(
    register, build, rms_norm, silu_and_mul
) -> None:
    register()
    layers = build(rms_norm, 64), build(silu_and_mul)
    slots = [
        (layer._forward_method.__self__, name)
        for layer, names in zip(
            layers, (("rms_norm", "fused_add_rms_norm"), ("silu_and_mul",)), strict=True
        )
        for name in names
    ]
    before = [getattr(bound, name) for bound, name in slots]
    rpc(WORKER, "count")
    assert all(
        getattr(bound, name) is not fn for (bound, name), fn in zip(slots, before, strict=True)
    )
    rpc(WORKER, "uncount")
    assert all(getattr(bound, name) is fn for (bound, name), fn in zip(slots, before, strict=True))


def test_an_implementation_without_a_guard_is_called_as_it_is_until_it_is_counted(
    register, build, rms_norm, register_impl
) -> None:
    def fn(x, weight, epsilon, variance_size=None):
        return x

    register()
    register_impl("rms_norm", fn)
    layer = build(rms_norm, 64)
    assert layer._forward_method.__self__.rms_norm is fn
    rpc(WORKER, "count")
    layer(torch.zeros(2, 64))
    assert calls() == {("rms_norm", "vendor.cpu.test"): 1}
    rpc(WORKER, "uncount")
    assert layer._forward_method.__self__.rms_norm is fn


def test_calls_are_counted_from_when_counting_is_switched_on_until_it_is_switched_off(
    register, build, rms_norm
) -> None:
    register()
    layer, x = build(rms_norm, 64), torch.zeros(2, 64)
    layer(x)
    assert calls() == {}
    rpc(WORKER, "count")
    layer(x)
    layer(x)
    layer(x.clone(), x.clone())
    expected = {("rms_norm", "vendor.cpu"): 2, ("fused_add_rms_norm", "vendor.cpu"): 1}
    assert calls() == expected
    rpc(WORKER, "uncount")
    layer(x)
    assert calls() == expected
    rpc(WORKER, "count")  # from zero
    assert calls() == {}
    layer(x)
    rpc(WORKER, "count")
    layer(x)
    assert calls() == {("rms_norm", "vendor.cpu"): 1}


def test_the_calls_of_several_layers_add_up(register, build, rms_norm) -> None:
    register()
    layers = [build(rms_norm, 64) for _ in range(3)]
    rpc(WORKER, "count")
    for layer in layers:
        layer(torch.zeros(2, 64))
    assert calls() == {("rms_norm", "vendor.cpu"): 3}


def test_a_call_that_the_guard_refuses_counts_for_what_really_ran(
    register, build, rms_norm
) -> None:
    register()
    layer = build(rms_norm, 64)
    rpc(WORKER, "count")
    layer(torch.zeros(2, 64))
    layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    found = [r for r in route_rows() if r["op"] == "rms_norm"]
    assert found == [
        row(
            impl_id="reference.torch",
            kind="reference",
            bound=0,
            calls=2,
            reason="calls that vendor.cpu refuses",
        ),
        row(
            calls=1,
            rejected=[
                {
                    "impl_id": "vendor.cpu",
                    "reason": "some calls: weight is torch.float32, x is torch.bfloat16",
                }
            ],
        ),
    ]


def test_native_ops_are_listed_and_not_counted(register, build, rms_norm) -> None:
    register(PER_OP="fused_add_rms_norm=native")
    layer = build(rms_norm, 64)
    rpc(WORKER, "count")
    layer(torch.zeros(2, 64), torch.zeros(2, 64))
    assert calls() == {}
    rpc(WORKER, "uncount")
    layer(torch.zeros(2, 64), torch.zeros(2, 64))


def test_counting_survives_a_layer_whose_forward_was_pointed_elsewhere(
    register, build, rms_norm
) -> None:
    register()
    layer = build(rms_norm, 64)
    layer._forward_method = layer.forward_native
    assert "error" not in rpc(WORKER, "count")
    layer(torch.zeros(2, 64))
    assert calls() == {}
    assert {r["impl_id"] for r in route_rows()} == {"native"}


# ----------------------------------------------------------------------------------- the merger


def test_merging_adds_layers_and_calls_up_and_unites_what_was_rejected() -> None:
    one = {"impl_id": "vendor.cpu", "reason": "one"}
    two = {"impl_id": "vendor.cpu", "reason": "two"}
    first = [row(bound=2, calls=10, rejected=[one]), row(op="silu_and_mul")]
    second = [row(bound=3, calls=4, rejected=[two, one]), row(reason="another")]
    kept = json.dumps([first, second])
    assert merge_rows([first, second]) == [
        row(reason="another"),
        row(bound=5, calls=14, rejected=[one, two]),
        row(op="silu_and_mul"),
    ]
    assert json.dumps([first, second]) == kept  # the workers' tables stay as they are


def test_merging_one_table_or_none_changes_nothing() -> None:
    assert merge_rows([]) == []
    assert merge_rows([[row()]]) == [row()]


# -------------------------------------------------------------------------------------- the RPC


def test_the_worker_has_the_method(register) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    register()
    assert getattr(WorkerBase, RPC_NAME) is rpc


def test_the_answer_says_who_answers(register, build, rms_norm) -> None:
    register()
    kept = build(rms_norm, 64)
    answer = rpc(WORKER)
    assert answer == {
        "pid": os.getpid(),
        "rank": 3,
        "device": "cpu",
        "frozen": False,
        "ops": route_rows(),
    }
    get_default_manager().freeze()
    assert rpc(WORKER)["frozen"] is True
    assert kept is not None


def test_a_worker_without_rank_is_rank_0(register) -> None:
    register()
    assert rpc(object())["rank"] == 0


@pytest.mark.parametrize("request_", ["route", "", None, 7, ["count"]], ids=repr)
def test_an_unknown_request_is_answered_with_the_valid_ones(register, request_) -> None:
    register()
    assert rpc(WORKER, request_) == {
        "error": f"unknown request {request_!r}; valid: routes, count, uncount"
    }


def test_a_broken_manager_is_an_answer_and_no_exception(monkeypatch, log) -> None:
    def broken() -> None:
        raise RuntimeError("no manager")

    monkeypatch.setattr(routes, "get_default_manager", broken)
    assert rpc(WORKER) == {"error": "RuntimeError: no manager"}
    assert log == ["ERROR vllm_fl_dispatch('routes') failed"]


def test_a_worker_with_a_strange_rank_is_an_answer_and_no_exception(register) -> None:
    register()
    assert rpc(types.SimpleNamespace(rank="first"))["error"].startswith("ValueError: ")


def test_a_configuration_that_became_wrong_is_an_answer_and_no_exception(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_FL_PLATFORM", "nobody")
    assert rpc(WORKER)["error"].startswith("ConfigError: ")


def test_records_of_dead_layers_are_passed_over(register, build, rms_norm) -> None:
    register()
    layer = build(rms_norm, 64)
    (record,) = records
    record.layer = lambda: None  # as between the layer's death and the record's removal
    assert route_rows() == []
    assert layer is not None
