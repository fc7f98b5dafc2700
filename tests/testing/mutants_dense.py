# SPDX-License-Identifier: Apache-2.0
"""Wrong implementations of activations, norms and rotary embedding."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.testing.mutants import Mutant
from vllm_fl.ops.activation import GELU_AND_MUL, SILU_AND_MUL
from vllm_fl.ops.contract import Case
from vllm_fl.ops.normalization import FUSED_ADD_RMS_NORM, RMS_NORM
from vllm_fl.ops.rotary import ROTARY_EMBEDDING
from vllm_fl.testing import Kind

VALUES = (Kind.VALUES,)


def silu(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return (F.silu(x[..., :d]) * x[..., d:]).contiguous()


def norm(x, weight, epsilon, variance_size=None):
    return RMS_NORM.reference(x, weight, epsilon, variance_size).contiguous()


def fused(x, residual, weight, epsilon, variance_size=None):
    found = FUSED_ADD_RMS_NORM.reference(x, residual, weight, epsilon, variance_size)
    return tuple(t.contiguous() for t in found)


rotate = ROTARY_EMBEDDING.reference


def as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def _special(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(3, 64, generator=generator).to(dtype)
    x[0, 0], x[1, 1], x[2, 40] = torch.inf, -torch.inf, torch.nan
    return (x,)


SPECIAL = replace(SILU_AND_MUL, cases=(Case("special values", _special),))


# ------------------------------------------------------------------------------ activations


def only_contiguous(x):
    return silu(as_if_contiguous(x))


def last_column_skipped(x):
    out = torch.zeros(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype)
    out[..., :-1] = silu(x)[..., :-1]
    return out


def uninitialized(x):
    return silu(x) + 0 * torch.empty(1, dtype=x.dtype).clamp(-1, 1)


def wrong_on_zero_tokens(x):
    return silu(x) if x.numel() else torch.empty_like(x)


def raises_on_zero_tokens(x):
    if not x.numel():
        raise ZeroDivisionError("division by zero tokens")
    return silu(x)


def its_own_argument(x):
    out = x[..., : x.shape[-1] // 2]
    return out.copy_(silu(x))


def nan_on_large_input(x):
    out = silu(x)
    return out.masked_fill(out.abs() > 1e5, torch.nan)


def clamped_inf(x):
    limit = torch.finfo(x.dtype).max
    return silu(x).clamp(-limit, limit)


def nan_removed(x):
    return silu(x).nan_to_num(posinf=torch.inf, neginf=-torch.inf)


def flattened(x):
    return silu(x).reshape(-1, x.shape[-1] // 2)


def other_dtype(x):
    return silu(x.float())


def transposed_layout(x):
    out = silu(x)
    return out.transpose(0, -1).contiguous().transpose(0, -1)


def nondeterministic(x):
    out = silu(x)
    return out * (1 + torch.finfo(x.dtype).eps * torch.randint(0, 2, out.shape))


def depends_on_the_batch(x):
    out = silu(x)
    return out * (1 + torch.finfo(x.dtype).eps) if x.shape[0] > 3 else out


def depends_on_a_large_batch(x):
    out = silu(x)
    return out * (1 + torch.finfo(x.dtype).eps) if x.shape[0] > 40 else out


def dies_of_a_bad_address(x):
    if x.dim() == 4:
        ctypes.string_at(1)
    return silu(x)


def aborts(x):
    if x.dim() == 4:
        os.abort()
    return silu(x)


def exits(x):
    if x.dim() == 4:
        os._exit(3)
    return silu(x)


def hangs(x):
    time.sleep(60)
    return silu(x)


def hangs_in_a_signal_proof_way(x):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    return silu(x)


def returns_nothing(x):
    silu(x)


def returns_a_tuple(x):
    return (silu(x),)


def writes_past_the_end(x):
    beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
    out = silu(x)
    beyond.zero_()
    return out


def reads_past_the_end(x):
    out = silu(x)
    beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
    return out + 0 * beyond


def damages_its_argument(x):
    out = silu(x)
    x.view(-1)[:1].add_(1)
    return out


def wide_rows_truncated(x):
    out = silu(x)
    out[..., 1024:] = 0
    return out


def tanh_instead_of_erf(x, approximate="none"):
    return GELU_AND_MUL.reference(x, "tanh").contiguous()


def erf_instead_of_tanh(x, approximate="none"):
    return GELU_AND_MUL.reference(x, "none").contiguous()


BUFFERS: dict[torch.Size, torch.Tensor] = {}


def one_buffer_for_every_call(x):
    out = silu(x)
    return BUFFERS.setdefault(out.shape, torch.empty_like(out)).copy_(out)


def halves_swapped(x):
    return silu(x.roll(x.shape[-1] // 2, -1))


def _settings(**settings: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(settings.items())


def reads_data(x):
    return bool((x < 1e3).all()) or "a value is too large"


def reads_an_address(x):
    return x.data_ptr() % 4 == 0 or "x is not aligned"


def guard_that_raises(x):
    raise KeyError("a fact that is not there")


def guard_that_forgets_to_return(x):
    if x.dim() > 3:
        return "more than three dimensions"


def guard_that_writes(x):
    x.zero_()
    return True


SILU = [
    Mutant("handles only contiguous input", SILU_AND_MUL, only_contiguous, VALUES),
    Mutant("skips the last column", SILU_AND_MUL, last_column_skipped, VALUES),
    Mutant(
        "reads memory that it never wrote",
        SILU_AND_MUL,
        uninitialized,
        (Kind.UNINITIALIZED,),
        "nan",
    ),
    Mutant("is wrong on zero tokens", SILU_AND_MUL, wrong_on_zero_tokens, (Kind.SHAPE,)),
    Mutant(
        "raises on zero tokens",
        SILU_AND_MUL,
        raises_on_zero_tokens,
        (Kind.RAISED,),
        "ZeroDivisionError: division by zero tokens (mutants_dense.py:",
    ),
    Mutant("returns its argument", SILU_AND_MUL, its_own_argument, (Kind.ALIAS,), "x"),
    Mutant("writes what it did not declare", SILU_AND_MUL, its_own_argument,
           (Kind.UNDECLARED_WRITE,), "x was written"),
    Mutant("damages one element", SILU_AND_MUL, damages_its_argument,
           (Kind.UNDECLARED_WRITE,), "x was written", cases=("one token",)),
    Mutant("writes past the end", SILU_AND_MUL, writes_past_the_end,
           (Kind.UNDECLARED_WRITE,), "past its ends"),
    Mutant("reads past the end", SILU_AND_MUL, reads_past_the_end, VALUES, "nan"),
    Mutant("gives NaN for large input", SILU_AND_MUL, nan_on_large_input, VALUES, "nan"),
    Mutant("clamps infinity", SPECIAL, clamped_inf, VALUES, "inf"),
    Mutant("hides NaN", SPECIAL, nan_removed, VALUES, "exact nan"),
    Mutant("flattens the shape", SILU_AND_MUL, flattened, (Kind.SHAPE,), "instead of"),
    Mutant("returns another dtype", SILU_AND_MUL, other_dtype, (Kind.DTYPE,),
           "torch.float32 instead of torch.bfloat16", "bfloat16"),
    Mutant("returns a transposed layout", SILU_AND_MUL, transposed_layout, (Kind.LAYOUT,)),
    Mutant("returns one buffer from every call", SILU_AND_MUL, one_buffer_for_every_call,
           (Kind.ALIAS,), "the call before"),
    Mutant("is not deterministic", SILU_AND_MUL, nondeterministic, (Kind.DETERMINISM,)),
    Mutant("depends on the batch", SILU_AND_MUL, depends_on_the_batch, (Kind.BATCH,),
           "alone", settings=_settings(batch_invariant=True)),
    Mutant("depends on a large batch", SILU_AND_MUL, depends_on_a_large_batch, (Kind.BATCH,),
           "in a batch of 67", settings=_settings(batch_invariant=True)),
    Mutant("dies of a bad address", SILU_AND_MUL, dies_of_a_bad_address, (Kind.CRASH,), "SIGSEGV"),
    Mutant("aborts", SILU_AND_MUL, aborts, (Kind.CRASH,), "SIGABRT"),
    Mutant("exits", SILU_AND_MUL, exits, (Kind.CRASH,), "exit code 3"),
    Mutant("hangs", SILU_AND_MUL, hangs, (Kind.HANG,), "no answer within 0.5 s",
           cases=("one token",), timeout=0.5),
    Mutant("hangs and ignores SIGTERM", SILU_AND_MUL, hangs_in_a_signal_proof_way, (Kind.HANG,),
           cases=("one token",), timeout=0.5),
    Mutant("returns nothing", SILU_AND_MUL, returns_nothing, (Kind.OUTPUTS,), "None"),
    Mutant("returns a tuple", SILU_AND_MUL, returns_a_tuple, (Kind.OUTPUTS,), "a tuple of 1"),
    Mutant("truncates wide rows", SILU_AND_MUL, wide_rows_truncated, VALUES),
    Mutant("swaps the halves", SILU_AND_MUL, halves_swapped, VALUES),
    Mutant("has tanh for erf", GELU_AND_MUL, tanh_instead_of_erf, VALUES),
    Mutant("has erf for tanh", GELU_AND_MUL, erf_instead_of_tanh, VALUES),
    Mutant("has a guard that reads data", SILU_AND_MUL, silu, (Kind.GUARD,),
           "reads more than metadata", settings=_settings(supports=reads_data)),
    Mutant("has a guard that reads an address", SILU_AND_MUL, silu, (Kind.GUARD,),
           settings=_settings(supports=reads_an_address)),
    Mutant("has a guard that raises", SILU_AND_MUL, silu, (Kind.GUARD,), "KeyError",
           settings=_settings(supports=guard_that_raises)),
    Mutant("has a guard that forgets to return", SILU_AND_MUL, silu, (Kind.GUARD,),
           "returned None", settings=_settings(supports=guard_that_forgets_to_return)),
    Mutant("has a guard that writes", SILU_AND_MUL, silu, (Kind.GUARD,), "x was written",
           settings=_settings(supports=guard_that_writes)),
    Mutant("has a parameter of another name", SILU_AND_MUL, lambda y: silu(y), (Kind.CONTRACT,),
           "missing 'x'"),
]  # fmt: skip


# ------------------------------------------------------------------------------------ norms


def epsilon_outside_the_root(x, weight, epsilon, variance_size=None):
    head = x if variance_size is None else x[..., :variance_size]
    root = head.float().pow(2).mean(-1, keepdim=True).sqrt() + epsilon
    out = x.float() / root
    return (out if weight is None else out * weight).to(x.dtype).contiguous()


def half_precision_variance(x, weight, epsilon, variance_size=None):
    head = x if variance_size is None else x[..., :variance_size]
    total = torch.zeros(*x.shape[:-1], 1, dtype=x.dtype)
    for part in head.split(8, dim=-1):
        total = total + part.pow(2).sum(-1, keepdim=True)
    root = torch.rsqrt(total / head.shape[-1] + epsilon)
    out = x * root
    return (out if weight is None else out * weight).contiguous()


def weight_ignored(x, weight, epsilon, variance_size=None):
    return norm(x, None, epsilon, variance_size)


def variance_size_ignored(x, weight, epsilon, variance_size=None):
    return norm(x, weight, epsilon)


def no_weight_forgotten(x, weight, epsilon, variance_size=None):
    return norm(x, weight.contiguous(), epsilon, variance_size)


def mean_subtracted(x, weight, epsilon, variance_size=None):
    return norm(x - x.mean(-1, keepdim=True), weight, epsilon, variance_size)


def partial_sums_by_batch(x, weight, epsilon, variance_size=None):
    head = (x if variance_size is None else x[..., :variance_size]).float()
    total = torch.zeros(*x.shape[:-1], 1)
    for part in head.chunk(min(x.shape[0], 8) or 1, dim=-1):
        total = total + part.pow(2).sum(-1, keepdim=True)
    out = x.float() * torch.rsqrt(total / head.shape[-1] + epsilon)
    return (out if weight is None else out * weight).to(x.dtype).contiguous()


def residual_not_updated(x, residual, weight, epsilon, variance_size=None):
    out, _ = fused(x, residual, weight, epsilon, variance_size)
    return out, residual.clone(memory_format=torch.contiguous_format)


def outputs_swapped(x, residual, weight, epsilon, variance_size=None):
    out, total = fused(x, residual, weight, epsilon, variance_size)
    return total, out


def one_output(x, residual, weight, epsilon, variance_size=None):
    return fused(x, residual, weight, epsilon, variance_size)[0]


def list_of_outputs(x, residual, weight, epsilon, variance_size=None):
    return list(fused(x, residual, weight, epsilon, variance_size))


def write_undeclared(x, residual, weight, epsilon, variance_size=None):
    out, total = fused(x, residual, weight, epsilon, variance_size)
    residual.copy_(total)
    return out, total


def returned_but_not_written(x, residual, weight, epsilon, variance_size=None):
    out, total = fused(x, residual, weight, epsilon, variance_size)
    return x.copy_(out), total


def writes_through_slices(x, residual, weight, epsilon, variance_size=None):
    out, total = fused(x, residual, weight, epsilon, variance_size)
    as_if_contiguous(x).copy_(out)
    as_if_contiguous(residual).copy_(total)
    return x, residual


def outputs_in_one_place(x, residual, weight, epsilon, variance_size=None):
    _, total = fused(x, residual, weight, epsilon, variance_size)
    return total, total


def outputs_in_each_other(x, residual, weight, epsilon, variance_size=None):
    out, total = fused(x, residual, weight, epsilon, variance_size)
    residual.copy_(out)
    x.copy_(total)
    return residual, x


IN_PLACE = _settings(mutates=("x", "residual"))

NORMS = [
    Mutant("epsilon is outside the root", RMS_NORM, epsilon_outside_the_root, VALUES),
    Mutant("the variance of a wide row is summed in half precision", RMS_NORM,
           half_precision_variance, VALUES, dtype="bfloat16"),
    Mutant("the weight is ignored", RMS_NORM, weight_ignored, VALUES),
    Mutant("variance_size is ignored", RMS_NORM, variance_size_ignored, VALUES),
    Mutant("a missing weight is forgotten", RMS_NORM, no_weight_forgotten, (Kind.RAISED,),
           "AttributeError"),
    Mutant("the mean is subtracted", RMS_NORM, mean_subtracted, VALUES),
    Mutant("the sum is split by the batch", RMS_NORM, partial_sums_by_batch, (Kind.BATCH,),
           settings=_settings(batch_invariant=True)),
    Mutant("the residual is not updated", FUSED_ADD_RMS_NORM, residual_not_updated, VALUES,
           "output 1"),
    Mutant("the outputs are swapped", FUSED_ADD_RMS_NORM, outputs_swapped, VALUES),
    Mutant("one output is missing", FUSED_ADD_RMS_NORM, one_output, (Kind.OUTPUTS,),
           "one tensor instead of a tuple of 2"),
    Mutant("the outputs are a list", FUSED_ADD_RMS_NORM, list_of_outputs, (Kind.OUTPUTS,),
           "a list of 2"),
    Mutant("a declared write does not happen", FUSED_ADD_RMS_NORM, fused,
           (Kind.MISSING_WRITE,), "x is declared", settings=IN_PLACE),
    Mutant("one of two declared writes does not happen", FUSED_ADD_RMS_NORM,
           returned_but_not_written, (Kind.MISSING_WRITE,), "residual is declared",
           settings=IN_PLACE),
    Mutant("an undeclared write happens", FUSED_ADD_RMS_NORM, write_undeclared,
           (Kind.UNDECLARED_WRITE,), "residual was written"),
    Mutant("it writes between the rows of a slice", FUSED_ADD_RMS_NORM, writes_through_slices,
           (Kind.UNDECLARED_WRITE,), "between its rows", settings=IN_PLACE),
    Mutant("two outputs share memory", FUSED_ADD_RMS_NORM, outputs_in_one_place, (Kind.ALIAS,),
           "outputs 0 and 1"),
    Mutant("the outputs are in each other's argument", FUSED_ADD_RMS_NORM, outputs_in_each_other,
           (Kind.ALIAS,), "output 0 shares memory with residual", settings=IN_PLACE),
]  # fmt: skip


# ----------------------------------------------------------------------------------- rotary


def wrong_style(positions, query, key, head_size, cos_sin_cache, is_neox):
    return rotate(positions, query, key, head_size, cos_sin_cache, not is_neox)


def other_direction(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache.chunk(2, -1)
    return rotate(positions, query, key, head_size, torch.cat((cos, -sin), -1), is_neox)


def positions_counted(positions, query, key, head_size, cos_sin_cache, is_neox):
    counted = torch.arange(positions.numel())
    return rotate(counted, query, key, head_size, cos_sin_cache, is_neox)


def small_positions_only(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert positions.dtype is torch.int32, "positions must be int32"
    return rotate(positions, query, key, head_size, cos_sin_cache, is_neox)


def key_forgotten(positions, query, key, head_size, cos_sin_cache, is_neox):
    rotated, _ = rotate(positions, query, None, head_size, cos_sin_cache, is_neox)
    return rotated, None if key is None else key.clone(memory_format=torch.contiguous_format)


def key_required(positions, query, key, head_size, cos_sin_cache, is_neox):
    key.shape  # noqa: B018
    return rotate(positions, query, key, head_size, cos_sin_cache, is_neox)


def rest_of_the_head_lost(positions, query, key, head_size, cos_sin_cache, is_neox):
    rotated, other = rotate(positions, query, key, head_size, cos_sin_cache, is_neox)
    if rotated.numel():
        heads = rotated.view(positions.numel(), -1, head_size)
        heads[..., cos_sin_cache.shape[-1] :] = 0
    return rotated, other


ROTARY = [
    Mutant("the other style", ROTARY_EMBEDDING, wrong_style, VALUES),
    Mutant("the other direction", ROTARY_EMBEDDING, other_direction, VALUES),
    Mutant("positions are counted, not read", ROTARY_EMBEDDING, positions_counted, VALUES),
    Mutant("positions must be int32", ROTARY_EMBEDDING, small_positions_only, (Kind.RAISED,),
           "AssertionError: positions must be int32"),
    Mutant("the key is forgotten", ROTARY_EMBEDDING, key_forgotten, VALUES, "output 1"),
    Mutant("the key is required", ROTARY_EMBEDDING, key_required, (Kind.RAISED,)),
    Mutant("the rest of the head is lost", ROTARY_EMBEDDING, rest_of_the_head_lost, VALUES),
]  # fmt: skip

MUTANTS = [*SILU, *NORMS, *ROTARY]
