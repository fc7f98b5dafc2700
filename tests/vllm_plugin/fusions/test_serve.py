# SPDX-License-Identifier: Apache-2.0
"""Modules that one op serves: which are recognised, what they then compute, what is said of them,
and how they get their own forward back."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import types
from typing import Any

import pytest
import torch

from tests.vllm_plugin.fusions import models
from tests.vllm_plugin.fusions.models import (
    ApertusLike,
    Inherits,
    Model,
    NamesItsParameters,
    NormsKeyLikeQuery,
    OtherNames,
    Overrides,
    Qwen3Like,
    RotatesFirst,
    ScalesValues,
)
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.ops.qk_norm_rope import FUSED_QK_NORM_ROPE
from vllm_fl.vllm_plugin import hooks, plugin
from vllm_fl.vllm_plugin.fusions.serve import records
from vllm_fl.vllm_plugin.routes import route_rows, rpc

OP = "fused_qk_norm_rope"
SERVED = (Qwen3Like, OtherNames, ApertusLike, Inherits)
EACH_SERVED = pytest.mark.parametrize("cls", SERVED, ids=lambda cls: cls.__name__)
POSITIONS = torch.tensor([3, 0, 7, 15, 1])
HIDDEN = torch.randn(5, 48, generator=torch.Generator().manual_seed(5))


def in_place(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
    cos_sin_cache, is_neox, position_ids,
):  # fmt: skip
    """As a kernel does it."""
    return qkv.copy_(
        FUSED_QK_NORM_ROPE.reference(
            qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
            cos_sin_cache, is_neox, position_ids,
        )
    )  # fmt: skip


@pytest.fixture
def layers(current_config) -> Any:
    """Builds the norms and the rotary embedding of vLLM."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def layers(head_dim: int, **changes: Any) -> tuple[Any, Any, Any]:
        settings = {"mode": 0, "rotary": RotaryEmbedding, "rotary_dim": head_dim, "eps": 1e-6,
                    "k_eps": 1e-6, "norm": RMSNorm, "norm_dim": head_dim, **changes}  # fmt: skip
        with current_config(mode=settings["mode"]):
            q_norm = settings["norm"](settings["norm_dim"], settings["eps"])
            k_norm = settings["norm"](settings["norm_dim"], settings["k_eps"])
            rotary = settings["rotary"](
                head_dim, settings["rotary_dim"], 16, 10000.0, True, torch.float32
            )
        return q_norm, k_norm, rotary

    return layers


@pytest.fixture
def served(register, layers, register_impl) -> Any:
    """served(Qwen3Like, ...) builds a model of such modules with the plugin, and loads it: with an
    implementation of the op, unless it is told None. The separate layers are the reference's."""

    def served(
        *classes: type, impl: Any = in_place, loads: Any = None, settings: Any = None, **of: Any
    ) -> Model:
        order = {"rms_norm": "reference", "rotary_embedding": "reference"}
        order |= {OP: "vendor"} if impl is not None else {}
        given = {"PER_OP": ";".join(f"{op}={order[op]}" for op in order)}
        register(**(given if settings is None else settings))
        if impl is not None:
            register_impl(OP, impl, mutates=("qkv",))
        model = Model(*(cls(layers, **of) for cls in classes))
        load(model, of.get("mode", 0))
        kept.append(model)  # the records do not
        return model

    kept: list[Model] = []
    return served


def load(model: torch.nn.Module, mode: int = 0) -> None:
    """As a worker does it."""
    worker = types.SimpleNamespace(get_model=lambda: model)
    plugin._freezing(lambda: None, mode != 0, worker)()


def calls(name: str = OP) -> int:
    return sum(row["calls"] for row in route_rows() if row["op"] == name)


def of(op: str = OP) -> list[tuple[str, int, str]]:
    """The op's rows, as implementation, number of modules or layers, and reason."""
    return [(r["impl_id"], r["bound"], r["reason"]) for r in route_rows() if r["op"] == op]


def native(model: Model) -> Model:
    """The model with the forwards that vLLM wrote."""
    plugin.unregister()
    return model


# -------------------------------------------------------------------------- what is computed


