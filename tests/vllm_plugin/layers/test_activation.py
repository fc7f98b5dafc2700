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
    from vllm.model_executor.layers.activation import SwigluStepAndMul

    stock, served = both(SwigluStepAndMul, 7.0)
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


# --------------------------------------------------------------------------- the others

PLAIN = [
    # class, arguments, op, what serves it on a CPU
    ("MulAndSilu", (), "mul_and_silu", "reference.torch"),
    ("SiluAndMulWithClamp", (1.5, 1.702, 1.0), "silu_and_mul_with_clamp", "reference.torch"),
    ("SwigluOAIAndMul", (1.702, 1.5), "swigluoai_and_mul", "reference.torch"),
    ("FatreluAndMul", (0.5,), "fatrelu_and_mul", "reference.torch"),
    ("NewGELU", (), "gelu_new", "vendor.cpu"),
    ("FastGELU", (), "gelu_fast", "vendor.cpu"),
    ("QuickGELU", (), "gelu_quick", "vendor.cpu"),
    ("ReLUSquaredActivation", (), "relu2", "reference.torch"),
]
each_plain = pytest.mark.parametrize(
    ("name", "args", "op", "impl_id"), PLAIN, ids=[name for name, *_ in PLAIN]
)


def activation(name: str) -> type:
    return getattr(importlib.import_module(f"{WHERE[0]}.activation"), name)


@each_plain
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_activation_is_served_and_equals_vllm(
    both, rows, name, args, op, impl_id, dtype
) -> None:
    stock, served = both(activation(name), *args)
    row = rows()[op]
    assert (row["impl_id"], row["bound"], row["rejected"]) == (impl_id, 1, [])
    for shape in ((5, 64), (2, 3, 64), (0, 64)):
        x = 3 * randn(*shape, dtype=dtype)
        ours, theirs = served(x), stock.forward_native(x)
        if impl_id == "reference.torch":
            assert ours.equal(theirs)
        else:  # vLLM rounds up to eight times where a kernel rounds once: see gelu_new
            size = 3 * torch.finfo(dtype).eps
            assert_close(ours, theirs, rtol=0, atol=float(size * x.abs().max()) if len(x) else 0)
    assert rows()[op]["rejected"] == []


@each_plain
def test_every_activation_takes_the_parameters_of_its_layer(
    both, rows, register_impl, build, name, args, op, impl_id
) -> None:
    seen = []

    def record(*given):
        seen.append(given)
        return given[0]

    from vllm_fl.dispatch import get_default_manager

    _, _ = both(activation(name), *args)
    parameters = get_default_manager().registry.get_signature(op).parameter_names
    source = f"lambda {', '.join(parameters)}: record({', '.join(parameters)})"
    signature = get_default_manager().registry.get_signature(op)
    fn = eval(source, {"record": record})
    fn.__defaults__ = (
        tuple(p.default for p in signature.parameters if type(p.default) in (str, float, int))
        or None
    )
    register_impl(op, fn)
    layer = build(activation(name), *args)
    x = randn(5, 64)
    layer(x)
    [(given, *rest)] = seen
    assert given is x
    assert tuple(rest) == args


def test_an_activation_names_its_op_when_its_implementation_fails(
    register, build, register_impl
) -> None:
    def broken(x, limit, alpha=1.0, beta=0.0):
        raise OSError("kernel")

    def also(x):
        raise OSError("kernel")

    register()
    register_impl("silu_and_mul_with_clamp", broken)
    register_impl("relu2", also)
    for name, args in (("SiluAndMulWithClamp", (7.0,)), ("ReLUSquaredActivation", ())):
        layer = build(activation(name), *args)
        with pytest.raises(OSError) as error:
            layer(randn(2, 64))
        (said,) = error.value.__notes__
        assert "'vendor.cpu.test' of op" in said and "float32[2, 64]" in said
