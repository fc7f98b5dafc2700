# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by torch_npu's `npu_mrope`.

It takes positions and vLLM's own table, turns a part of a head, and writes nothing. Its
neighbours do not do: `_npu_rotary_embedding` keeps the first table that a process shows it and
applies it to every later model, and `npu_apply_rotary_pos_emb` writes its arguments though its
schema does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ascend import backend
from .common import fits, tensor_reason

PLAIN = [0, 0, 0]
"""The mrope_section of positions with one row."""

SECTIONS = ((16, 24, 24),)
"""The others that are known to work; [16, 16, 0] is one that is refused on the device."""


def _step(dtype: torch.dtype) -> int:
    """What rotary_dim and head_size are multiples of."""
    return 16 if dtype is torch.float32 else 32


def _supports_layer(facts: Mapping[str, Any]) -> bool | str:
    rotary_dim, head_size = facts["rotary_dim"], facts["head_size"]
    if not 0 < rotary_dim <= head_size:
        return f"rotary_dim {rotary_dim} is not within 1 and head_size {head_size}"
    for name, size in (("rotary_dim", rotary_dim), ("head_size", head_size)):
        if size % 16:
            return f"{name} {size} is not a multiple of 16"
    return True


def supports_tensors(
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    tokens: int,
) -> bool | str:
    """The guard that both rotary ops have in common."""
    dtype, step = query.dtype, _step(query.dtype)
    if not fits(query):
        return tensor_reason(query)
    for name, size in (("rotary_dim", cos_sin_cache.shape[-1]), ("head_size", head_size)):
        if size % step:
            return f"{name} {size} is not a multiple of {step} ({dtype})"
    if cos_sin_cache.dtype is not dtype:
        return f"cos_sin_cache is {cos_sin_cache.dtype}, query is {dtype}"
    if cos_sin_cache.dim() != 2:
        return f"cos_sin_cache has shape {list(cos_sin_cache.shape)}"
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        if x.dtype is not dtype:
            return f"{name} is {x.dtype}, query is {dtype}"
        if x.dim() < 2 or x.shape[-1] % head_size or x.shape[:-1].numel() % max(tokens, 1):
            return f"{name} has shape {list(x.shape)} for {tokens} tokens"
    return True


def _supports(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> bool | str:
    return supports_tensors(query, key, head_size, cos_sin_cache, positions.numel())


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    section: list[int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call of `npu_mrope`; without a key its place is taken by the query's first head."""
    if not query.numel():
        return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)
    tokens = positions.shape[-1]
    rows = query.reshape(tokens, -1).contiguous()
    others = rows[:, :head_size] if key is None else key.reshape(tokens, -1)
    turned, turned_others = torch.ops.npu.npu_mrope(
        positions.contiguous(),
        rows,
        others.contiguous(),
        cos_sin_cache.contiguous(),
        head_size,
        mrope_section=section,
        rotary_mode="half" if is_neox else "interleave",
    )
    return turned.view(query.shape), None if key is None else turned_others.view(key.shape)


@backend.implements(supports=_supports, supports_layer=_supports_layer)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query, key: (tokens, heads * head_size) or (tokens, heads, head_size) -> new tensors."""
    return rotate(positions.flatten(), query, key, head_size, cos_sin_cache, is_neox, PLAIN)


def _supports_sections(facts: Mapping[str, Any]) -> bool | str:
    section = facts["mrope_section"]
    if facts["mrope_interleaved"]:
        return "sections in turns (mrope_interleaved)"
    if section is not None and tuple(section) not in SECTIONS:
        return f"mrope_section {list(section)} is not one of {list(map(list, SECTIONS))}"
    return _supports_layer(facts)


def _supports_three(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool = False,
) -> bool | str:
    return supports_tensors(query, key, head_size, cos_sin_cache, positions.shape[-1])


@backend.implements(supports=_supports_three, supports_layer=_supports_sections)
def mrotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """positions: (3, tokens) with sections, or (tokens,) -> new tensors."""
    section = PLAIN if positions.dim() == 1 else list(mrope_section or PLAIN)
    return rotate(positions, query, key, head_size, cos_sin_cache, is_neox, section)
