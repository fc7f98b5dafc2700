# SPDX-License-Identifier: Apache-2.0
import importlib
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from vllm_fl.dispatch import get_default_manager

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALF]
WHERE = ["vllm.model_executor.layers", "vllm.model_executor.hw_agnostic.layers"]


def in_tree() -> type:
    from vllm.model_executor.layers.layernorm import RMSNorm

    return RMSNorm


@pytest.fixture(params=WHERE, ids=["in_tree", "hw_agnostic"])
def cls(request: pytest.FixtureRequest) -> type:
    """RMSNorm of vLLM, and its twin for vLLM's Transformers backend."""
    return importlib.import_module(f"{request.param}.layernorm").RMSNorm


def inputs(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, residual


def check_equal(stock: Any, served: Any, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Both forms, within the rounding of x's dtype, in x's dtype."""
    # vLLM computes float64 in float32.
    wide = {"rtol": 1e-6, "atol": 1e-6} if x.dtype is torch.float64 else {}
    assert_close(served(x.clone()), stock(x.clone()), **wide)
    out, total = served(x.clone(), residual.clone())
    expected, expected_total = stock(x.clone(), residual.clone())
    assert_close(out, expected, **wide)
    assert_close(total, expected_total, **(wide or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vendor_cpu_serves_both_forms_and_equals_vllm(both, rows, cls, dtype) -> None:
    stock, served = both(cls, 64, eps=1e-5, dtype=dtype)
    assert type(served) is type(stock) is cls
    for name in ("rms_norm", "fused_add_rms_norm"):
        row = rows()[name]
        assert (row["impl_id"], row["kind"], row["bound"]) == ("vendor.cpu", "vendor", 1)
    check_equal(stock, served, *inputs(5, 64, dtype=dtype))
    check_equal(stock, served, *inputs(2, 3, 64, dtype=dtype))


def test_the_kernel_really_runs(both, cls) -> None:
    _, served = both(cls, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        served(*inputs(5, 64))
        served(inputs(5, 64)[0])
    assert {"_C::rms_norm", "_C::fused_add_rms_norm"} <= {event.key for event in seen.events()}


def test_the_native_forward_is_the_class_own_and_computes_as_before(both, cls) -> None:
    stock, served = both(cls, 64)
    assert served.forward_native.__func__ is cls.forward_native
    x, _ = inputs(5, 64)
    assert_close(served.forward_native(x), stock.forward_native(x), rtol=0, atol=0)


def test_what_the_twin_is_called_with_stays_as_it_is(both) -> None:
    # Its own forward is functional: Transformers may use x and residual again.
    cls = importlib.import_module(f"{WHERE[1]}.layernorm").RMSNorm
    _, served = both(cls, 64)
    x, residual = inputs(5, 64)
    kept = x.clone(), residual.clone()
    out, total = served(x, residual)
    assert (x.equal(kept[0]), residual.equal(kept[1])) == (True, True)
    assert out.data_ptr() != x.data_ptr()
    assert total.data_ptr() != residual.data_ptr()


def test_vllms_own_norm_gives_up_its_arguments_so_nothing_is_copied(both) -> None:
    _, served = both(in_tree(), 64)
    x, residual = inputs(5, 64)
    out, total = served(x, residual)
    assert (out.data_ptr(), total.data_ptr()) == (x.data_ptr(), residual.data_ptr())


def test_one_form_can_stay_native_while_the_other_is_served(build, register, rows) -> None:
    stock = build(in_tree(), 64)
    register(PER_OP="fused_add_rms_norm=native")
    served = build(in_tree(), 64)
    assert rows()["rms_norm"]["impl_id"] == "vendor.cpu"
    assert rows()["fused_add_rms_norm"]["impl_id"] == "native"
    assert rows()["fused_add_rms_norm"]["reason"] == (
        "the order for fused_add_rms_norm names native (from environment variable VLLM_FL_PER_OP)"
    )
    check_equal(stock, served, *inputs(5, 64))


def test_the_other_form_can_stay_native_too(build, register, rows) -> None:
    stock = build(in_tree(), 64)
    register(PER_OP="rms_norm=native")
    served = build(in_tree(), 64)
    assert rows()["rms_norm"]["impl_id"] == "native"
    assert rows()["fused_add_rms_norm"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, *inputs(5, 64))


def test_a_norm_without_weight_ignores_the_weight_that_vllm_keeps(both, rows, cls) -> None:
    stock, served = both(cls, 64, has_weight=False)
    for layer in (stock, served):
        layer.weight.fill_(7)
    assert rows()["rms_norm"]["impl_id"] != "native"
    assert rows()["fused_add_rms_norm"]["impl_id"] != "native"
    check_equal(stock, served, *inputs(5, 64))


def test_a_norm_over_a_part_of_the_row_goes_to_the_reference(both, rows, cls) -> None:
    stock, served = both(cls, 64, var_hidden_size=32)
    assert rows()["rms_norm"]["impl_id"] == "reference.torch"
    assert rows()["rms_norm"]["rejected"] == [
        {"impl_id": "vendor.cpu", "reason": "variance_size 32 is given"}
    ]
    check_equal(stock, served, *inputs(5, 64))


def test_the_whole_row_given_as_a_part_is_served_by_the_kernel(both, rows, cls) -> None:
    stock, served = both(cls, 64, var_hidden_size=64)
    assert rows()["rms_norm"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, *inputs(5, 64))


def test_a_size_that_the_kernel_cannot_do_goes_to_the_reference(both, rows, cls) -> None:
    stock, served = both(cls, 20)
    assert rows()["rms_norm"]["impl_id"] == "reference.torch"
    (refusal,) = rows()["rms_norm"]["rejected"]
    assert refusal["impl_id"] == "vendor.cpu"
    assert refusal["reason"].startswith("hidden_size 20 is not a")
    check_equal(stock, served, *inputs(5, 20))


@pytest.mark.parametrize(
    ("weight", "x"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["wide_weight", "narrow_weight"],
)
def test_a_weight_of_another_dtype_than_x_goes_to_the_reference_call_by_call(
    both, rows, cls, weight, x
) -> None:
    stock, served = both(cls, 64, dtype=weight)
    assert rows()["rms_norm"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, *inputs(5, 64, dtype=x))
    for name in ("rms_norm", "fused_add_rms_norm"):
        assert rows()[name]["rejected"] == [
            {"impl_id": "vendor.cpu", "reason": f"some calls: weight is {weight}, x is {x}"}
        ]
    check_equal(stock.to(x), served.to(x), *inputs(5, 64, dtype=x))


def test_float64_goes_to_the_reference(both, rows, cls) -> None:
    stock, served = both(cls, 64, dtype=torch.float64)
    check_equal(stock, served, *inputs(5, 64, dtype=torch.float64))
    assert rows()["rms_norm"]["rejected"][0]["reason"] == (
        "some calls: dtype float64 is not float32, bfloat16 or float16"
    )


def test_a_slice_is_normalized_as_its_copy_is(both, cls) -> None:
    # Qwen3 normalizes the heads of a wider row.
    stock, served = both(cls, 64)
    wide, wide_residual = inputs(5, 256)
    check_equal(stock, served, wide[:, 64:128], wide_residual[:, :64])


@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
def test_a_layer_that_is_converted_after_it_was_built_uses_its_new_weight(both, cls, dtype) -> None:
    stock, served = both(cls, 64)
    check_equal(stock.to(dtype), served.to(dtype), *inputs(5, 64, dtype=dtype))


def test_a_weight_that_is_loaded_after_the_layer_was_built_is_used(both, cls) -> None:
    stock, served = both(cls, 64)
    loaded = torch.linspace(-1, 1, 64)
    stock.load_state_dict({"weight": loaded})
    served.weight = torch.nn.Parameter(loaded.clone())  # not even the same Parameter
    check_equal(stock, served, *inputs(5, 64))


def test_epsilon_is_read_when_it_is_called(both, cls) -> None:
    stock, served = both(cls, 64)
    stock.variance_epsilon = served.variance_epsilon = 3.0
    check_equal(stock, served, *inputs(5, 64))


def test_batch_invariance_is_served_by_what_is_marked_so(both, rows, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    stock, served = both(in_tree(), 64, dtype=torch.bfloat16)
    assert rows()["rms_norm"]["impl_id"] == "vendor.cpu"
    refused = {entry["impl_id"]: entry["reason"] for entry in rows()["rms_norm"]["rejected"]}
    assert refused["reference.torch"] == (
        "VLLM_BATCH_INVARIANT is on and it is not marked batch-invariant"
    )
    assert "vendor.cpu" not in refused
    x, residual = inputs(7, 64, dtype=torch.bfloat16)
    check_equal(stock, served, x, residual)
    alone = torch.cat([served(row[None]) for row in x])
    assert_close(alone, served(x), rtol=0, atol=0)


def test_batch_invariance_leaves_native_what_nobody_marked_can_serve(
    both, rows, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    stock, served = both(in_tree(), 20)
    assert rows()["rms_norm"]["impl_id"] == "native"
    reasons = dict(said.split(": ", 1) for said in rows()["rms_norm"]["reason"].split("; "))
    assert reasons["vendor.cpu"].startswith("hidden_size 20 is not a")
    assert reasons["reference.torch"] == (
        "VLLM_BATCH_INVARIANT is on and it is not marked batch-invariant"
    )
    assert served._forward_method == served.forward_cpu
    check_equal(stock, served, *inputs(5, 20))


def test_the_norm_of_the_transformers_backend_is_served(both, rows) -> None:
    from vllm.model_executor.models.transformers.fusers.rms_norm import TPAwareRMSNorm

    stock, served = both(TPAwareRMSNorm, 64)
    assert rows()["rms_norm"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, *inputs(5, 64))


def test_a_norm_over_groups_keeps_its_own_mathematics(both, rows) -> None:
    K2HorizonRMSNorm = pytest.importorskip(
        "vllm.model_executor.models.k2_horizon", reason="vLLM 0.30 is the first to have it"
    ).K2HorizonRMSNorm
    stock, served = both(K2HorizonRMSNorm, 64, n_groups=4)
    assert type(served) is K2HorizonRMSNorm
    for name in ("rms_norm", "fused_add_rms_norm"):
        assert (rows()[name]["impl_id"], rows()[name]["reason"]) == (
            "native",
            "vllm.model_executor.models.k2_horizon.K2HorizonRMSNorm has its own forward",
        )
    assert served._forward_method.__self__ is served
    x, _ = inputs(5, 64)
    assert_close(served(x), stock(x), rtol=0, atol=0)


def layernorm(name: str) -> Any:
    return getattr(importlib.import_module(f"{WHERE[0]}.layernorm"), name)


def spread(layer: Any, dtype: torch.dtype) -> Any:
    """The layer in a dtype, its weight drawn around what it was."""
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemmas_norm_is_served_and_equals_vllm_bit_for_bit(both, rows, dtype) -> None:
    stock, served = (spread(layer, dtype) for layer in both(layernorm("GemmaRMSNorm"), 64))
    for name in ("gemma_rms_norm", "fused_add_gemma_rms_norm"):
        assert (rows()[name]["impl_id"], rows()[name]["bound"]) == ("reference.torch", 1)
    x, residual = inputs(5, 64, dtype=dtype)
    kept = x.clone(), residual.clone()
    assert served(x).equal(stock(x))
    for ours, theirs in zip(served(x, residual), stock(x, residual), strict=True):
        assert ours.equal(theirs)
    assert x.equal(kept[0]) and residual.equal(kept[1])  # vLLM's own leaves them


def test_what_writes_its_arguments_serves_gemmas_norm_on_copies(
    register, build, rows, register_impl
) -> None:
    """vLLM's own forward leaves them, so callers may rely on it."""

    def inplace(x, residual, weight, epsilon):
        residual += x
        x.zero_()
        return x, residual

    register()
    register_impl("fused_add_gemma_rms_norm", inplace, mutates=("x", "residual"))
    layer = build(layernorm("GemmaRMSNorm"), 64)
    x, residual = inputs(5, 64)
    kept = x.clone(), residual.clone()
    out, total = layer(x, residual)
    assert not out.any() and total.equal(kept[0] + kept[1])
    assert x.equal(kept[0]) and residual.equal(kept[1])


def test_a_mixed_gemma_norm_leaves_one_form_to_vllm(register, build, rows) -> None:
    register(PER_OP="fused_add_gemma_rms_norm=native")
    layer = build(layernorm("GemmaRMSNorm"), 64)
    assert rows()["gemma_rms_norm"]["impl_id"] == "reference.torch"
    assert rows()["fused_add_gemma_rms_norm"]["impl_id"] == "native"
    x, residual = inputs(5, 64)
    for ours, theirs in zip(layer(x, residual), layer.forward_native(x, residual), strict=True):
        assert ours.equal(theirs)


GATED = [
    {},
    {"group_size": 16},
    {"norm_before_gate": True},
    {"norm_before_gate": True, "group_size": 16, "activation": "sigmoid"},
    {"activation": "sigmoid"},
    {"activation": "silu"},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", GATED, ids=str)
def test_the_gated_norm_is_served_and_equals_vllm_bit_for_bit(both, rows, settings, dtype) -> None:
    stock, served = (
        spread(layer, dtype) for layer in both(layernorm("RMSNormGated"), 64, **settings)
    )
    assert rows()["rms_norm_gated"]["impl_id"] == "reference.torch"
    for shape in ((5, 64), (2, 3, 64), (0, 64)):
        x, z = inputs(*shape, dtype=dtype)
        assert served(x, z).equal(stock.forward_native(x, z))
        assert served(x).equal(stock.forward_native(x))


@pytest.fixture
def layer_norm() -> Any:
    cls = layernorm("LayerNorm")
    if not hasattr(cls, "dispatch_forward"):
        pytest.skip("before vLLM 0.32 LayerNorm is a plain module")
    return cls


LAYER_NORMS = [{}, {"bias": False}, {"elementwise_affine": False}, {"dtype": torch.float32}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", LAYER_NORMS, ids=str)
def test_layer_norm_is_served_and_equals_vllm_bit_for_bit(
    both, rows, layer_norm, settings, dtype
) -> None:
    settings = {"dtype": dtype, **settings}
    stock, served = both(layer_norm, 64, **settings)
    assert rows()["layer_norm"]["impl_id"] == "reference.torch"
    for shape in ((5, 64), (2, 3, 64), (0, 64)):
        x, _ = inputs(*shape, dtype=dtype)
        assert served(x).equal(stock.forward_native(x))


def test_a_layer_norm_that_is_no_custom_op_is_left_alone(register) -> None:
    from vllm_fl.vllm_plugin import hooks

    register()
    cls = layernorm("LayerNorm")
    hooked = f"{cls.__module__}.LayerNorm.__init__" in {h.name for h in hooks.installed()}
    assert hooked is hasattr(cls, "dispatch_forward")


def test_the_reference_equals_vllm_bit_for_bit(build, register, rows, cls) -> None:
    stock = build(cls, 64, dtype=torch.bfloat16)
    register(PREFER="reference")
    served = build(cls, 64, dtype=torch.bfloat16)
    assert rows()["rms_norm"]["impl_id"] == "reference.torch"
    x, residual = inputs(5, 64, dtype=torch.bfloat16)
    assert served(x).equal(stock(x))
    for ours, theirs in zip(
        served(x.clone(), residual.clone()), stock(x.clone(), residual.clone()), strict=True
    ):
        assert ours.equal(theirs)


def test_one_implementation_can_be_named(build, register, rows) -> None:
    register(PER_OP="rms_norm=impl:reference.torch")
    build(in_tree(), 64)
    assert rows()["rms_norm"]["impl_id"] == "reference.torch"
    assert rows()["fused_add_rms_norm"]["impl_id"] == "vendor.cpu"
    assert get_default_manager().get_selected_impl_id("rms_norm") == "reference.torch"


def test_what_vllm_ascend_claims_is_left_to_it_while_its_platform_is_active(
    both, rows, monkeypatch
) -> None:
    from vllm_fl.backends.vendor.ascend import beside

    monkeypatch.setattr(beside, "platform_is_active", lambda: True)
    stock, served = both(in_tree(), 64)
    assert rows()["rms_norm"]["impl_id"] == "native"
    assert rows()["rms_norm"]["reason"] == "vllm-ascend claims RMSNorm on its platform"
    check_equal(stock, served, *inputs(5, 64))
