# SPDX-License-Identifier: Apache-2.0
"""Quantization: as vLLM computes it where it can on a CPU, and as its definition says."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from vllm_fl.ops.library import define, op_for
from vllm_fl.ops.quantization import (
    DYNAMIC_PER_TOKEN_QUANT_INT8,
    PER_TOKEN_GROUP_QUANT_FP8,
    SCALED_FP8_QUANT,
    W8A8_BLOCK_FP8_MATMUL,
)
from vllm_fl.testing import worst_errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SINGLE = 2.0**-22
"""Four roundings of float32, relative."""

scaled = SCALED_FP8_QUANT.reference
grouped = PER_TOKEN_GROUP_QUANT_FP8.reference
matmul = W8A8_BLOCK_FP8_MATMUL.reference
to_int8 = DYNAMIC_PER_TOKEN_QUANT_INT8.reference


def cases(contract):
    return pytest.mark.parametrize("case", contract.cases, ids=lambda c: c.name)


def arguments(case, dtype=torch.float32):
    return case.make(dtype, torch.Generator().manual_seed(3))


def named(contract, args) -> dict[str, Any]:
    defaults = {p.name: p.default for p in contract.signature.parameters}
    return {**defaults, **dict(zip(contract.signature.parameter_names, args, strict=False))}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: Any, expected: Any) -> bool:
    """Equal in every bit, and laid out alike."""
    if isinstance(expected, tuple):
        return all(same(f, e) for f, e in zip(found, expected, strict=True))
    alike = (found.dtype, found.shape, found.stride()) == (
        expected.dtype, expected.shape, expected.stride(),
    )  # fmt: skip
    return alike and found.tolist() == expected.tolist()


# ------------------------------------------------------------- FP8 by its definition

FP8_VALUES = sorted(
    (8 + m) / 8 * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)  # NaN
)
"""The numbers that float8_e4m3fn has, without signs: 4 bits of exponent, 3 of mantissa."""


def test_fp8_has_the_numbers_that_its_definition_gives() -> None:
    bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert bits.float().tolist() == FP8_VALUES
    assert (FP8_VALUES[1], FP8_VALUES[-1]) == (2.0**-9, 448.0)


def assert_nearest(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Each value is a nearest FP8 number to the exact one, up to float32's rounding of that."""
    table = torch.tensor(FP8_VALUES, dtype=torch.float64)
    exact = exact.double().clamp(-448, 448)
    nearest = (exact.abs().unsqueeze(-1) - table).abs().amin(dim=-1)
    distance = (found.double() - exact).abs()
    assert (distance <= nearest + exact.abs() * SINGLE).all()


