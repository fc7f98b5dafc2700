# SPDX-License-Identifier: Apache-2.0
import importlib
from typing import Any

import pytest
import torch
from torch.testing import assert_close

ROPE = "vllm.model_executor.layers.rotary_embedding"
ARGS: dict[str, Any] = {
    "head_size": 64,
    "rotary_dim": 64,
    "max_position_embeddings": 128,
    "base": 10000.0,
    "is_neox_style": True,
    "dtype": torch.float32,
}


def rope(module: str, name: str) -> type:
    return getattr(importlib.import_module(f"{ROPE}.{module}"), name)


def inputs(dtype: torch.dtype, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 128, (7,), generator=generator)
    query = torch.randn(7, heads * 64, generator=generator).to(dtype)
    key = torch.randn(7, 2 * 64, generator=generator).to(dtype)
    return positions, query, key


def check_equal(stock: Any, served: Any, dtype: torch.dtype) -> None:
    """With and without a key. The kernel rotates in place, so each gets its own copies."""
    positions, query, key = inputs(dtype)
    for ours, theirs in zip(
        served(positions, query.clone(), key.clone()),
        stock(positions, query.clone(), key.clone()),
        strict=True,
    ):
        assert_close(ours, theirs)
    alone, nothing = served(positions, query.clone())
    assert nothing is None
    assert_close(alone, stock(positions, query.clone())[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"is_neox_style": False}, {"rotary_dim": 32}], ids=str)
def test_vendor_cpu_serves_it_and_equals_vllm(both, rows, dtype, changes) -> None:
    cls = rope("base", "RotaryEmbedding")
    stock, served = both(cls, **{**ARGS, **changes, "dtype": dtype})
    assert type(served) is type(stock) is cls
    row = rows()["rotary_embedding"]
    assert (row["impl_id"], row["bound"], row["rejected"]) == ("vendor.cpu", 1, [])
    check_equal(stock, served, dtype)
    assert rows()["rotary_embedding"]["rejected"] == []
    assert served.forward_native.__func__ is cls.forward_native


def test_it_rotates_in_place_as_vllms_own_does(both) -> None:
    _, served = both(rope("base", "RotaryEmbedding"), **ARGS)
    positions, query, key = inputs(torch.float32)
    rotated, rotated_key = served(positions, query, key)
    assert (rotated.data_ptr(), rotated_key.data_ptr()) == (query.data_ptr(), key.data_ptr())


def test_a_dtype_that_the_cache_does_not_have_converts_the_cache(both, rows) -> None:
    stock, served = both(rope("base", "RotaryEmbedding"), **ARGS)
    check_equal(stock, served, torch.bfloat16)
    assert rows()["rotary_embedding"]["rejected"] == []
    assert served.cos_sin_cache.dtype is torch.bfloat16


def test_a_rotary_dim_that_the_kernel_cannot_do_goes_to_the_reference(both, rows) -> None:
    stock, served = both(rope("base", "RotaryEmbedding"), **{**ARGS, "rotary_dim": 40})
    row = rows()["rotary_embedding"]
    assert row["impl_id"] == "reference.torch"
    assert row["rejected"] == [
        {"impl_id": "vendor.cpu", "reason": "rotary_dim 40 is not a multiple of 16 (neox style)"}
    ]
    positions, query, key = inputs(torch.float32)
    for ours, theirs in zip(
        served(positions, query, key), stock.forward_native(positions, query, key), strict=True
    ):
        assert_close(ours, theirs)


def test_heads_as_a_dimension_of_their_own_go_to_the_reference(both, rows) -> None:
    stock, served = both(rope("base", "RotaryEmbedding"), **ARGS)
    positions, query, key = inputs(torch.float32)
    query, key = query.view(7, 4, 64), key.view(7, 2, 64)
    for ours, theirs in zip(
        served(positions, query, key), stock.forward_native(positions, query, key), strict=True
    ):
        assert_close(ours, theirs)
    (refusal,) = rows()["rotary_embedding"]["rejected"]
    assert refusal["reason"].startswith("some calls: query has ")


def test_a_flashinfer_layer_is_left_alone(register, build, rows) -> None:
    cls = rope("base", "RotaryEmbedding")

    class Flash(cls):
        use_flashinfer = True

    register()
    build(Flash, **ARGS)
    assert rows()["rotary_embedding"]["reason"] == "it uses FlashInfer"


