# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from vllm_fl.dispatch import (
    GuardRejected,
    SelectionPolicy,
    get_default_manager,
    policy_context,
    with_denied_vendors,
    with_preference,
)
from vllm_fl.vllm_plugin import plugin
from vllm_fl.vllm_plugin.layers import serve
from vllm_fl.vllm_plugin.layers.serve import BoundLayer, records, settle
from vllm_fl.vllm_plugin.routes import route_rows


@pytest.fixture
def rms_norm() -> type:
    from vllm.model_executor.layers.layernorm import RMSNorm

    return RMSNorm


@pytest.fixture
def silu_and_mul() -> type:
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul


def bound(layer: Any) -> BoundLayer:
    """What a served layer's forward is bound to."""
    found = layer._forward_method.__self__
    assert isinstance(found, BoundLayer)
    return found


def is_served(layer: Any) -> bool:
    return isinstance(layer._forward_method.__self__, BoundLayer)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def reasons() -> set[tuple[str, str]]:
    return {(row["impl_id"], row["reason"]) for row in route_rows()}


def test_state_dict_parameters_and_text_of_a_served_layer_are_vllms_own(both, rms_norm) -> None:
    stock, served = both(rms_norm, 64)
    assert is_served(served)
    assert list(served.state_dict()) == list(stock.state_dict()) == ["weight"]
    assert [name for name, _ in served.named_modules()] == [""]
    assert repr(served) == repr(stock)
    assert vars(served).keys() == vars(stock).keys()


# --------------------------------------------------------------------- whose layer is served


def test_a_subclass_without_a_forward_of_its_own_is_served(register, build, rms_norm) -> None:
    class Sub(rms_norm):
        def extra_repr(self) -> str:
            return "sub"

    register()
    layer = build(Sub, 64)
    assert type(layer) is Sub
    assert is_served(layer)


@pytest.mark.parametrize("which", ["cpu", "native", "cuda", "oot", "hip", "xpu", "tpu", "static"])
def test_a_subclass_with_its_own_forward_of_any_platform_stays_native(
    register, build, rms_norm, which
) -> None:
    name = f"forward_{which}"
    cls = type("Own", (rms_norm,), {name: lambda self, x, residual=None: x + 1, "__module__": "m"})
    register()
    layer = build(cls, 64)
    assert not is_served(layer)
    assert reasons() == {("native", f"m.Own has its own {name}")}
    if which in ("cpu", "native"):
        assert layer(torch.zeros(2, 64)).eq(1).all()


def test_a_subclass_of_a_subclass_with_its_own_forward_stays_native_too(
    register, build, rms_norm
) -> None:
    middle = type("Middle", (rms_norm,), {"forward": lambda self, x: x, "__module__": "m"})
    register()
    assert not is_served(build(type("Last", (middle,), {}), 64))
    assert reasons() == {("native", "m.Middle has its own forward")}


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_class_that_another_plugin_claimed_stays_theirs(register, build, rms_norm, first) -> None:
    class Theirs(rms_norm):
        def forward_cpu(self, x: Any, residual: Any = None) -> Any:
            return x * 0

    if first == "ours":
        register()
    rms_norm.register_oot(Theirs)
    if first == "theirs":
        register()
    layer = build(rms_norm, 64)
    assert type(layer) is Theirs
    assert layer(torch.ones(2, 64)).eq(0).all()
    assert reasons() == {("native", f"{__name__}.Theirs has its own forward_cpu")}
    plugin.unregister()
    assert type(build(rms_norm, 64)) is Theirs


def test_an_unrelated_class_that_another_plugin_put_in_its_place_is_not_looked_at(
    register, current_config, rms_norm
) -> None:
    class Unrelated(torch.nn.Module):
        pass

    register()
    rms_norm.register_oot(Unrelated)
    with current_config():
        assert type(rms_norm(64)) is Unrelated
    assert records == []