def groups_of(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x: (r, c) -> for each element the largest magnitude of its group."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = x[i : i + rows, j : j + columns].double().abs()
            out[i : i + rows, j : j + columns] = max(part.flatten().tolist(), default=0.0)
    return out


# ----------------------------------------------------------------------- scaled_fp8_quant


@pytest.fixture
def quant_fp8():
    """quant_fp8(static, group_shape, ...) is vLLM's layer, whose native form needs no kernel."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    def quant_fp8(static: bool, group_shape: tuple[int, int], **more: Any) -> Any:
        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
            return QuantFP8(static, GroupShape(*group_shape), **more).forward_native

    return quant_fp8


@each_dtype
@pytest.mark.parametrize("shape", [(1, 64), (7, 61), (5, 4099)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_dynamic_scale_is_vllms_bit_for_bit(quant_fp8, shape, dtype, scale) -> None:
    x = (scale * randn(*shape)).to(dtype)
    assert same(scaled(x), quant_fp8(False, (-1, -1))(x))
    assert same(scaled(x, None, None, None, True), quant_fp8(False, (1, -1))(x))


@each_dtype
def test_a_bounded_scale_and_rows_of_zeros_are_vllms_bit_for_bit(quant_fp8, dtype) -> None:
    x = randn(6, 64, dtype=dtype)
    x[::2] = 0
    bound = torch.tensor([1.5])
    assert same(scaled(x, None, None, bound, True), quant_fp8(False, (1, -1))(x, scale_ub=bound))
    assert same(scaled(x), quant_fp8(False, (-1, -1))(x))


@each_dtype
@pytest.mark.parametrize("columns", [64, 61])
def test_a_given_scale_is_vllms_bit_for_bit(quant_fp8, columns, dtype) -> None:
    x, scale = randn(6, columns, dtype=dtype), torch.tensor([0.0123])
    values, _ = quant_fp8(True, (-1, -1))(x, scale)
    assert same(scaled(x, scale)[0], values)
    assert scaled(x, scale)[1] is None


@pytest.mark.parametrize(
    ("shape", "group_shape"),
    [((6,), (1, -1)), ((64,), (-1, 1)), ((6, 2), (1, 32)), ((2, 4), (3, 16)), ((6, 1), (1, -1))],
    ids=str,
)
def test_given_scales_of_groups_are_vllms_bit_for_bit(quant_fp8, shape, group_shape) -> None:
    x, scale = randn(6, 64), randn(*shape, seed=1).abs() * 0.01 + 0.001
    values, _ = quant_fp8(True, group_shape)(x, scale)
    assert same(scaled(x, scale, group_shape=list(group_shape))[0], values)


def test_padding_is_vllms_in_the_rows_that_are_given(quant_fp8) -> None:
    x = randn(5, 64)
    values, scale = scaled(x, None, 16, None, True)
    assert (values.shape, scale.shape) == ((16, 64), (16, 1))
    expected, _ = quant_fp8(False, (1, -1), num_token_padding=16)(x)
    assert values.shape == expected.shape
    assert same(values[:5], expected[:5])


@each_dtype
@cases(SCALED_FP8_QUANT)
def test_scaled_values_are_the_definition_in_float64(case, dtype) -> None:
    given = named(SCALED_FP8_QUANT, arguments(case, dtype))
    x, scale = given["input"], given["scale"]
    tokens = x.shape[0]
    values, found_scale = scaled(**given)
    if scale is None:
        rows = 1 if given["use_per_token_if_dynamic"] else max(tokens, 1)
        largest = groups_of(x, rows, x.shape[1])
        if given["scale_ub"] is not None:
            largest = largest.clamp(max=float(given["scale_ub"]))
        exact = (largest / 448).clamp(min=1 / (448 * 512))
        if tokens:
            wanted = exact[:, :1] if given["use_per_token_if_dynamic"] else exact[0, :1]
            error = (found_scale[: len(wanted)].double() - wanted).abs()
            assert (error <= wanted * SINGLE).all()
    elif scale.numel() == 1:
        exact = torch.full(x.shape, float(scale), dtype=torch.float64)
    else:
        shape = given["group_shape"]
        rows, columns = (size if size > 0 else x.shape[d] for d, size in enumerate(shape))
        flat = scale.double().flatten().tolist()
        across = x.shape[1] // columns
        exact = torch.tensor(
            [
                [flat[i // rows * across + j // columns] for j in range(x.shape[1])]
                for i in range(tokens)
            ],
            dtype=torch.float64,
        )
    assert values.shape[0] == max(tokens, given["num_token_padding"] or 0)
    assert_nearest(values[:tokens], x.double() / exact)


def test_scales_that_cannot_be_meant_are_refused() -> None:
    x = randn(6, 64)
    with pytest.raises(ValueError, match=r"a scale of shape \[6\] needs a group_shape: \(-1, 1\)"):
        scaled(x, torch.ones(6))
    with pytest.raises(ValueError, match=r"scale \[4, 1\] does not divide input \[6, 64\]"):
        scaled(x, torch.ones(4, 1))


# ---------------------------------------------------------------- per_token_group_quant_fp8


@each_dtype
@pytest.mark.parametrize("ue8m0", [False, True], ids=["scale", "power of two"])
@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_groups_are_vllms_bit_for_bit(quant_fp8, dtype, ue8m0, column_major, scale) -> None:
    x = (scale * randn(7, 256)).to(dtype)
    layer = quant_fp8(False, (1, 128), column_major_scales=column_major, use_ue8m0=ue8m0)
    found = grouped(x, 128, column_major_scales=column_major, use_ue8m0=ue8m0)
    assert same(found, layer(x))


@pytest.mark.parametrize(
    ("shape", "column_major", "tma_aligned"),
    [
        ((7, 256), False, False),
        ((7, 256), True, False),
        ((1, 256), True, False),
        ((7, 256), True, True),
        ((8, 256), True, True),
        ((3, 5, 256), True, True),
        ((3, 5, 256), False, False),
        ((256,), False, False),
    ],
    ids=str,
)
def test_the_results_are_laid_out_as_vllm_allocates_them(
    monkeypatch, shape, column_major, tma_aligned
) -> None:
    """vLLM's function up to its kernel, which is left out: it is for GPUs."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    class WithoutKernel:
        ops = types.SimpleNamespace(
            _C=types.SimpleNamespace(per_token_group_fp8_quant=lambda *args: None)
        )

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    x = randn(*shape)
    platform = types.SimpleNamespace(
        is_cuda_alike=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn, is_fp8_fnuz=lambda: False
    )
    monkeypatch.setattr(fp8_utils, "torch", WithoutKernel())
    monkeypatch.setattr(fp8_utils, "current_platform", platform)
    given = {"column_major_scales": column_major, "tma_aligned_scales": tma_aligned}
    expected = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False, **given)
    define(PER_TOKEN_GROUP_QUANT_FP8)
    op = op_for("per_token_group_quant_fp8", inplace=False)
    for found in (grouped(x, 128, **given), op(x, 128, **given)):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            several = [i for i, n in enumerate(theirs.shape) if n > 1]
            assert [ours.stride(i) for i in several] == [theirs.stride(i) for i in several]


