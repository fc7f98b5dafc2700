# SPDX-License-Identifier: Apache-2.0
"""What the tests of several backends need: inputs, comparisons, tolerances, child processes."""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch import OpManager, SelectionPolicy
from vllm_fl.dispatch.config import Config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_UNIT = 2.0**-24
"""Unit roundoff of float32, in which every implementation computes."""


def name_of(value: Any) -> str:
    """A parameter's id: bfloat16, 3x64, ..."""
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


def randn(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normally distributed, the same each time."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + 1000 * len(shape))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def at_offset(x: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, in memory whose start is aligned, moved on by some elements."""
    moved = torch.empty(x.numel() + elements, dtype=x.dtype)[elements:].view(x.shape)
    moved.copy_(x)
    return moved


# ------------------------------------------------------------------------------ comparing


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def assert_same(found: Any, expected: Any) -> None:
    """Equal in dtype, shape and every bit; also in tuples, and with None."""
    if isinstance(expected, tuple):
        assert isinstance(found, tuple) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    if expected is None:
        assert found is None
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    differs = bits(found) != bits(expected)
    assert not differs.any(), f"{int(differs.sum())} of {found.numel()} elements differ"


def assert_within(found: torch.Tensor, truth: torch.Tensor, tolerance: torch.Tensor) -> None:
    """Each element is within its own tolerance of the float64 truth."""
    assert found.shape == truth.shape
    error = (found.double() - truth).abs()
    excess = error - tolerance
    assert not (excess > 0).any() and not error.isnan().any(), (
        f"{int((excess > 0).sum())} of {found.numel()} elements are off; the worst has an error "
        f"of {error.max().item():.3g}"
    )


def off_by(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error; infinite where one of the two is NaN alone."""
    error = (found.double() - truth.double()).abs()
    return float(error.nan_to_num(nan=math.inf).max()) if error.numel() else 0.0


def rounding(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far rounding once to the dtype can move a value: half of its last place.

    Below the normal numbers the last place stops shrinking, and bfloat16 and float32 kernels
    may flush to zero: the floor is the last place of the smallest normal float16, and the
    smallest normal number of the other two.
    """
    info = torch.finfo(dtype)
    exponent = torch.frexp(truth.abs()).exponent - 1
    half_place = torch.ldexp(torch.full_like(truth, info.eps / 2), exponent)
    floor = info.smallest_normal * (info.eps if dtype is torch.float16 else 1)
    return half_place.clamp_min(floor)


# --------------------------------------------------------------------------- the metadata


class OnlyMetadata(torch.Tensor):
    """A tensor without data: any operation on it raises."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> OnlyMetadata:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise AssertionError(f"{func} was called: more than metadata is read")


# ------------------------------------------------------------------------ child processes


def in_child(experiment: Callable[[], object]) -> str:
    """Run something that may kill the process, in a fork of this one.

    Returns:
        "returned <value>", "raised <ExceptionType>: <first line>", or "died of signal <n>".
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; this child starts none and leaves at once.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_the_child(experiment, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return f"died of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said


def _be_the_child(experiment: Callable[[], object], writing: int) -> None:
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # glibc tells of a broken heap there
        torch.set_num_threads(1)  # the parent's threads do not exist here
        try:
            said = f"returned {experiment()}"
        except Exception as error:
            said = f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
        os.write(writing, said.encode())
    finally:
        os._exit(0)


DIES = "died of signal"


def wrong_by(found: str) -> float:
    """The number that an experiment in a child returned; fails where it did not return."""
    assert found.startswith("returned "), found
    return float(found.removeprefix("returned "))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads inside of PyTorch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------- the manager


def cpu_manager(policy: SelectionPolicy | None = None) -> OpManager:
    """A fresh manager for the CPU, whatever the machine and the environment say."""
    config = Config() if policy is None else Config(policy=policy)
    return OpManager(config=config, device=facts_of("cpu"))