@EACH_SERVED
@pytest.mark.parametrize("pad", (0, 8), ids=("dense", "strided"))
def test_a_served_module_computes_what_its_own_forward_computes_bit_for_bit(
    served, cls, pad
) -> None:
    model = served(cls, cls, pad=pad)
    rpc(None, "count")
    found = model(POSITIONS, HIDDEN)
    assert (calls(), calls("rms_norm"), calls("rotary_embedding")) == (2, 0, 0)
    expected = native(model)(POSITIONS, HIDDEN)
    assert torch.equal(found, expected)
    assert found.abs().sum() > 0


@pytest.mark.parametrize(
    "shape", ({"rotary_dim": 32}, {"head_dim": 80}, {"kv_heads": 1}, {"heads": 2, "kv_heads": 2})
)
def test_any_shape_of_heads_is_handed_on_as_it_is(served, shape) -> None:
    model = served(Qwen3Like, **shape)
    rpc(None, "count")
    found = model(POSITIONS, HIDDEN)
    assert calls() == 1
    assert torch.equal(found, native(model)(POSITIONS, HIDDEN))


def test_arguments_may_be_given_by_position(served) -> None:
    model = served(Qwen3Like)
    layer = model.layers[0]
    assert torch.equal(layer(POSITIONS, HIDDEN), layer(positions=POSITIONS, hidden_states=HIDDEN))


def test_a_weight_that_is_loaded_anew_is_the_one_that_is_read(served) -> None:
    model = served(Qwen3Like)
    before = model(POSITIONS, HIDDEN)
    layer = model.layers[0]
    layer.q_norm.weight = torch.nn.Parameter(2 * layer.q_norm.weight.data, requires_grad=False)
    after = model(POSITIONS, HIDDEN)
    assert not torch.equal(before, after)
    assert torch.equal(after, native(model)(POSITIONS, HIDDEN))


def test_the_projections_and_the_attention_are_called_as_modules(served) -> None:
    """As LoRA, which replaces them, and hooks need it."""
    model = served(Qwen3Like)
    layer, seen = model.layers[0], []
    layer.attn.register_forward_hook(lambda *_: seen.append("attn"))
    layer.o_proj.register_forward_hook(lambda *_: seen.append("o_proj"))

    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            seen.append("qkv_proj")
            return self.inner(x)

    layer.qkv_proj = Adapted(layer.qkv_proj)
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    assert (seen, calls()) == (["qkv_proj", "attn", "o_proj"], 1)


def test_an_exception_says_which_op_and_implementation_raised(served) -> None:
    def fails(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
              cos_sin_cache, is_neox, position_ids):  # fmt: skip
        raise ArithmeticError("no")

    model = served(Qwen3Like, impl=fails)
    with pytest.raises(ArithmeticError) as raised:
        model(POSITIONS, HIDDEN)
    notes = "\n".join(raised.value.__notes__)
    assert OP in notes and "vendor.cpu.test" in notes


# ------------------------------------------------------------- what is watched or exchanged


@pytest.mark.parametrize("name", ("q_norm", "k_norm", "rotary_emb", "qkv_proj"))
@pytest.mark.parametrize("when", ("before", "after"))
def test_a_layer_that_somebody_watches_is_called(served, register, layers, name, when) -> None:
    seen: list[Any] = []

    class Watched(Qwen3Like):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if when == "before":
                getattr(self, name).register_forward_hook(lambda *_: seen.append(1))

    model = served(Watched)
    if when == "after":
        handle = getattr(model.layers[0], name).register_forward_hook(lambda *_: seen.append(1))
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    assert (seen, calls()) == ([1], 0)
    if when == "before":
        assert of() == [("native", 1, "q_norm, k_norm, rotary_emb or the projection has a forward "
                         "hook")]  # fmt: skip
    else:
        handle.remove()
        model(POSITIONS, HIDDEN)
        assert (seen, calls()) == ([1], 1)


