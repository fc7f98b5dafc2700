# SPDX-License-Identifier: Apache-2.0
"""Attention modules as vLLM's models have them, with plain projections and an attention that only
mixes what it is given: what they compute shows every bit of query, key and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Projection(nn.Module):
    """A linear layer that returns a pair, like vLLM's parallel ones."""

    def __init__(self, size_in: int, size_out: int, pad: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in), requires_grad=False)
        self.pad = pad

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = x @ self.weight.T
        if self.pad:
            out = torch.cat((out, out[:, : self.pad]), dim=-1)[:, : out.shape[1]]
        return out, None


class Mixture(nn.Module):
    """In place of an attention: query, key and value side by side."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat((q, k, v), dim=-1)


class Base(nn.Module):
    """What the modules below have in common; `layers` builds vLLM's."""

    def __init__(
        self,
        layers: Any,
        hidden: int = 48,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        pad: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_size, self.kv_size = heads * head_dim, kv_heads * head_dim
        width = self.q_size + 2 * self.kv_size
        self.qkv_proj = Projection(hidden, width, pad)
        self.attn = Mixture()
        self.o_proj = Projection(width, hidden)
        self.q_norm, self.k_norm, self.rotary_emb = layers(head_dim, **settings)
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data.copy_(
                torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                + (parameter.dim() == 1)
            )


class Qwen3Like(Base):
    """As vLLM writes Qwen3Attention."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """Said in other words."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        # Add qk-norm
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q_by_head = self.q_norm(q_by_head)
        q = q_by_head.view(q.shape)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
        k_by_head = self.k_norm(k_by_head)
        k = k_by_head.view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class OtherNames(Base):
    """The same, with names of its own for all but the parameters."""

    def __init__(self, layers: Any, **settings: Any) -> None:
        super().__init__(layers, **settings)
        self.size_of_query, self.size_of_key, self.dim = self.q_size, self.kv_size, self.head_dim
        for name, old in (
            ("w_in", "qkv_proj"),
            ("w_out", "o_proj"),
            ("mix", "attn"),
            ("norm_q", "q_norm"),
            ("norm_k", "k_norm"),
            ("rope", "rotary_emb"),
        ):
            setattr(self, name, getattr(self, old))
            delattr(self, old)

    def forward(self, positions, hidden_states):
        x, _none = self.w_in(hidden_states)
        a, b, c = x.split([self.size_of_query, self.size_of_key, self.size_of_key], dim=-1)
        heads = a.view(*a.shape[:-1], a.shape[-1] // self.dim, self.dim)
        heads = self.norm_q(heads)
        a = heads.view(a.shape)
        others = b.view(*b.shape[:-1], b.shape[-1] // self.dim, self.dim)
        others = self.norm_k(others)
        b = others.view(b.shape)
        a, b = self.rope(positions, a, b)
        mixed = self.mix(a, b, c)
        out, _none = self.w_out(mixed)
        return out


class ApertusLike(Base):
    """As vLLM writes ApertusAttention."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view_as(q)
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim)).view_as(k)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class Inherits(Qwen3Like):
    """A subclass without a forward of its own."""


class Overrides(Qwen3Like):
    """A subclass with one."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(positions, hidden_states)


class ScalesValues(Base):
    """One statement more than the form."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q_by_head = self.q_norm(q_by_head)
        q = q_by_head.view(q.shape)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
        k_by_head = self.k_norm(k_by_head)
        k = k_by_head.view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        v = 2 * v
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class NormsKeyLikeQuery(Base):
    """The form but for one name: the norm of the query, twice."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q_by_head = self.q_norm(q_by_head)
        q = q_by_head.view(q.shape)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
        k_by_head = self.q_norm(k_by_head)
        k = k_by_head.view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class RotatesFirst(Base):
    """The same statements in another order."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view_as(q)
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim)).view_as(k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class NamesItsParameters(Base):
    """Callers give its arguments by other names."""

    def forward(self, position_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view_as(q)
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim)).view_as(k)
        q, k = self.rotary_emb(position_ids, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class Model(nn.Module):
    """Some of them, one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = hidden_states + layer(positions=positions, hidden_states=hidden_states)
        return hidden_states