def test_a_subclass_that_goes_on_after_the_constructor_it_inherits_is_decided_again(
    both, rms_norm
) -> None:
    class Late(rms_norm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.variance_size_override = size // 2
            self.variance_epsilon = 0.5

    stock, served = both(Late, 64)
    settle()  # as when a worker has loaded its model
    assert reasons() == {("reference.torch", "highest priority available (50)")}
    x = randn(5, 64)
    assert_close(served(x), stock(x))
    assert_close(served(x.clone(), x.clone())[0], stock(x.clone(), x.clone())[0])


def test_deciding_again_keeps_what_did_not_change(register, build, rms_norm) -> None:
    register()
    layer = build(rms_norm, 64)
    before = bound(layer).rms_norm
    settle()
    assert bound(layer).rms_norm is before


def test_deciding_again_heeds_the_policy_under_which_the_layer_was_built(
    register, build, rms_norm
) -> None:
    register()
    with with_denied_vendors("cpu"):
        layer = build(rms_norm, 64)
    twin = copy.deepcopy(layer)
    for changed in (layer, twin):
        changed.to(torch.bfloat16)
    settle()
    assert bound(layer).facts["rms_norm"]["weight_dtype"] is torch.bfloat16
    assert {impl_id for impl_id, _ in reasons()} == {"reference.torch"}


def test_deciding_again_can_give_the_layer_back_to_vllm(both, rms_norm, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    stock, served = both(rms_norm, 64)
    assert is_served(served)
    for layer in (stock, served):
        layer.variance_size_override = 32
    settle()
    assert served._forward_method == served.forward_cpu
    x = randn(5, 64)
    assert_close(served(x), stock(x))
    assert {impl_id for impl_id, _ in reasons()} == {"native"}


def test_a_layer_whose_forward_somebody_pointed_elsewhere_is_not_counted_as_served(
    register, build, rms_norm
) -> None:
    register()
    layer = build(rms_norm, 64)
    layer._forward_method = layer.forward_native
    assert reasons() == {("native", "somebody pointed its forward elsewhere after it was built")}
    settle()
    assert layer._forward_method == layer.forward_native


# ------------------------------------------------------------------- custom_ops and compilation


@pytest.mark.parametrize(
    ("custom_ops", "served"),
    [
        (["all"], True),
        (["all", "-silu_and_mul"], True),
        (["all", "-rms_norm"], False),
        (["none"], False),
        (["none", "+silu_and_mul"], False),
        (["none", "+rms_norm"], True),
    ],
    ids=str,
)
def test_custom_ops_decide_in_eager_mode_as_in_vllm(
    register, current_config, rms_norm, custom_ops, served
) -> None:
    register()
    with current_config(mode=0, custom_ops=custom_ops):
        layer = rms_norm(64)
    assert is_served(layer) is served
    if not served:
        assert reasons() == {("native", "custom_ops disables it")}
        assert layer._forward_method == layer.forward_native


def test_under_the_compiler_everything_is_left_to_it(
    register, current_config, rms_norm, silu_and_mul
) -> None:
    register(PREFER="reference")
    with current_config(mode=3):
        layers = rms_norm(64), silu_and_mul()
    assert not any(isinstance(getattr(layer._forward_method, "__self__", None), BoundLayer)
                   for layer in layers)  # fmt: skip
    assert reasons() == {("native", "left to the compiler")}
    assert {row["mode"] for row in route_rows()} == {"compiled"}


def test_a_layer_that_enforces_itself_is_served_in_eager_mode(
    register, current_config, rms_norm
) -> None:
    class Enforced(rms_norm):
        _enforce_enable = property(lambda self: True, lambda self, value: None)

    register()
    with current_config(mode=0, custom_ops=["none"]):
        assert is_served(Enforced(64))


# ---------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("order", "winner"),
    [
        ("native", "native"),
        ("vendor", "vendor.cpu"),
        ("vendor:cpu", "vendor.cpu"),
        ("impl:vendor.cpu", "vendor.cpu"),
        ("reference", "reference.torch"),
        ("impl:reference.torch", "reference.torch"),
        ("flagos|native", "native"),
        ("flagos|reference|native", "reference.torch"),
    ],
)
def test_the_order_of_an_op_decides(register, build, rms_norm, order, winner) -> None:
    stock = build(rms_norm, 64)
    register(PER_OP=f"rms_norm={order};fused_add_rms_norm={order}")
    layer = build(rms_norm, 64)
    assert {impl_id for impl_id, _ in reasons()} == {winner}
    x = randn(5, 64)
    assert_close(layer(x), stock(x))


def test_a_layer_that_is_not_on_the_whitelist_stays_native(
    register, build, rms_norm, silu_and_mul
) -> None:
    register(OOT_WHITELIST="silu_and_mul")
    assert not is_served(build(rms_norm, 64))
    assert reasons() == {("native", "the OOT lists leave it native")}
    assert is_served(build(silu_and_mul))


def test_a_layer_on_the_blacklist_stays_native(register, build, rms_norm, silu_and_mul) -> None:
    register(OOT_BLACKLIST="silu_and_mul")
    assert is_served(build(rms_norm, 64))
    assert not is_served(build(silu_and_mul))


def test_a_policy_context_reaches_the_layers_built_inside_it_and_no_other(
    register, build, rms_norm
) -> None:
    register()
    before = build(rms_norm, 64)
    with with_preference("reference"):
        inside = build(rms_norm, 64)
    after = build(rms_norm, 64)
    winners = [
        record.ops[0].binding.decision.winner_id
        for layer in (before, inside, after)
        for record in records
        if record.layer() is layer
    ]
    assert winners == ["vendor.cpu", "reference.torch", "vendor.cpu"]
    assert ("reference.torch", "prefer = reference (from policy_context)") in reasons()


def test_native_in_a_policy_context_leaves_the_layer_alone(register, build, rms_norm) -> None:
    register()
    order = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    with policy_context(SelectionPolicy(per_op_order=order)):
        layer = build(rms_norm, 64)
    assert layer._forward_method == layer.forward_cpu


def test_strict_mode_refuses_to_build_a_layer_that_the_first_choice_cannot_serve(
    register, build, rms_norm
) -> None:
    register(STRICT="1")
    assert is_served(build(rms_norm, 64))
    with pytest.raises(GuardRejected, match=r"'vendor.cpu' refuses: hidden_size 20"):
        build(rms_norm, 20)


@pytest.fixture
def platform_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "platform_has_kernels", lambda: True)