@pytest.mark.parametrize("name", ("q_norm", "k_norm", "rotary_emb"))
def test_a_layer_that_is_another_one_by_now_is_called(served, name) -> None:
    model = served(Qwen3Like)
    layer = model.layers[0]

    class Zeros(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            found = tuple(torch.zeros_like(x) for x in args if x.is_floating_point())
            return found if len(found) > 1 else found[0]

    setattr(layer, name, Zeros())
    rpc(None, "count")
    found = model(POSITIONS, HIDDEN)
    assert calls() == 0
    assert torch.equal(found, native(model)(POSITIONS, HIDDEN))


# ------------------------------------------------------------------------- who is recognised


@EACH_SERVED
def test_a_module_of_a_known_form_is_served_whatever_its_names(served, cls) -> None:
    served(cls)
    assert [row[:2] for row in of()] == [("vendor.cpu.test", 1)]


FORM = "the forward of {} is of no known form"


@pytest.mark.parametrize(
    "cls", (Overrides, ScalesValues, NormsKeyLikeQuery, RotatesFirst, NamesItsParameters)
)
def test_a_forward_that_differs_in_anything_but_names_stays_native(served, cls) -> None:
    served(cls)
    assert of() == [("native", 1, FORM.format(cls.__name__))]
    assert [h.name for h in hooks.installed() if h.attribute == "forward"] == []


def test_a_subclass_with_a_forward_of_its_own_stays_native_beside_its_base(served) -> None:
    model = served(Qwen3Like, Overrides)
    rpc(None, "count")
    found = model(POSITIONS, HIDDEN)
    assert calls() == 1  # Overrides calls its base's forward, which runs the layers
    assert torch.equal(found, native(model)(POSITIONS, HIDDEN))


def test_a_wrapped_forward_stays_native_though_its_source_looks_right(served, monkeypatch) -> None:
    @functools.wraps(Qwen3Like.forward)
    def doubled(self: Any, positions: Any, hidden_states: Any) -> Any:
        return 2 * doubled.__wrapped__(self, positions, hidden_states)

    monkeypatch.setattr(Qwen3Like, "forward", doubled)
    served(Qwen3Like)
    assert of() == [("native", 1, "the forward of Qwen3Like is wrapped")]


def test_a_forward_from_elsewhere_stays_native(served, monkeypatch) -> None:
    monkeypatch.setattr(Qwen3Like, "forward", ApertusLike.forward)
    served(Qwen3Like)
    name = f"{models.__name__}.ApertusLike.forward"
    assert of() == [("native", 1, f"{name} replaced its forward")]


def test_an_instance_with_a_forward_of_its_own_stays_native(served) -> None:
    class Own(Qwen3Like):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.forward = lambda positions, hidden_states: hidden_states  # type: ignore[method-assign]

    served(Own)
    assert of() == [("native", 1, "somebody gave the instance a forward of its own")]


def test_a_module_that_looks_like_none_of_them_is_not_listed(register) -> None:
    register()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    load(model)
    assert (records, of()) == ([], [])


# --------------------------------------------------------------------- whose layers are fused


def mrotary() -> type:
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    return MRotaryEmbedding


def gemma() -> type:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    return GemmaRMSNorm


def test_another_norm_stays_native(served) -> None:
    served(Qwen3Like, norm=gemma())
    assert of() == [("native", 1, "its q_norm is a GemmaRMSNorm, which rms_norm does not serve")]


def test_another_rotary_embedding_stays_native(served) -> None:
    served(Qwen3Like, rotary=mrotary())
    assert of() == [
        ("native", 1, "its rotary_emb is a MRotaryEmbedding, which rotary_embedding does not serve")
    ]


def test_a_scaled_cache_is_just_another_cache(served, layers) -> None:
    from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
        LinearScalingRotaryEmbedding,
    )

    def scaled(*args: Any) -> Any:
        return LinearScalingRotaryEmbedding(*args[:5], [2.0], args[5])

    model = served(Qwen3Like, rotary=scaled)
    rpc(None, "count")
    found = model(POSITIONS, HIDDEN)
    assert calls() == 1
    assert torch.equal(found, native(model)(POSITIONS, HIDDEN))


def test_a_norm_with_a_forward_of_its_own_stays_native(served) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    class Own(RMSNorm):
        def forward_native(self, x: Any, residual: Any = None) -> Any:
            return x

    served(Qwen3Like, norm=Own)
    ((impl_id, bound, reason),) = of()
    assert (impl_id, bound) == ("native", 1)
    assert reason.startswith("its q_norm is native: ") and "its own forward_native" in reason


