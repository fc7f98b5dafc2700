# SPDX-License-Identifier: Apache-2.0
"""Every case that a guard of vendor.cpu refuses: the words it says, what the kernel does to such
arguments (the harm), and the nearest case that is accepted."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.backends.helpers import DTYPES, HALF_DTYPES, randn
from vllm_fl.backends.vendor.cpu.impl import common

SERVED = tuple(dtype for dtype in DTYPES if dtype in common.DTYPES)
SERVED_HALF = tuple(dtype for dtype in HALF_DTYPES if dtype in common.DTYPES)
"""Without AVX512_BF16 not bfloat16: see test_bfloat16.py."""

Arguments = Callable[[], tuple[Any, ...]]


class Harm(enum.Enum):
    """What the unguarded function does."""

    WRONG = "its result is off by more than 0.5, for inputs of variance 1"
    RAISES = "the kernel raises, so that nothing serves the call"
    DIES = "the process ends by a signal"
    OVERRUNS = "it writes memory behind an argument"
    SILENT = "it serves what the reference refuses as malformed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused case.

    Attributes:
        name: the op, then the case.
        arguments: makes the refused arguments.
        says: the guard's reason.
        harm: what happens without the guard.
        neighbour: makes arguments that are accepted.
        aligned: a case of bfloat16, which does harm where the kernels store aligned vectors.
        huge: calling anything with these arguments takes gigabytes and seconds.
    """

    name: str
    arguments: Arguments
    says: str
    harm: Harm
    neighbour: Arguments
    aligned: bool = False
    huge: bool = False

    @property
    def op(self) -> str:
        return self.name.split()[0]


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def in_front_of(x: torch.Tensor, filler: float) -> torch.Tensor:
    """The same values at the start of a buffer eight times as long, the rest being `filler`."""
    buffer = torch.full((8 * x.numel(),), filler, dtype=x.dtype)
    front = buffer[: x.numel()].view(x.shape)
    return front.copy_(x)


# -------------------------------------------------------------------------------- arguments


def gated(shape: tuple[int, ...] = (3, 64), dtype: torch.dtype = F32) -> tuple[Any, ...]:
    return (randn(shape, dtype),)


def norm(
    x: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    variance_size: int | None = None,
) -> tuple[Any, ...]:
    x = randn((3, 64), F32) if x is None else x
    weight = randn((64,), x.dtype, seed=7) if weight is None else weight
    return (x, weight, 1e-5) if variance_size is None else (x, weight, 1e-5, variance_size)


def fused(
    x: torch.Tensor | None = None, residual: torch.Tensor | None = None, **more: Any
) -> tuple[Any, ...]:
    x = randn((3, 64), F32) if x is None else x
    residual = randn((3, 64), x.dtype, seed=1) if residual is None else residual
    args = norm(x, **more)
    return (args[0], residual, *args[1:])


