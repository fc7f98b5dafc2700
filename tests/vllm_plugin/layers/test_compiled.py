# SPDX-License-Identifier: Apache-2.0
"""Layers that the compiler traces: opaque ops where somebody asked for them, native elsewhere."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from vllm_fl.dispatch import SelectionPolicy, get_default_manager, policy_context
from vllm_fl.vllm_plugin import compile as compile_module
from vllm_fl.vllm_plugin.layers.serve import choices, records
from vllm_fl.vllm_plugin.routes import rpc

NORMS = "rms_norm=vendor:cpu;fused_add_rms_norm=vendor:cpu"


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch.compiler.reset()


@pytest.fixture
def layers() -> dict[str, type]:
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return {c.__name__: c for c in (GeluAndMul, SiluAndMul, RMSNorm, RotaryEmbedding)}


def traced(layer: Any, *args: Any) -> tuple[Any, list[str]]:
    """The result of a graph without a break, and our ops in it."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets = (str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        seen.extend(target for target in targets if "vllm_fl" in target)
        return graph.forward

    return torch.compile(layer.forward, fullgraph=True, backend=backend)(*args), seen


def impl_ids() -> dict[str, str]:
    return {row["op"]: row["impl_id"] for row in rpc(None)["ops"]}


def test_a_named_op_is_one_opaque_node_with_the_same_numbers(
    register, current_config, layers
) -> None:
    register(PER_OP=f"{NORMS};silu_and_mul=vendor:cpu;gelu_and_mul=vendor:cpu;"
             "rotary_embedding=vendor:cpu")  # fmt: skip
    x, residual = torch.randn(5, 64), torch.randn(5, 64)
    positions, qk = torch.arange(5), torch.randn(5, 128)
    with current_config(mode=3):
        norm, silu, gelu = layers["RMSNorm"](64), layers["SiluAndMul"](), layers["GeluAndMul"]()
        rope = layers["RotaryEmbedding"](64, 64, 32, 10000.0, True, torch.float32)
    found, nodes = traced(norm, x)
    assert nodes == ["vllm_fl.rms_norm.default"]
    torch.testing.assert_close(found, norm.forward_native(x))

    expected = norm.forward_native(x.clone(), residual.clone())
    found, nodes = traced(norm, x.clone(), residual.clone())
    assert nodes == ["vllm_fl.fused_add_rms_norm_.default"]
    torch.testing.assert_close(found, expected)

    for layer, name in ((silu, "silu_and_mul"), (gelu, "gelu_and_mul")):
        found, nodes = traced(layer, x)
        assert nodes == [f"vllm_fl.{name}.default"]
        torch.testing.assert_close(found, layer.forward_native(x))

    expected = rope.forward_native(positions, qk.clone(), qk.clone())
    found, nodes = traced(rope, positions, qk.clone(), qk.clone())
    assert nodes == ["vllm_fl.rotary_embedding_.default"]
    torch.testing.assert_close(found, expected)
    found, _ = traced(rope, positions, qk.clone(), None)
    assert found[1] is None


def test_every_other_op_is_one_opaque_node_too(register, current_config) -> None:
    """Norms with other facts, activations with arguments, positions in three dimensions."""
    from vllm.model_executor.layers import activation, layernorm
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    ops = {
        "gemma_rms_norm": (layernorm.GemmaRMSNorm, (64,), (torch.randn(5, 64),)),
        "rms_norm_gated": (layernorm.RMSNormGated, (64,), (torch.randn(5, 64),) * 2),
        "mul_and_silu": (activation.MulAndSilu, (), (torch.randn(5, 64),)),
        "silu_and_mul_with_clamp": (
            activation.SiluAndMulWithClamp, (7.0, 1.5, 1.0), (torch.randn(5, 64),),
        ),
        "swigluoai_and_mul": (activation.SwigluOAIAndMul, (), (torch.randn(5, 64),)),
        "fatrelu_and_mul": (activation.FatreluAndMul, (0.5,), (torch.randn(5, 64),)),
        "gelu_new": (activation.NewGELU, (), (torch.randn(5, 64),)),
        "gelu_fast": (activation.FastGELU, (), (torch.randn(5, 64),)),
        "gelu_quick": (activation.QuickGELU, (), (torch.randn(5, 64),)),
        "relu2": (activation.ReLUSquaredActivation, (), (torch.randn(5, 64),)),
        "mrotary_embedding": (
            MRotaryEmbedding,
            (64, 64, 32, 10000.0, True, torch.float32, [8, 12, 12]),
            (torch.arange(15).view(3, 5), torch.randn(5, 128), torch.randn(5, 64)),
        ),
    }  # fmt: skip
    if hasattr(layernorm.LayerNorm, "dispatch_forward"):
        ops["layer_norm"] = (layernorm.LayerNorm, (64,), (torch.randn(5, 64),))
    register(PER_OP=";".join(f"{op}=vendor:cpu|reference" for op in ops))
    for op, (cls, args, inputs) in ops.items():
        torch.compiler.reset()
        with current_config(mode=3):
            layer = cls(*args)
        expected = layer.forward_native(*(x.clone() for x in inputs))
        found, nodes = traced(layer, *(x.clone() for x in inputs))
        assert nodes == [f"vllm_fl.{op}.default"], op
        torch.testing.assert_close(found, expected, msg=op)

    register(PER_OP="fused_add_gemma_rms_norm=reference")
    with current_config(mode=3):
        layer = layernorm.GemmaRMSNorm(64)
    x, residual = torch.randn(5, 64), torch.randn(5, 64)
    found, nodes = traced(layer, x, residual)
    assert nodes == ["vllm_fl.fused_add_gemma_rms_norm.default"]
    torch.testing.assert_close(found, layer.forward_native(x, residual))