@pytest.mark.usefixtures("platform_with_kernels")
def test_where_vllm_has_kernels_the_reference_alone_does_not_replace_them(
    register, build, rms_norm
) -> None:
    register(DENY_VENDORS="cpu")
    layer = build(rms_norm, 64)
    assert layer._forward_method == layer.forward_cpu
    assert reasons() == {
        ("native", "only the reference could serve it; vLLM's own kernel is faster")
    }


@pytest.mark.usefixtures("platform_with_kernels")
@pytest.mark.parametrize(
    "settings",
    [{"PREFER": "reference"}, {"PER_OP": "rms_norm=reference;fused_add_rms_norm=reference"}],
    ids=str,
)
def test_where_vllm_has_kernels_the_reference_serves_whoever_asks_for_it(
    register, build, rms_norm, settings
) -> None:
    register(DENY_VENDORS="cpu", **settings)
    assert is_served(build(rms_norm, 64))
    assert {impl_id for impl_id, _ in reasons()} == {"reference.torch"}


@pytest.mark.usefixtures("platform_with_kernels")
def test_where_vllm_has_kernels_a_vendors_still_serve(register, build, rms_norm) -> None:
    register()
    build(rms_norm, 64)
    layer = build(rms_norm, 64)
    assert is_served(layer)