@each_dtype
@cases(PER_TOKEN_GROUP_QUANT_FP8)
def test_group_values_are_the_definition_in_float64(case, dtype) -> None:
    given = named(PER_TOKEN_GROUP_QUANT_FP8, arguments(case, dtype))
    x, size = given["x"], given["group_size"]
    values, scales = grouped(**given)
    rows = x.reshape(-1, x.shape[-1])
    exact = groups_of(rows, 1, size).clamp(min=given["eps"]) / 448
    found = scales.reshape(len(rows), x.shape[-1] // size).double().repeat_interleave(size, dim=1)
    if given["use_ue8m0"]:
        # The least power of two that is no less than the scale.
        assert (found.log2() == found.log2().round()).all()
        assert (found * (1 + SINGLE) >= exact).all()
        assert (found / 2 < exact * (1 + SINGLE)).all()
        exact = found
    assert ((found - exact).abs() <= exact * SINGLE).all()
    assert_nearest(values.reshape(rows.shape), rows.double() / exact)


# ------------------------------------------------------------- dynamic_per_token_quant_int8


@each_dtype
@cases(DYNAMIC_PER_TOKEN_QUANT_INT8)
def test_integers_are_the_definition_in_float64(case, dtype) -> None:
    (x,) = arguments(case, dtype)
    values, scale = to_int8(x)
    rows = x.reshape(-1, x.shape[-1])
    largest = groups_of(rows, 1, rows.shape[1]).reshape(x.shape).clamp(min=1e-10)
    error = (values.double() - x.double() * 127 / largest).abs()
    assert (error <= 0.5 + 127 * SINGLE).all()
    assert values.abs().max(dim=-1).values.reshape(-1).tolist() == [
        127 if any(row) else 0 for row in rows.tolist()
    ]
    exact = largest[..., :1] / 127
    assert ((scale.double() - exact).abs() <= exact * SINGLE).all()


@each_dtype
@cases(DYNAMIC_PER_TOKEN_QUANT_INT8)
def test_vllms_cpu_kernel_is_right_by_the_contract(case, dtype) -> None:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    (x,) = arguments(case, dtype)
    values, scale, _ = _custom_ops.scaled_int8_quant(x.reshape(-1, x.shape[-1]).contiguous())
    found = values.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)
    tolerance = DYNAMIC_PER_TOKEN_QUANT_INT8.tolerances[dtype]
    errors = worst_errors(DYNAMIC_PER_TOKEN_QUANT_INT8, found, (x,))
    assert all(error <= tolerance.for_output(i) for i, error in enumerate(errors)), errors


