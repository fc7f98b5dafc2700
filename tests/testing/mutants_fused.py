# SPDX-License-Identifier: Apache-2.0
"""Wrong implementations of the norms of query and key with their rotary embedding, and two that
are right."""

from __future__ import annotations

from typing import Any

import torch

from tests.testing.mutants import Mutant
from vllm_fl.ops.normalization import RMS_NORM
from vllm_fl.ops.qk_norm_rope import FUSED_QK_NORM_ROPE
from vllm_fl.ops.rotary import ROTARY_EMBEDDING
from vllm_fl.testing import Kind

VALUES = (Kind.VALUES,)
NAMES = FUSED_QK_NORM_ROPE.signature.parameter_names
IN_PLACE = (("mutates", ("qkv",)),)

right = FUSED_QK_NORM_ROPE.reference


def named(fn: Any) -> Any:
    """With the contract's parameters, which registration checks."""

    def call(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
             cos_sin_cache, is_neox, position_ids):  # fmt: skip
        return fn(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
                  cos_sin_cache, is_neox, position_ids)  # fmt: skip

    return call


def changed(**changes: Any):
    """The right one, called with other arguments: each a function of all of them by name."""

    def call(*args):
        given = dict(zip(NAMES, args, strict=True))
        return right(
            *{**given, **{name: change(given) for name, change in changes.items()}}.values()
        )

    return named(call)


def other_direction(a: dict[str, Any]) -> torch.Tensor:
    cos, sin = a["cos_sin_cache"].chunk(2, -1)
    return torch.cat((cos, -sin), -1)


def as_if_contiguous(a: dict[str, Any]) -> torch.Tensor:
    x = a["qkv"]
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def rotated_first(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
                  cos_sin_cache, is_neox, position_ids):  # fmt: skip
    widths = [count * head_dim for count in (num_heads_q, num_heads_k, num_heads_v)]
    q, k, v = qkv.split(widths, -1)
    q, k = ROTARY_EMBEDDING.reference(position_ids, q, k, head_dim, cos_sin_cache, is_neox)
    q = RMS_NORM.reference(q.unflatten(-1, (-1, head_dim)), q_weight, eps).flatten(-2)
    k = RMS_NORM.reference(k.unflatten(-1, (-1, head_dim)), k_weight, eps).flatten(-2)
    return torch.cat((q, k, v), -1)


def heads_normed_together(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight,
                          k_weight, cos_sin_cache, is_neox, position_ids):  # fmt: skip
    widths = [count * head_dim for count in (num_heads_q, num_heads_k, num_heads_v)]
    q, k, v = qkv.split(widths, -1)
    q = RMS_NORM.reference(q, q_weight.repeat(num_heads_q), eps)
    k = RMS_NORM.reference(k, k_weight.repeat(num_heads_k), eps)
    q, k = ROTARY_EMBEDDING.reference(position_ids, q, k, head_dim, cos_sin_cache, is_neox)
    return torch.cat((q, k, v), -1)


def values_normed(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
                  cos_sin_cache, is_neox, position_ids):  # fmt: skip
    out = right(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
                cos_sin_cache, is_neox, position_ids)  # fmt: skip
    values = out[:, (num_heads_q + num_heads_k) * head_dim :].unflatten(-1, (-1, head_dim))
    values.copy_(RMS_NORM.reference(values, k_weight, eps))
    return out


def last_token_forgotten(qkv, *rest):
    out = right(qkv, *rest)
    out[-1:] = qkv[-1:]
    return out


def value_heads_as_many_as_key_heads(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, *rest):
    out = right(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, *rest)
    out[:, (num_heads_q + 2 * num_heads_k) * head_dim :] = 0
    return out


def returned_but_not_written(qkv, *rest):
    return right(qkv, *rest)


def written_but_not_declared(qkv, *rest):
    return qkv.copy_(right(qkv, *rest))


in_place = named(written_but_not_declared)
"""Right where it declares what it writes."""

rounded_once = named(
    lambda *args: right(
        *(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    ).to(args[0].dtype)
)


def mutant(name: str, fn: Any, kinds=VALUES, says: str = "", **settings: Any) -> Mutant:
    return Mutant(name, FUSED_QK_NORM_ROPE, fn, kinds, says, **settings)


MUTANTS = [
    mutant("the other style", changed(is_neox=lambda a: not a["is_neox"])),
    mutant("the other direction", changed(cos_sin_cache=other_direction)),
    mutant("the weights are swapped",
           changed(q_weight=lambda a: a["k_weight"], k_weight=lambda a: a["q_weight"])),
    mutant("one weight for both", changed(k_weight=lambda a: a["q_weight"])),
    mutant("a fixed eps", changed(eps=lambda a: 1e-6)),
    mutant("positions are counted, not read",
           changed(position_ids=lambda a: torch.arange(a["position_ids"].numel()))),
    mutant("rows must be contiguous", changed(qkv=as_if_contiguous)),
    mutant("it rotates before it norms", rotated_first),
    mutant("all heads are normed together", heads_normed_together),
    mutant("values are normed too", values_normed),
    mutant("the last token is forgotten", named(last_token_forgotten)),
    mutant("there are as many value heads as key heads", named(value_heads_as_many_as_key_heads)),
    mutant("a declared write does not happen", named(returned_but_not_written),
           (Kind.MISSING_WRITE,), "qkv is declared", settings=IN_PLACE),
    mutant("an undeclared write happens", in_place,
           (Kind.UNDECLARED_WRITE,), "qkv was written"),
]  # fmt: skip