def test_where_vllm_has_no_kernels_the_reference_serves_what_nobody_else_can(
    register, build, rms_norm
) -> None:
    register(DENY_VENDORS="cpu")
    assert is_served(build(rms_norm, 64))


def test_an_implementation_of_a_vendor_serves_the_layer(
    register, build, rms_norm, register_impl
) -> None:
    register()
    register_impl("rms_norm", lambda x, weight, epsilon, variance_size=None: x + 1)
    layer = build(rms_norm, 64)
    assert layer(torch.zeros(2, 64)).eq(1).all()
    assert ("vendor.cpu.test", "highest priority available (200)") in reasons()


# ---------------------------------------------------------------------------------- exceptions


def failing(x, weight, epsilon, variance_size=None):
    if x.shape[0] == 2:
        raise ZeroDivisionError("of the kernel")
    return x + 1


@pytest.mark.parametrize("guarded", [False, True])
def test_an_exception_of_an_implementation_propagates_with_a_note_and_changes_nothing(
    register, build, rms_norm, register_impl, guarded
) -> None:
    register()
    guard = {"supports": lambda x, weight, epsilon, variance_size=None: True} if guarded else {}
    register_impl("rms_norm", failing, **guard)
    layer = build(rms_norm, 64)
    forward = layer._forward_method
    with pytest.raises(ZeroDivisionError, match="of the kernel") as error:
        layer(torch.zeros(2, 64))
    (note,) = error.value.__notes__
    assert note.startswith(
        "vllm_fl: raised by implementation 'vendor.cpu.test' of op 'rms_norm', called with "
        "float32[2, 64] strides [64, 1], float32[64] strides [1], 1e-06, None."
    )
    assert layer._forward_method is forward
    assert layer(torch.zeros(3, 64)).eq(1).all()


def test_an_exception_of_a_guard_says_that_it_came_from_a_guard(
    register, build, rms_norm, register_impl
) -> None:
    def guard(x, weight, epsilon, variance_size=None):
        raise KeyError("of the guard")

    register()
    register_impl("rms_norm", failing, supports=guard)
    with pytest.raises(KeyError) as error:
        build(rms_norm, 64)(torch.zeros(3, 64))
    (note,) = error.value.__notes__
    assert note.startswith("vllm_fl: raised by a guard of implementation 'vendor.cpu.test'")


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "rotary_embedding"])
def test_every_layer_names_its_op_when_its_implementation_fails(
    register, build, register_impl, name
) -> None:
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def one(x):
        raise OSError("kernel")

    def two(x, approximate="none"):
        raise OSError("kernel")

    def many(positions, query, key, head_size, cos_sin_cache, is_neox):
        raise OSError("kernel")

    register()
    cls, args, fn, call = {
        "silu_and_mul": (SiluAndMul, (), one, (torch.zeros(2, 64),)),
        "gelu_and_mul": (GeluAndMul, ("tanh",), two, (torch.zeros(2, 64),)),
        "rotary_embedding": (
            RotaryEmbedding,
            (64, 64, 16, 10000.0, True, torch.float32),
            many,
            (torch.arange(2), torch.zeros(2, 64), torch.zeros(2, 64)),
        ),
    }[name]
    register_impl(name, fn)
    layer = build(cls, *args)
    with pytest.raises(OSError, match="kernel") as error:
        layer(*call)
    (note,) = error.value.__notes__
    assert f"'vendor.cpu.test' of op '{name}'" in note
    assert "float32[2, 64]" in note


# -------------------------------------------------------------------- copies, pickles and deaths


def test_a_deep_copy_is_served_and_independent_of_the_original(both, rms_norm) -> None:
    stock, served = both(rms_norm, 64)
    twin = copy.deepcopy(served)
    x = randn(5, 64)
    assert_close(twin(x), stock(x))
    assert is_served(twin)
    assert bound(twin).layer is twin
    served.weight.data.zero_()
    assert served(x).eq(0).all()
    assert_close(twin(x), stock(x))
    twin.weight.data.fill_(1)
    assert served(x).eq(0).all()
    assert {row["bound"] for row in route_rows()} == {2}


