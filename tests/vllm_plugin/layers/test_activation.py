# SPDX-License-Identifier: Apache-2.0
import importlib

import pytest
import torch
from torch.testing import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WHERE = ["vllm.model_executor.layers", "vllm.model_executor.hw_agnostic.layers"]


@pytest.fixture(params=WHERE, ids=["in_tree", "hw_agnostic"])
def silu_and_mul(request: pytest.FixtureRequest) -> type:
    """SiluAndMul of vLLM, and its twin, which inherits its constructor."""
    return importlib.import_module(f"{request.param}.activation").SiluAndMul


@pytest.fixture
def gelu_and_mul() -> type:
    from vllm.model_executor.layers.activation import GeluAndMul

    return GeluAndMul


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def check_equal(stock, served, x: torch.Tensor) -> None:
    # A kernel rounds once, PyTorch after each of its two steps.
    tolerance = {
        torch.float32: {"rtol": 1e-5, "atol": 1e-6},
        torch.bfloat16: {"rtol": 2**-6, "atol": 2**-9},
        torch.float16: {"rtol": 2**-9, "atol": 2**-12},
    }.get(x.dtype, {})
    assert_close(served(x), stock(x), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vendor_cpu_serves_silu_and_equals_vllm(both, rows, silu_and_mul, dtype) -> None:
    stock, served = both(silu_and_mul)
    assert type(served) is type(stock) is silu_and_mul
    assert rows()["silu_and_mul"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, randn(5, 64, dtype=dtype))
    check_equal(stock, served, randn(2, 3, 64, dtype=dtype))
    # vLLM 0.28 gives the kernel a slice as it is, and computes nonsense.
    check_equal(stock.forward_native, served, randn(5, 128, dtype=dtype)[:, 32:96])
    assert rows()["silu_and_mul"]["rejected"] == []


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vendor_cpu_serves_gelu_and_equals_vllm(
    both, rows, gelu_and_mul, approximate, dtype
) -> None:
    stock, served = both(gelu_and_mul, approximate)
    assert rows()["gelu_and_mul"]["impl_id"] == "vendor.cpu"
    check_equal(stock, served, randn(5, 64, dtype=dtype))
    assert rows()["gelu_and_mul"]["rejected"] == []


def test_the_two_gelus_differ(both, gelu_and_mul, build) -> None:
    _, erf = both(gelu_and_mul, "none")
    tanh = build(gelu_and_mul, "tanh")
    x = randn(5, 64)
    assert not torch.equal(erf(x), tanh(x))


def test_the_kernels_really_run(both, gelu_and_mul, silu_and_mul, build) -> None:
    _, silu = both(silu_and_mul)
    layers = silu, build(gelu_and_mul, "none"), build(gelu_and_mul, "tanh")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for layer in layers:
            layer(randn(5, 64))
    kernels = {"_C::silu_and_mul", "_C::gelu_and_mul", "_C::gelu_tanh_and_mul"}
    assert kernels <= {event.key for event in seen.events()}


@pytest.mark.parametrize("size", [20, 24])
def test_a_row_that_the_kernel_cannot_do_goes_to_the_reference(
    both, rows, silu_and_mul, size
) -> None:
    stock, served = both(silu_and_mul)
    check_equal(stock, served, randn(5, size))
    (refusal,) = rows()["silu_and_mul"]["rejected"]
    assert refusal["impl_id"] == "vendor.cpu"
    assert refusal["reason"].startswith(f"some calls: the last dimension {size} is not a")


def test_float64_goes_to_the_reference(both, rows, gelu_and_mul) -> None:
    stock, served = both(gelu_and_mul, "tanh")
    check_equal(stock, served, randn(5, 64, dtype=torch.float64))
    assert rows()["gelu_and_mul"]["rejected"] == [
        {
            "impl_id": "vendor.cpu",
            "reason": "some calls: dtype float64 is not float32, bfloat16 or float16",
        }
    ]


def test_an_activation_with_its_own_mathematics_is_none_of_ours(both, rows) -> None:
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    stock, served = both(SiluAndMulWithClamp, 7.0)
    assert rows() == {}
    check_equal(stock, served, randn(5, 64))


def test_a_layer_of_several_bases_is_built_by_all_of_them(register, build, silu_and_mul) -> None:
    class Mixin(silu_and_mul.__mro__[1]):  # of CustomOp: it stands between the two
        def __init__(self, **kwargs) -> None:
            super().__init__(**kwargs)
            self.mixed = True

    class Both(silu_and_mul, Mixin):
        pass

    register()
    assert build(Both).mixed
