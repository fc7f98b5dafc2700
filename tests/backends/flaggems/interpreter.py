# SPDX-License-Identifier: Apache-2.0
"""FlagGems' kernels on a CPU, under Triton's interpreter.

TRITON_INTERPRET=1 must be set before Triton is imported. float32 and float16 only: the
interpreter truncates when it stores bfloat16. Not for kernels that call libdevice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch

from vllm_fl.backends.flaggems import versions
from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend, backend

DTYPES = (torch.float32, torch.float16)

NOT_INTERPRETED = {
    "gelu_and_mul": "erf and tanh come from libdevice",
    "fused_experts": "it asks the driver for the device's registers and shared memory",
    "w8a8_block_fp8_matmul": "it reaches for what FlagGems' tuner has behind the kernel",
}
"""Op to the reason why its kernel runs on a GPU only."""

FP8_IS_OFF = {"concat_and_cache_mla": "fp8", "per_token_group_quant_fp8": ""}
"""Op to what the names of its cases with FP8 begin with: the interpreter of Triton 3.6 converts
to FP8 with errors of 8 units in the last place."""

TOO_SLOW = {"moe_align_block_size": ("257 experts", "1030 experts")}
"""Op to cases whose loops over experts take the interpreter minutes."""


def is_interpreted(op: str, case: str) -> bool:
    """Whether a contract's case can be shown without a GPU."""
    if op in NOT_INTERPRETED or case in TOO_SLOW.get(op, ()):
        return False
    return op not in FP8_IS_OFF or not case.startswith(FP8_IS_OFF[op])


def absence() -> str | None:
    """Why the kernels cannot be interpreted in this process, or None."""
    refusal = versions.reason(versions.flaggems_version(), versions.triton_version())
    if refusal is not None:
        return f"{refusal}; `make test-flaggems` has an environment of its own"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET=1 is not set; `make test-flaggems` sets it"
    return None


def pretend_cuda() -> None:
    """Answer what FlagGems asks the CUDA runtime for: names and a device guard."""

    class Guard(contextlib.nullcontext[None]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    properties = types.SimpleNamespace(
        multi_processor_count=4, major=9, minor=0, name="interpreter"
    )
    for name, answer in {
        "get_device_name": "interpreter",
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "_lazy_init": None,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
    }.items():
        setattr(torch.cuda, name, functools.partial(_answer, answer))
    torch.cuda.device = Guard  # type: ignore[assignment,misc]


def _answer(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer


@functools.cache
def load() -> FlagGemsBackend:
    """The backend with FlagGems loaded as a worker loads it, its kernels interpreted."""
    from triton.runtime import driver

    pretend_cuda()
    driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: _first_is_best))
    _pass_launches_through()
    FlagGemsBackend.device_vendor = lambda self: "cuda"  # type: ignore[method-assign]
    with _interpreted_kernels_pass_for_compiled():
        backend.load()
    from flag_gems.utils.tensor_wrapper import StridedBuffer

    StridedBuffer.new_empty = lambda self, *a, **k: self._base.new_empty(*a, **k)
    StridedBuffer.storage_offset = lambda self: self._base.storage_offset() + self.offset
    return backend


def _first_is_best(run: Any, quantiles: tuple[float, ...]) -> list[float]:
    """What Triton's own tuner measures."""
    run()
    return [1.0] * len(quantiles)


def _pass_launches_through() -> None:
    """FlagGems' launch cache and tuner need compiled kernels."""
    entry = types.ModuleType("flag_gems.utils.libentry")

    class LibTuner:
        @classmethod
        def register_policy(cls, name: str) -> Any:
            return lambda function: function

        register = register_policy

    def decorator(*args: Any, **kwargs: Any) -> Any:
        return lambda kernel: kernel

    for name, value in {
        "libentry": decorator,
        "libtuner": decorator,
        "LibEntry": object,
        "LibTuner": LibTuner,
        "minor_version": None,  # the shim's
    }.items():
        setattr(entry, name, value)
    sys.modules["flag_gems.utils.libentry"] = entry


@contextlib.contextmanager
def _interpreted_kernels_pass_for_compiled() -> Iterator[None]:
    """While FlagGems is imported: it looks into its kernels as JITFunction has them."""
    import triton
    import triton.runtime.jit as jit
    from triton.runtime.interpreter import InterpretedFunction

    original = jit.JITFunction

    class Either(type):
        def __instancecheck__(cls, obj: Any) -> bool:
            return isinstance(obj, (original, InterpretedFunction))

    class JITFunction(metaclass=Either):
        pass

    def source(kernel: Any) -> str:
        text = textwrap.dedent(inspect.getsource(kernel.fn))
        start = re.search(r"^def\s+\w+\s*\(", text, re.M)
        assert start is not None
        return text[start.start() :]

    def cache_key(kernel: Any) -> str:
        return hashlib.sha256(inspect.getsource(kernel.fn).encode()).hexdigest()

    def params(kernel: Any) -> list[Any]:
        return [types.SimpleNamespace(name=n, num=i) for i, n in enumerate(kernel.arg_names)]

    InterpretedFunction.cache_key = property(cache_key)
    InterpretedFunction.params = property(params)
    InterpretedFunction.src = property(source)
    InterpretedFunction.__globals__ = property(lambda kernel: kernel.fn.__globals__)
    places = (jit, triton.runtime, triton)
    for place in places:
        place.JITFunction = JITFunction
    try:
        yield
    finally:
        for place in places:
            place.JITFunction = original