def test_a_copy_that_starts_at_the_forward_is_one_layer_too(register, build, rms_norm) -> None:
    register()
    served = build(rms_norm, 64)
    forward, twin = copy.deepcopy([served._forward_method, served])
    assert forward.__self__ is bound(twin)
    assert {row["bound"] for row in route_rows()} == {2}


def test_a_deep_copy_outlives_the_original(both, rms_norm) -> None:
    stock, served = both(rms_norm, 64)
    twin = copy.deepcopy(torch.nn.Sequential(served))[0]
    original = weakref.ref(served)
    del served
    gc.collect()
    assert original() is None
    x = randn(5, 64)
    assert_close(twin(x), stock(x))
    assert {row["bound"] for row in route_rows()} == {1}


def test_a_deep_copy_of_a_mixed_layer_calls_its_own_native_forward(
    build, register, rms_norm
) -> None:
    stock = build(rms_norm, 64)
    register(PER_OP="fused_add_rms_norm=native")
    served = build(rms_norm, 64)
    twin = copy.deepcopy(served)
    served.weight.data.zero_()
    x = randn(5, 64)
    assert_close(twin(x.clone(), x.clone())[0], stock(x.clone(), x.clone())[0])


def test_a_native_layer_is_copied_as_vllm_copies_it(register, build, rms_norm) -> None:
    register(OOT_BLACKLIST="rms_norm")
    twin = copy.deepcopy(build(rms_norm, 64))
    assert twin._forward_method.__self__ is twin


@pytest.mark.parametrize("settings", [{}, {"PER_OP": "fused_add_rms_norm=native"}], ids=str)
def test_a_pickled_layer_comes_back_with_vllms_own_forward(
    build, register, rms_norm, settings
) -> None:
    stock = build(rms_norm, 64)
    register(**settings)
    served = build(rms_norm, 64)
    loaded = pickle.loads(pickle.dumps(served))
    assert loaded._forward_method == loaded.forward_cpu
    assert is_served(served)
    x = randn(5, 64)
    assert_close(loaded(x), stock(x))


def test_torch_can_save_a_model_of_served_layers(both, rms_norm) -> None:
    stock, served = both(rms_norm, 64)
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(served), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = randn(5, 64)
    assert_close(loaded(x), stock(x))


def test_a_layer_that_nobody_holds_is_collected_and_its_record_goes_with_it(
    register, build, rms_norm, silu_and_mul
) -> None:
    register(PER_OP="silu_and_mul=native")
    served, native, kept = build(rms_norm, 64), build(silu_and_mul), build(rms_norm, 64)
    served(randn(5, 64))
    assert len(records) == 3
    dead = weakref.ref(served), weakref.ref(native), weakref.ref(bound(served))
    del served, native
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]
    assert [record.layer() for record in records] == [kept]


def test_many_layers_that_die_together_leave_no_record(register, build, rms_norm) -> None:
    register()
    model = torch.nn.ModuleList(build(rms_norm, 64) for _ in range(50))
    kept = model[25]
    del model
    gc.collect()
    assert [record.layer() for record in records] == [kept]


def test_layers_keep_what_they_were_bound_to_when_the_hooks_are_gone(both, rms_norm) -> None:
    stock, served = both(rms_norm, 64)
    plugin.unregister()
    x = randn(5, 64)
    assert is_served(served)
    assert_close(served(x), stock(x))


def test_layers_keep_what_they_were_bound_to_when_the_registry_changes(
    register, build, rms_norm
) -> None:
    register()
    layer = build(rms_norm, 64)
    before = bound(layer).rms_norm
    get_default_manager().registry.unregister("rms_norm", "vendor.cpu")
    assert bound(layer).rms_norm is before
    layer(randn(5, 64))
