# SPDX-License-Identifier: Apache-2.0
"""The norms of query and key and their rotary embedding by vLLM's CUDA kernel, in place.

It exists for half precision and heads of 64, 128 and 256, takes the whole projection contiguous
and nothing of another dtype, and raises otherwise. A warp holds a head, and turns it by exchanging
values between lanes: that a part of a head comes out right was not measured, so it is refused. How
many heads a warp takes follows from the number of tokens, so batch invariance is not claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cuda import backend
from .common import ALIGNMENT, apart, fits, short, tensor_reason

HEAD_DIMS = (64, 128, 256)


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    head_dim, rotary_dim = facts["head_dim"], facts["rotary_dim"]
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if rotary_dim != head_dim:
        return f"rotary_dim {rotary_dim} is not the whole head of {head_dim}"
    if not (facts["num_heads_q"] and facts["num_heads_k"]):
        return "there are no heads of query or key"
    if facts["q_weight_dtype"] is not facts["k_weight_dtype"]:
        return "q_weight and k_weight have two dtypes"
    return True


def _supports(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> bool | str:
    if not fits(qkv):
        return tensor_reason(qkv)
    dtype = qkv.dtype
    if dtype is torch.float32:
        return "qkv is float32, and the kernel is for half precision"
    of_qkv = {"q_weight": q_weight, "k_weight": k_weight, "cos_sin_cache": cos_sin_cache}
    elsewhere = apart(qkv, **of_qkv, position_ids=position_ids)
    if elsewhere is not None:
        return elsewhere
    for name, x in of_qkv.items():
        if x.dtype is not dtype:
            return f"{name} is {short(x.dtype)}, qkv is {short(dtype)}"
    width = (num_heads_q + num_heads_k + num_heads_v) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        return f"qkv has shape {list(qkv.shape)}, its heads have {width} elements"
    tokens = qkv.shape[0]
    if not tokens:
        return "there are no tokens: the launch would be empty, which CUDA refuses"
    if position_ids.dtype is not torch.int64:
        return f"position_ids are {short(position_ids.dtype)}, not int64"
    if position_ids.shape != (tokens,):
        return f"position_ids have shape {list(position_ids.shape)} for {tokens} tokens"
    for name in ("q_weight", "k_weight"):
        if of_qkv[name].shape != (head_dim,):
            return f"{name} has shape {list(of_qkv[name].shape)}, a head has {head_dim} elements"
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != head_dim:
        return f"cos_sin_cache has shape {list(cos_sin_cache.shape)} for heads of {head_dim}"
    for name, x in {"qkv": qkv, **of_qkv, "position_ids": position_ids}.items():
        if not x.is_contiguous():
            return f"{name} is not contiguous"
    return True


@backend.calling("_C.fused_qk_norm_rope").implements(
    supports=_supports, supports_layer=_supports_layer, mutates=("qkv",)
)
def fused_qk_norm_rope(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """In place on qkv: (tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim).

    Vectors are read as such, so what lies at an odd address is copied, there and back."""
    q, k, cache = (
        x.clone() if x.data_ptr() % ALIGNMENT else x for x in (q_weight, k_weight, cos_sin_cache)
    )
    out = qkv.clone() if qkv.data_ptr() % ALIGNMENT else qkv
    torch.ops._C.fused_qk_norm_rope(
        out,
        num_heads_q,
        num_heads_k,
        num_heads_v,
        head_dim,
        eps,
        q,
        k,
        cache,
        is_neox,
        position_ids,
    )
    return qkv if out is qkv else qkv.copy_(out)