def test_norms_that_add_different_numbers_stay_native(served) -> None:
    served(Qwen3Like, eps=1e-6, k_eps=1e-5)
    assert of() == [("native", 1, "q_norm adds 1e-06 and k_norm 1e-05")]


def test_a_norm_over_another_size_than_a_head_stays_native(served) -> None:
    served(Qwen3Like, norm_dim=32)
    assert of() == [("native", 1, "its q_norm has 32 weights for heads of 64")]


def test_a_norm_of_a_part_stays_native(served) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    served(Qwen3Like, norm=lambda size, eps: RMSNorm(size, eps, 32))
    assert of() == [("native", 1, "its q_norm has no weight, or the variance of a part")]


def test_a_layer_whose_forward_somebody_pointed_elsewhere_stays_native(served) -> None:
    class Pointed(Qwen3Like):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.k_norm._forward_method = self.k_norm.forward_native

    model = served(Pointed)
    gc.collect()  # what the norm's forward was bound to
    load(model)
    assert of() == [("native", 1, "somebody pointed the forward of its k_norm elsewhere")]


# ------------------------------------------------------------------------------ what decides


def test_the_reference_alone_is_not_used_because_it_is_no_faster(served) -> None:
    model = served(Qwen3Like, impl=None, settings={"ALLOW_VENDORS": ""})
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    assert of() == [("native", 1, "nothing takes the place of the layers: they run one by one")]
    assert calls() == 0


def test_the_reference_is_used_where_an_order_names_it(served) -> None:
    model = served(Qwen3Like, impl=None, settings={"PER_OP": f"{OP}=reference"})
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    assert [row[:2] for row in of()] == [("reference.torch", 1)]
    assert calls() == 1


def test_native_leaves_the_three_layers_alone(served) -> None:
    before = Qwen3Like.forward
    model = served(Qwen3Like, settings={"PER_OP": f"{OP}=native"})
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    assert Qwen3Like.forward is before
    assert [row[:2] for row in of()] == [("native", 1)]
    assert (calls(), calls("rms_norm"), calls("rotary_embedding")) == (0, 2, 1)


@pytest.mark.parametrize("name", (OP, "rms_norm", "rotary_embedding"))
def test_the_oot_lists_name_the_op_or_what_it_fuses(served, name) -> None:
    model = served(Qwen3Like, settings={"OOT_BLACKLIST": name})
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    ((impl_id, _, reason),) = of()
    assert (impl_id, calls()) == ("native", 0)
    assert "the OOT lists leave it native" in reason


def test_a_name_of_the_oot_lists_that_is_wrong_is_told_the_op(register) -> None:
    with pytest.raises(ConfigError, match=OP):
        register(OOT_BLACKLIST="fused_qk_norm_ropes")


def test_an_implementation_that_depends_on_the_batch_stays_out_where_none_may(
    served, monkeypatch
) -> None:
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    served(Qwen3Like)
    ((impl_id, _, _),) = of()
    assert impl_id == "native"


def test_under_a_compiler_nothing_is_replaced_whatever_the_policy(served) -> None:
    before = Qwen3Like.forward
    model = served(Qwen3Like, mode=3)
    assert Qwen3Like.forward is before
    assert of() == [("native", 1, "left to the compiler")]
    assert "_vllm_fl_qk_norm_rope" not in vars(model.layers[0])