def test_a_reference_winner_is_functional_and_returns_no_key_where_there_is_none(
    register, current_config, layers
) -> None:
    register(PER_OP="rotary_embedding=reference")
    with current_config(mode=3):
        rope = layers["RotaryEmbedding"](64, 64, 32, 10000.0, True, torch.float32)
    positions, query = torch.arange(5), torch.randn(5, 128)
    kept = query.clone()
    found, nodes = traced(rope, positions, query, None)
    assert nodes == ["vllm_fl.rotary_embedding.default"]
    assert torch.equal(query, kept)
    assert found[1] is None
    torch.testing.assert_close(found[0], rope.forward_native(positions, query)[0])


def test_custom_ops_ask_for_a_dispatch_and_refuse_it(register, current_config, layers) -> None:
    register(PER_OP="silu_and_mul=vendor:cpu")
    with current_config(mode=3, custom_ops=["none", "+rms_norm", "-silu_and_mul"]):
        kept = [layers[name](*args) for name, *args in
                (("RMSNorm", 64), ("SiluAndMul",), ("GeluAndMul",))]  # fmt: skip
    assert impl_ids() == {
        "rms_norm": "vendor.cpu",
        "fused_add_rms_norm": "vendor.cpu",
        "silu_and_mul": "native",
        "gelu_and_mul": "native",
    }
    reasons = {row["op"]: row["reason"] for row in rpc(None)["ops"]}
    assert reasons["silu_and_mul"] == "custom_ops disables it"
    assert reasons["gelu_and_mul"] == "left to the compiler"
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("order", "eager", "compiled"),
    [
        ("rms_norm=reference", "reference.torch", "reference.torch"),
        ("rms_norm@compiled=reference", "vendor.cpu", "reference.torch"),
        ("rms_norm@eager=reference", "reference.torch", "native"),
        ("rms_norm@compiled=native;rms_norm=reference", "reference.torch", "native"),
    ],
)
def test_an_order_may_be_for_one_mode(
    register, current_config, layers, order, eager, compiled
) -> None:
    register(PER_OP=order)
    found = []
    for mode in (0, 3):
        with current_config(mode=mode):
            layer = layers["RMSNorm"](64)
        found.append(impl_ids()["rms_norm"])
        del layer
        records.clear()
    assert found == [eager, compiled]


def test_guards_run_and_calls_count_inside_the_op_and_never_at_trace_time(
    register, current_config, layers
) -> None:
    register(PER_OP="silu_and_mul=vendor:cpu")
    with current_config(mode=3):
        first, second = layers["SiluAndMul"](), layers["SiluAndMul"]()
    rpc(None, "count")
    compiled = torch.compile(first.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for width in (64, 64, 62, 64):  # 62 is refused on the real tensor; it is one graph
        x = torch.randn(3, width)
        torch.testing.assert_close(compiled(x), first.forward_native(x))
    rows = {row["impl_id"]: row for row in rpc(None, "uncount")["ops"]}
    assert rows["vendor.cpu"]["calls"] == 3
    assert rows["vendor.cpu"]["bound"] == 2
    assert rows["reference.torch"]["calls"] == 1
    assert "multiple of 16" in rows["vendor.cpu"]["rejected"][0]["reason"]
    assert second is not first


def test_a_layer_that_vllm_would_fuse_stays_native_unless_it_is_forced(
    register, current_config, layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    def build(**settings: str) -> str:
        register(**settings)
        records.clear()
        with current_config(mode=3, custom_ops=["none", "+rms_norm"]):
            config = get_current_vllm_config()
            config.compilation_config.pass_config.fuse_norm_quant = True
            config.quant_config = object()
            # As on CUDA, but only where we ask: vLLM's own constructor looks for CUDA kernels.
            layer = layers["RMSNorm"](64)
        return f"{impl_ids()['rms_norm']}: {rpc(None)['ops'][-1]['reason']}" if layer else ""

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    assert build() == "native: vLLM's own fusion (fuse_norm_quant) matches the native form"
    assert build(PER_OP=NORMS).startswith("vendor.cpu: the order for rms_norm names it")
    monkeypatch.undo()
    assert build().startswith("vendor.cpu")


def test_the_fusions_that_are_named_are_fields_of_this_release_or_of_another() -> None:
    from vllm.config.compilation import PassConfig

    named = {field for fields in compile_module._FUSIONS.values() for field, _ in fields}
    missing = {field for field in named if not hasattr(PassConfig(), field)}
    assert missing <= {"enable_sp", "fuse_qk_norm_rope_kvcache"}


def test_what_was_decided_enters_the_fingerprint(register, current_config, layers) -> None:
    from vllm import envs

    def key() -> str:
        return envs.environment_variables["VLLM_FL_DISPATCH_FINGERPRINT"]()

    register()
    empty = key()
    assert len(empty) == 64
    with current_config(mode=3):
        kept = layers["RMSNorm"](64)
    native = key()
    assert native != empty
    assert choices() == (
        "RMSNorm.fused_add_rms_norm compiled: native (left to the compiler)",
        "RMSNorm.rms_norm compiled: native (left to the compiler)",
    )
    with (
        policy_context(SelectionPolicy(per_op_order={"rms_norm": ["reference"]})),
        current_config(mode=3),
    ):
        other = layers["RMSNorm"](64)
    assert key() != native
    del other
    gc.collect()
    assert key() == native
    assert kept is not None
    register(ENABLED="0")
    assert key() == "off"


def test_vllm_reads_the_fingerprint_as_a_factor_of_its_cache_keys(register) -> None:
    from vllm import envs

    register()
    factors = envs.compile_factors()
    assert factors["VLLM_FL_DISPATCH_FINGERPRINT"] == get_default_manager().fingerprint()