SCALED = [
    ("llama3_rope", "Llama3RotaryEmbedding",
     {"scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "orig_max_position": 32}),
    ("yarn_scaling_rope", "YaRNScalingRotaryEmbedding", {"scaling_factor": 4}),
    ("linear_scaling_rope", "LinearScalingRotaryEmbedding", {"scaling_factors": 2.0}),
    ("ntk_scaling_rope", "NTKScalingRotaryEmbedding", {"scaling_factor": 2.0}),
    ("dynamic_ntk_scaling_rope", "DynamicNTKScalingRotaryEmbedding",
     {"scaling_factor": 2.0, "max_trained_positions": 64}),
    ("dynamic_ntk_alpha_rope", "DynamicNTKAlphaRotaryEmbedding", {"scaling_alpha": 2.0}),
    ("gemma4_rope", "Gemma4RotaryEmbedding", {"rotary_dim": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "more"), SCALED, ids=[name for _, name, _ in SCALED])
def test_a_subclass_that_only_has_another_cache_is_served(both, rows, module, name, more) -> None:
    from inspect import signature

    cls = rope(module, name)
    # `mixed_b` of NTK scaling is optional in some releases.
    given = {**ARGS, **more}
    if "mixed_b" in signature(cls).parameters:
        given["mixed_b"] = None
    stock, served = both(cls, **given)
    assert type(served) is cls
    assert rows()["rotary_embedding"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, torch.float32)


FOPE = {"init_cache": False, "num_key_value_heads": 2, "num_inv_freq": 32, "fope_sep_head": True,
        "fope_init_factor": 0.1}  # fmt: skip
OWN = [
    ("fope", "FourierRotaryEmbedding", FOPE, "rotary_embedding", "forward_native"),
    ("deepseek_scaling_rope", "DeepseekScalingRotaryEmbedding", {"scaling_factor": 4},
     "rotary_embedding", "forward_native"),
    ("ernie45_vl_rope", "Ernie4_5_VLRotaryEmbedding", {"mrope_section": [10, 10, 12]},
     "mrotary_embedding", "forward_native"),
    ("mrope_interleaved", "MRotaryEmbeddingInterleaved",
     {"mrope_section": [8, 12, 12]}, "mrotary_embedding", "forward"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "more", "op", "which"), OWN, ids=[case[1] for case in OWN]
)
def test_a_class_with_its_own_mathematics_is_listed_as_native_by_its_name(
    register, build, rows, module, name, more, op, which
) -> None:
    cls = rope(module, name)
    register()
    layer = build(cls, **ARGS, **more)
    assert list(rows()) == [op]  # that of the class which it is most like, and no other
    row = rows()[op]
    assert (row["impl_id"], row["bound"]) == ("native", 1)
    assert row["reason"] == f"{ROPE}.{module}.{name} has its own {which}"
    assert layer._forward_method == layer.forward_cpu


MROTARY = [
    {},
    {"is_neox_style": False},
    {"rotary_dim": 32, "mrope_section": [6, 5, 5]},
    {"mrope_interleaved": True, "mrope_section": [12, 10, 10]},
    {"scaling_factor": 4.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", MROTARY, ids=str)
def test_mrotary_is_served_and_equals_vllm_bit_for_bit(both, rows, changes, dtype) -> None:
    cls = rope("mrope", "MRotaryEmbedding")
    stock, served = both(cls, **{**ARGS, "mrope_section": [8, 12, 12], **changes, "dtype": dtype})
    assert list(rows()) == ["mrotary_embedding"]
    row = rows()["mrotary_embedding"]
    assert (row["impl_id"], row["bound"]) == ("reference.torch", 1)
    text, query, key = inputs(dtype)
    for positions in (torch.arange(21).view(3, 7), text, text.int()):
        for ours, theirs in zip(
            served(positions, query.clone(), key.clone()),
            stock.forward_native(positions, query.clone(), key.clone()),
            strict=True,
        ):
            assert ours.equal(theirs)


def test_mrotary_without_a_key_or_sections_fails_as_vllms_own(both) -> None:
    cls = rope("mrope", "MRotaryEmbedding")
    stock, served = both(cls, **ARGS)
    _, query, key = inputs(torch.float32)
    for layer in (stock, served):
        with pytest.raises(AssertionError):
            layer(torch.arange(7), query)
        with pytest.raises((AssertionError, ValueError)):
            layer(torch.arange(21).view(3, 7), query, key)


def test_mrotary_can_be_left_native_by_its_name(register, build, rows) -> None:
    register(OOT_BLACKLIST="mrotary_embedding")
    layer = build(rope("mrope", "MRotaryEmbedding"), **ARGS, mrope_section=[8, 12, 12])
    assert rows()["mrotary_embedding"]["reason"] == "the OOT lists leave it native"
    assert layer._forward_method == layer.forward_cpu


def test_each_rotary_layer_is_recorded_once(register, build, rows) -> None:
    register()
    kept = [build(rope("base", "RotaryEmbedding"), **ARGS) for _ in range(3)]
    assert rows()["rotary_embedding"]["bound"] == len(kept)