def graph_of(model: Model) -> str:
    """What a compiler is given of it."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(POSITIONS, HIDDEN)
    torch._dynamo.reset()
    (graph,) = graphs
    return graph


def test_a_compiler_is_given_the_graph_of_vllm_alone(served, layers) -> None:
    source = inspect.getsource(Qwen3Like.forward)
    stock = graph_of(Model(Qwen3Like(layers, mode=3)))
    ours = served(Qwen3Like, mode=3, settings={})
    assert graph_of(ours) == stock
    assert inspect.getsource(Qwen3Like.forward) == source


def test_a_guard_that_refuses_a_call_hands_it_to_the_next_implementation(
    register, register_impl, layers
) -> None:
    register(PER_OP=f"{OP}=vendor|reference")
    register_impl(OP, in_place, mutates=("qkv",), supports=lambda *args: "not today")
    model = Model(Qwen3Like(layers))
    load(model)
    rpc(None, "count")
    model(POSITIONS, HIDDEN)
    rows = {row["impl_id"]: row for row in route_rows() if row["op"] == OP}
    assert rows["reference.torch"]["calls"] == 1
    assert rows["vendor.cpu.test"]["calls"] == 0


# ------------------------------------------------------------------- what is said and undone


def test_the_route_table_says_what_runs_the_fused_layers(served) -> None:
    served(Qwen3Like, Inherits, ScalesValues)
    assert of() == [
        ("native", 1, FORM.format("ScalesValues")),
        (
            "vendor.cpu.test",
            2,
            f"the order for {OP} names it (from environment variable VLLM_FL_PER_OP)",
        ),
    ]
    named = "the order for {} names it (from environment variable VLLM_FL_PER_OP)"
    assert of("rms_norm") == [
        ("reference.torch", 2, named.format("rms_norm")),
        ("vendor.cpu.test", 4, f"part of {OP}"),
    ]
    assert of("rotary_embedding") == [
        ("reference.torch", 1, named.format("rotary_embedding")),
        ("vendor.cpu.test", 2, f"part of {OP}"),
    ]
    assert of("fused_add_rms_norm") != []


def test_a_rotary_embedding_that_another_module_has_too_keeps_its_row(
    register, register_impl, layers
) -> None:
    register(PER_OP=f"{OP}=vendor")
    register_impl(OP, in_place, mutates=("qkv",))
    one, other = Qwen3Like(layers), ScalesValues(layers)
    other.rotary_emb = one.rotary_emb
    load(Model(one, other))
    shared = [reason for _, bound, reason in of("rotary_embedding") if bound]
    assert f"part of {OP}" not in shared


def test_the_patch_is_named_listed_and_taken_back(served) -> None:
    before = Qwen3Like.forward
    model = served(Qwen3Like, Inherits)
    (hook,) = [h for h in hooks.installed() if h.attribute == "forward"]
    assert hook.name == f"{models.__name__}.Qwen3Like.forward"
    assert hook.purpose == f"serve {OP}"
    assert Qwen3Like.forward is not before and Qwen3Like.forward.__wrapped__ is before
    plugin.unregister()
    assert Qwen3Like.forward is before
    assert records == []
    assert "_vllm_fl_qk_norm_rope" not in vars(model.layers[0])


def test_loading_another_model_gives_the_first_its_own_forward_back(served, layers) -> None:
    first = served(Qwen3Like)
    load(Model(ApertusLike(layers)))
    rpc(None, "count")
    first(POSITIONS, HIDDEN)
    assert calls() == 0
    assert [h.name.rpartition(".")[0].rpartition(".")[2] for h in hooks.installed()
            if h.attribute == "forward"] == ["ApertusLike"]  # fmt: skip


def test_a_patch_that_somebody_put_over_ours_is_reported(served, monkeypatch) -> None:
    served(Qwen3Like)
    monkeypatch.setattr(Qwen3Like, "forward", lambda self, positions, hidden_states: hidden_states)
    assert of() == [("native", 1, "somebody pointed its forward elsewhere after it was built")]
    assert all(reason != f"part of {OP}" for _, _, reason in of("rms_norm"))
    monkeypatch.undo()
    assert [row[:2] for row in of()] == [("vendor.cpu.test", 1)]


@pytest.mark.parametrize("how", ("deepcopy", "pickle"))
def test_a_copy_of_a_served_module_has_vllms_own_forward(served, how) -> None:
    model = served(Qwen3Like)
    expected = model(POSITIONS, HIDDEN)
    layer = model.layers[0]
    copied = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    rpc(None, "count")
    found = HIDDEN + copied(POSITIONS, HIDDEN)
    assert calls() == 0
    torch.testing.assert_close(found, expected)  # a pickled norm is vLLM's, in other bits


def test_a_worker_that_does_not_tell_its_model_is_left_alone(register) -> None:
    register()

    def get_model() -> Any:
        raise NotImplementedError

    for worker in (types.SimpleNamespace(), types.SimpleNamespace(get_model=get_model)):
        plugin._freezing(lambda: None, False, worker)()
        assert records == []


def test_decisions_are_frozen_when_the_model_is_loaded(served) -> None:
    served(Qwen3Like)
    assert get_default_manager().frozen