# ----------------------------------------------------------------- w8a8_block_fp8_matmul


@each_dtype
@cases(W8A8_BLOCK_FP8_MATMUL)
def test_the_product_is_that_of_vllms_own_torch_form(monkeypatch, case, dtype) -> None:
    """vLLM has one, for a GPU without a right kernel; any device that says so takes it."""
    import sys

    from vllm.model_executor.layers.quantization.utils import fp8_utils

    args = arguments(case, dtype)
    if not args[0].numel() or args[0].dim() == 1:
        pytest.skip("vLLM's form is for two dimensions and more, with elements")
    monkeypatch.setattr(fp8_utils, "current_platform", types.SimpleNamespace(is_rocm=lambda: True))
    rocm = types.SimpleNamespace(on_gfx1250=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm)
    expected = fp8_utils.w8a8_triton_block_scaled_mm(*args)
    found = matmul(*args)
    # The same products, summed in the order that the matrices' shapes suggest to PyTorch.
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@each_dtype
@cases(W8A8_BLOCK_FP8_MATMUL)
def test_the_product_is_the_definition_in_float64(case, dtype) -> None:
    """Block by block: the sum of the integers, so to speak, times the two scales."""
    A, B, As, Bs, (block_n, block_k), output_dtype = arguments(case, dtype)
    found = matmul(A, B, As, Bs, [block_n, block_k], output_dtype)
    a, a_scales = A.double().reshape(-1, A.shape[-1]), As.double().reshape(-1, As.shape[-1])
    exact = torch.zeros(len(a), B.shape[0], dtype=torch.float64)
    size = torch.zeros_like(exact)
    for g, k in enumerate(range(0, A.shape[-1], block_k)):
        for h, n in enumerate(range(0, B.shape[0], block_n)):
            left, right = a[:, k : k + block_k], B.double()[n : n + block_n, k : k + block_k].t()
            scale = a_scales[:, g : g + 1] * float(Bs[h, g])
            exact[:, n : n + block_n] += left @ right * scale
            size[:, n : n + block_n] += left.abs() @ right.abs() * scale
    assert (found.shape, found.dtype) == ((*A.shape[:-1], B.shape[0]), dtype)
    error = (found.double().reshape(exact.shape) - exact).abs()
    # Sums of float32 are off by a unit for each term, at worst; then the result is rounded.
    bound = size * A.shape[-1] * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert (error <= bound + torch.finfo(dtype).tiny).all()


# ----------------------------------------------------------------------------------- for all


@pytest.mark.parametrize(
    "contract",
    [
        SCALED_FP8_QUANT,
        PER_TOKEN_GROUP_QUANT_FP8,
        W8A8_BLOCK_FP8_MATMUL,
        DYNAMIC_PER_TOKEN_QUANT_INT8,
    ],
    ids=lambda c: c.name,
)
def test_nothing_is_written_and_nothing_given_is_returned(contract) -> None:
    for case in contract.cases:
        args = arguments(case)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        before = [a.float().clone() for a in tensors]
        result = contract.reference(*args)
        for a, b in zip(tensors, before, strict=True):
            assert torch.equal(a.float(), b), case.name
        outputs = result if isinstance(result, tuple) else (result,)
        given = {a.untyped_storage().data_ptr() for a in tensors if a.numel()}
        made = {o.untyped_storage().data_ptr() for o in outputs if o is not None and o.numel()}
        assert not given & made, case.name