def rows_of(size: int, make: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
    args = [randn((3, size), F32)] * (1 if make is norm else 2)
    return make(*args, weight=randn((size,), F32))


def without_weight(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args[:-2], None, args[-1])


def rotary(
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    head_size: int = 64,
    cache: torch.Tensor | None = None,
    is_neox: bool = True,
    dtype: torch.dtype = F32,
) -> tuple[Any, ...]:
    query = randn((5, 2 * head_size), dtype) if query is None else query
    positions = torch.arange(1, 6) if positions is None else positions
    cache = turns(head_size, query.dtype) if cache is None else cache
    return positions, query, key, head_size, cache, is_neox


def turns(rotary_dim: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """A cache whose angles grow by one radian with each position: nothing stays in place."""
    angles = torch.arange(16.0)[:, None].expand(16, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)


# --------------------------------------------------------------------------------- activation

DTYPE = "is not float32, bfloat16 or float16"


def _of_gated(op: str) -> tuple[Refusal, ...]:
    return (
        Refusal(
            f"{op} in float64", lambda: gated(dtype=F64), f"dtype float64 {DTYPE}",
            Harm.RAISES, lambda: gated(dtype=F16),
        ),
        Refusal(
            f"{op} of integers", lambda: (torch.ones(3, 64, dtype=torch.int32),),
            f"dtype int32 {DTYPE}", Harm.RAISES, gated,
        ),
        Refusal(
            f"{op} on the meta device", lambda: on_meta(gated()), "the tensor is on meta",
            Harm.RAISES, gated,
        ),
        Refusal(
            f"{op} of a half that is no multiple of 8", lambda: gated((3, 24)),
            "the last dimension 24 is not a positive multiple of 16",
            Harm.RAISES, lambda: gated((3, 32)),
        ),
        Refusal(
            f"{op} of an odd number of channels", lambda: gated((3, 33)),
            "the last dimension 33 is not a positive multiple of 16",
            Harm.SILENT, lambda: gated((3, 32)),
        ),
        Refusal(
            f"{op} of rows without elements", lambda: gated((3, 0)),
            "the last dimension 0 is not a positive multiple of 16",
            Harm.DIES, lambda: gated((0, 16)),
        ),
        Refusal(
            f"{op} of 2**31 elements and more", lambda: (torch.empty(3, 2**30, dtype=F16),),
            f"{3 * 2**30} elements are {2**31} or more", Harm.DIES, gated, huge=True,
        ),
    )  # fmt: skip


def _of_elementwise(op: str) -> tuple[Refusal, ...]:
    return (
        Refusal(
            f"{op} in float64", lambda: gated(dtype=F64), f"dtype float64 {DTYPE}",
            Harm.RAISES, lambda: gated(dtype=F16),
        ),
        Refusal(
            f"{op} on the meta device", lambda: on_meta(gated()), "the tensor is on meta",
            Harm.RAISES, gated,
        ),
        Refusal(
            f"{op} of rows that vectors do not fill", lambda: gated((3, 20)),
            "the last dimension 20 is not a positive multiple of 8",
            Harm.RAISES, lambda: gated((3, 24)),
        ),
        Refusal(
            f"{op} of a tensor without dimensions", lambda: (torch.tensor(1.0),),
            "the tensor has no dimensions", Harm.RAISES, lambda: gated((8,)),
        ),
        Refusal(
            f"{op} of rows without elements", lambda: gated((3, 0)),
            "the last dimension 0 is not a positive multiple of 8",
            Harm.DIES, lambda: gated((0, 8)),
        ),
        Refusal(
            f"{op} of 2**31 elements and more", lambda: (torch.empty(3, 2**30, dtype=F16),),
            f"{3 * 2**30} elements are {2**31} or more", Harm.DIES, gated, huge=True,
        ),
    )  # fmt: skip


_GELU = (
    Refusal(
        "gelu_and_mul of an unknown approximation", lambda: (*gated(), "sigmoid"),
        "approximate 'sigmoid' is not none or tanh", Harm.SILENT, lambda: (*gated(), "tanh"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------ normalization


def _of_norms(op: str, make: Callable[..., tuple[Any, ...]]) -> tuple[Refusal, ...]:
    return (
        Refusal(
            f"{op} in float64", lambda: make(randn((3, 64), F64)),
            f"dtype float64 {DTYPE}", Harm.RAISES, lambda: make(randn((3, 64), F16)),
        ),
        Refusal(
            f"{op} on the meta device", lambda: on_meta(make()),
            "the tensor is on meta", Harm.RAISES, make,
        ),
        Refusal(
            f"{op} of a size that is no multiple of 8",
            lambda: rows_of(60, make),
            "hidden_size 60 is not a positive multiple of 8", Harm.RAISES, make,
        ),
        Refusal(
            f"{op} of rows without elements",
            lambda: rows_of(0, make),
            "hidden_size 0 is not a positive multiple of 8", Harm.DIES, make,
        ),
        Refusal(
            f"{op} with a weight that is a column",
            lambda: make(weight=randn((64, 1), F32, seed=7)),
            "weight has shape [64, 1], x has [3, 64]", Harm.SILENT, make,
        ),
        Refusal(
            f"{op} with a weight of one element",
            lambda: make(weight=in_front_of(torch.ones(1), 1000.0)),
            "the weight has 1 elements, a row has 64", Harm.WRONG,
            lambda: without_weight(make()),
        ),
        Refusal(
            f"{op} with a weight for each row",
            lambda: make(weight=randn((3, 64), F32, seed=7)),
            "the weight has 192 elements, a row has 64", Harm.WRONG, make,
        ),
        Refusal(
            f"{op} with a weight of another dtype",
            lambda: make(weight=randn((64,), BF16)),
            "weight is torch.bfloat16, x is torch.float32", Harm.RAISES, make,
        ),
        Refusal(
            f"{op} with a weight that is a view",
            lambda: make(weight=randn((128,), F32)[::2]),
            "weight is not contiguous", Harm.RAISES, make,
        ),
        Refusal(
            f"{op} with the variance of a part",
            lambda: make(torch.arange(192.0).view(3, 64), variance_size=32),
            "variance_size 32 is given", Harm.WRONG, make,
        ),
    )  # fmt: skip


_FUSED = (
    Refusal(
        "fused_add_rms_norm of a slice", lambda: fused(randn((3, 192), F32)[:, :64]),
        "x or residual is not contiguous", Harm.WRONG, lambda: fused(randn((9, 64), F32)[3:6]),
    ),
    Refusal(
        "fused_add_rms_norm with a slice as residual",
        lambda: fused(residual=randn((3, 192), F32)[:, 64:128]),
        "x or residual is not contiguous", Harm.WRONG,
        lambda: fused(residual=randn((9, 64), F32)[3:6]),
    ),
    Refusal(
        "fused_add_rms_norm of one row repeated",
        lambda: fused(in_front_of(randn((1, 64), F32), 9.0).expand(3, 64)),
        "x or residual is not contiguous", Harm.WRONG,
        lambda: fused(randn((1, 64), F32).expand(3, 64).contiguous()),
    ),
    Refusal(
        "fused_add_rms_norm with a residual of another dtype",
        lambda: fused(randn((3, 64), F16), randn((3, 64), F32)),
        "residual is torch.float32, x is torch.float16", Harm.RAISES, fused,
    ),
    Refusal(
        "fused_add_rms_norm with one residual for all rows",
        lambda: fused(residual=in_front_of(randn((1, 64), F32), 9.0)),
        "residual has shape [1, 64], x has [3, 64]", Harm.OVERRUNS, fused,
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------- rotary

_ROTARY = (
    Refusal(
        "rotary_embedding in float64", lambda: rotary(dtype=F64), f"dtype float64 {DTYPE}",
        Harm.RAISES, lambda: rotary(dtype=F16),
    ),
    Refusal(
        "rotary_embedding on the meta device", lambda: on_meta(rotary()), "the tensor is on meta",
        Harm.RAISES, rotary,
    ),
    Refusal(
        "rotary_embedding with a cache of another dtype", lambda: rotary(cache=turns(64, BF16)),
        "cos_sin_cache is torch.bfloat16, query is torch.float32", Harm.RAISES, rotary,
    ),
    Refusal(
        "rotary_embedding with a key of another dtype", lambda: rotary(key=randn((5, 64), BF16)),
        "key is torch.bfloat16, query is torch.float32", Harm.RAISES,
        lambda: rotary(key=randn((5, 64), F32)),
    ),
    Refusal(
        "rotary_embedding with 32-bit positions",
        lambda: rotary(positions=torch.arange(1, 6, dtype=torch.int32)),
        "positions are torch.int32, not int64", Harm.RAISES, rotary,
    ),
    Refusal(
        "rotary_embedding with every second position",
        lambda: rotary(positions=torch.arange(10)[::2]),
        "positions or cos_sin_cache is not contiguous", Harm.WRONG,
        lambda: rotary(positions=torch.arange(10)[2:7]),
    ),
    Refusal(
        "rotary_embedding with a slice as cache", lambda: rotary(cache=turns(128)[:, 32:96]),
        "positions or cos_sin_cache is not contiguous", Harm.WRONG,
        lambda: rotary(cache=turns(64)[2:]),
    ),
    Refusal(
        "rotary_embedding with heads as a dimension", lambda: rotary(randn((5, 2, 64), F32)),
        "query has shape [5, 2, 64] for 5 positions", Harm.WRONG,
        lambda: rotary(randn((5, 2, 64), F32).flatten(1)),
    ),
    Refusal(
        "rotary_embedding of fewer tokens than positions",
        lambda: rotary(in_front_of(randn((2, 128), F32), 9.0), positions=torch.arange(1, 5)),
        "query has shape [2, 128] for 4 positions", Harm.OVERRUNS,
        lambda: rotary(randn((4, 128), F32), positions=torch.arange(1, 5)),
    ),
    Refusal(
        "rotary_embedding of more tokens than positions", lambda: rotary(randn((10, 128), F32)),
        "query has shape [10, 128] for 5 positions", Harm.WRONG, rotary,
    ),
    Refusal(
        "rotary_embedding with a key of fewer tokens",
        lambda: rotary(key=in_front_of(randn((1, 320), F32), 9.0)),
        "key has shape [1, 320] for 5 positions", Harm.OVERRUNS,
        lambda: rotary(key=randn((5, 64), F32)),
    ),
    Refusal(
        "rotary_embedding of one token without a dimension for it",
        lambda: rotary(randn((128,), F32), positions=torch.tensor(3)),
        "query has shape [128] for 1 positions", Harm.RAISES,
        lambda: rotary(randn((1, 128), F32), positions=torch.tensor([3])),
    ),
    Refusal(
        "rotary_embedding of rows that no number of heads fills",
        lambda: rotary(randn((5, 100), F32)),
        "query has rows of 100, which is no multiple of head_size 64", Harm.SILENT, rotary,
    ),
    Refusal(
        "rotary_embedding with key rows that no number of heads fills",
        lambda: rotary(key=randn((5, 100), F32)),
        "key has rows of 100, which is no multiple of head_size 64", Harm.SILENT,
        lambda: rotary(key=randn((5, 192), F32)),
    ),
    Refusal(
        "rotary_embedding of a transposed query",
        lambda: rotary(in_front_of(randn((128, 5), F32), 9.0).t()),
        "query has strides [1, 5] for shape [5, 128]", Harm.WRONG, rotary,
    ),
    Refusal(
        "rotary_embedding of every second channel", lambda: rotary(randn((5, 256), F32)[:, ::2]),
        "query has strides [256, 2] for shape [5, 128]", Harm.WRONG,
        lambda: rotary(randn((5, 256), F32)[:, 64:192]),
    ),
    Refusal(
        "rotary_embedding of one token repeated",
        lambda: rotary(randn((1, 128), F32).expand(5, 128)),
        "query has strides [0, 1] for shape [5, 128]", Harm.WRONG,
        lambda: rotary(randn((1, 128), F32).expand(5, 128).contiguous()),
    ),
    Refusal(
        "rotary_embedding of rows that overlap",
        lambda: rotary(randn((5 * 128,), F32).as_strided((5, 128), (64, 1))),
        "query has strides [64, 1] for shape [5, 128]", Harm.WRONG,
        lambda: rotary(randn((5 * 192,), F32).as_strided((5, 128), (192, 1))),
    ),
    Refusal(
        "rotary_embedding of a slice whose rows are not aligned",
        lambda: rotary(randn((5, 132), BF16)[:, :128]),
        "query has strides [132, 1] for shape [5, 128]", Harm.DIES,
        lambda: rotary(randn((5, 136), BF16)[:, :128]), aligned=True,
    ),
    Refusal(
        "rotary_embedding with a key slice whose rows are not aligned",
        lambda: rotary(key=randn((5, 68), BF16)[:, :64], dtype=BF16),
        "key has strides [68, 1] for shape [5, 64]", Harm.DIES,
        lambda: rotary(key=randn((5, 68), BF16)[:, :64], dtype=BF16, is_neox=False), aligned=True,
    ),
    Refusal(
        "rotary_embedding of a batch with gaps between its rows",
        lambda: rotary(randn((2, 8, 128), F32)[:, :3], positions=torch.arange(1, 7).view(2, 3)),
        "query has strides [1024, 128, 1] for shape [2, 3, 128]", Harm.WRONG,
        lambda: rotary(randn((6, 8, 128), F32)[2:4, :], positions=torch.arange(1, 9).repeat(2, 1)),
    ),
    Refusal(
        # PyTorch calls it contiguous, since a dimension of size 1 may have any stride.
        "rotary_embedding of a batch of single tokens by transposition",
        lambda: rotary(
            in_front_of(randn((1, 2, 128), F32), 9.0).transpose(0, 1),
            positions=torch.arange(1, 3).view(2, 1),
        ),
        "query has strides [128, 256, 1] for shape [2, 1, 128]", Harm.WRONG,
        lambda: rotary(randn((2, 1, 128), F32), positions=torch.arange(1, 3).view(2, 1)),
    ),
    Refusal(
        "rotary_embedding of more channels than a head has",
        lambda: rotary(in_front_of(randn((5, 128), F32), 9.0), cache=turns(128)),
        "rotary_dim 128 is not within 1 and head_size 64", Harm.OVERRUNS,
        lambda: rotary(cache=turns(48)),
    ),
    Refusal(
        "rotary_embedding of heads without channels",
        lambda: rotary(randn((5, 128), F32), head_size=0, cache=torch.empty(16, 0)),
        "rotary_dim 0 is not within 1 and head_size 0", Harm.DIES, rotary,
    ),
    Refusal(
        "rotary_embedding of an odd number of channels",
        lambda: rotary(cache=randn((16, 17), F32), is_neox=False),
        "rotary_dim 17 is odd", Harm.SILENT, lambda: rotary(cache=turns(18), is_neox=False),
    ),
    Refusal(
        "rotary_embedding of halves that vectors do not fill",
        lambda: rotary(cache=turns(20, BF16), dtype=BF16),
        "rotary_dim 20 is not a multiple of 16 (neox style)", Harm.DIES,
        lambda: rotary(cache=turns(20, BF16), dtype=BF16, is_neox=False), aligned=True,
    ),
    Refusal(
        "rotary_embedding of heads that are not aligned",
        lambda: rotary(head_size=36, cache=turns(32, BF16), dtype=BF16),
        "head_size 36 is not a multiple of 8 (neox style)", Harm.DIES,
        lambda: rotary(head_size=40, cache=turns(32, BF16), dtype=BF16), aligned=True,
    ),
)  # fmt: skip

CASES: tuple[Refusal, ...] = (
    *_of_gated("silu_and_mul"),
    *_of_gated("gelu_and_mul"),
    *_GELU,
    *_of_elementwise("gelu_new"),
    *_of_elementwise("gelu_fast"),
    *_of_elementwise("gelu_quick"),
    *_of_norms("rms_norm", norm),
    *_of_norms("fused_add_rms_norm", fused),
    *_FUSED,
    *_ROTARY,
)
"""All of them, on any machine."""

REFUSALS: tuple[Refusal, ...] = tuple(r for r in CASES if BF16 in SERVED or not r.aligned)
"""Those that can come up on this machine."""
