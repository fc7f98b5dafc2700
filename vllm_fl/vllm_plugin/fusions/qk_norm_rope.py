# SPDX-License-Identifier: Apache-2.0
"""Attention modules like Qwen3's: fused_qk_norm_rope does what q_norm, k_norm and rotary_emb do.

The projections and the attention are called as before, so quantized and LoRA layers, and caches of
any kind, see no difference. The norms and the rotary embedding are not called; where one of them
is watched by a forward hook, or is another object by now, the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...dispatch.binding import annotate
from ..layers.serve import ServedLayer
from .forms import QK_NORM_ROPE, forward_of, names_in

__all__ = ["BOUND", "FUSES", "OP", "Parts", "bound_forward", "facts", "parts_of", "refuses"]

OP = "fused_qk_norm_rope"

FUSES = {"q_norm": "rms_norm", "k_norm": "rms_norm", "rotary_emb": "rotary_embedding"}
"""What a form calls the layers that are fused, and the ops of these."""

BOUND = "_vllm_fl_qk_norm_rope"
"""Where a module has what its forward is bound to."""

_SIZES = ("q_size", "kv_size", "head_dim")


@dataclass(slots=True, eq=False)
class Parts:
    """An attention module that was recognised, and what its forward is bound to.

    Copied or pickled with its module it is None, and the copy has vLLM's own forward.

    Attributes:
        owner: the class that defines the module's forward.
        q_norm, k_norm, rotary: the layers that are fused.
        names: what the module calls them, the projections and the attention, by the names that
            the form gives them.
        heads: of query, key and value.
        head_dim: the size of a head.
        widths: heads * head_dim.
        watched: the forward hooks of those layers, and of the projection, whose output is written.
        fn: the bound function, or None where vLLM's own forward runs.
        winner: what implements it, for the notes of an exception.
    """

    owner: type
    q_norm: Any
    k_norm: Any
    rotary: Any
    names: Mapping[str, str]
    heads: tuple[int, int, int]
    head_dim: int
    widths: tuple[int, int, int]
    watched: tuple[Mapping[Any, Any], ...]
    fn: Callable[..., Any] | None = None
    winner: str | None = None

    @property
    def layers(self) -> dict[str, Any]:
        """The layers that are fused, by the names of `FUSES`."""
        return {"q_norm": self.q_norm, "k_norm": self.k_norm, "rotary_emb": self.rotary}

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


_Read = tuple[type, Mapping[str, str]] | str
"""The owner of a class's forward and the names in it, or why it is of no known form."""


def parts_of(module: Any, read: dict[type, _Read]) -> Parts | str | None:
    """What an attention module is made of; why one that looks alike is not known, or None for
    any other module.

    Args:
        read: the classes that were read already; it is added to.
    """
    children = module._modules
    alike = children.keys() >= FUSES.keys()
    if not alike and len(children) < len(FUSES):
        return None
    if type(module) not in read:
        read[type(module)] = _read(type(module))
    found = read[type(module)]
    if isinstance(found, str):
        return found if alike else None
    if "forward" in vars(module):
        return "somebody gave the instance a forward of its own"
    owner, names = found
    q_norm, k_norm, rotary = (children.get(names[name]) for name in FUSES)
    if q_norm is None or k_norm is None or rotary is None:
        return "it lacks q_norm, k_norm or rotary_emb"
    q_size, kv_size, head_dim = (getattr(module, names[n]) for n in _SIZES)
    watched = (q_norm, k_norm, rotary, children[names["qkv_proj"]])
    return Parts(
        owner,
        q_norm,
        k_norm,
        rotary,
        names,
        heads=(q_size // head_dim, kv_size // head_dim, kv_size // head_dim),
        head_dim=head_dim,
        widths=(q_size, kv_size, kv_size),
        watched=tuple(h for x in watched for h in (x._forward_pre_hooks, x._forward_hooks)),
    )


def _read(cls: type) -> _Read:
    found = forward_of(cls)
    if isinstance(found, str):
        return found
    owner, function = found
    names = names_in(function, QK_NORM_ROPE)
    if names is None:
        return f"the forward of {owner.__name__} is of no known form"
    return owner, names


def refuses(parts: Parts, records: Mapping[int, ServedLayer]) -> str | None:
    """Why a module that was recognised stays native, or None.

    Args:
        records: what was decided for each layer, by the layer's id.
    """
    for name, layer in parts.layers.items():
        kind = type(layer).__name__
        record = records.get(id(layer))
        if record is None or record.name != FUSES[name]:
            return f"its {name} is a {kind}, which {FUSES[name]} does not serve"
        if record.refused is not None:
            return f"its {name} is native: {record.refused}"
        if record.replaced:
            return f"somebody pointed the forward of its {name} elsewhere"
    q_norm, k_norm, rotary = parts.layers.values()
    for name, layer in (("q_norm", q_norm), ("k_norm", k_norm)):
        if not layer.has_weight or layer.variance_size_override is not None:
            return f"its {name} has no weight, or the variance of a part"
        if layer.weight.numel() != parts.head_dim:
            return f"its {name} has {layer.weight.numel()} weights for heads of {parts.head_dim}"
    if q_norm.variance_epsilon != k_norm.variance_epsilon:
        return f"q_norm adds {q_norm.variance_epsilon} and k_norm {k_norm.variance_epsilon}"
    if rotary.head_size != parts.head_dim:
        return f"its rotary_emb is for heads of {rotary.head_size}, not {parts.head_dim}"
    if any(parts.watched):
        return "q_norm, k_norm, rotary_emb or the projection has a forward hook"
    return None


def facts(parts: Parts) -> dict[str, Any]:
    """Those of the op."""
    return {
        **dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), parts.heads, strict=True)),
        "head_dim": parts.head_dim,
        "rotary_dim": parts.rotary.cos_sin_cache.shape[-1],
        "is_neox": parts.rotary.is_neox_style,
        "q_weight_dtype": parts.q_norm.weight.dtype,
        "k_weight_dtype": parts.k_norm.weight.dtype,
    }


def bound_forward(native: Callable[..., Any], names: Mapping[str, str]) -> Callable[..., Any]:
    """The forward of a class whose instances may be bound; the others run its own, `native`."""
    q_name, k_name, rotary_name = (names[name] for name in FUSES)
    projection, attention, last = (names[name] for name in ("qkv_proj", "attn", "o_proj"))

    @functools.wraps(native)
    def forward(self: Any, positions: Any, hidden_states: Any) -> Any:
        parts = self.__dict__.get(BOUND)
        children = self._modules
        if (
            parts is None
            or (fn := parts.fn) is None
            or any(parts.watched)
            or children[q_name] is not parts.q_norm
            or children[k_name] is not parts.k_norm
            or children[rotary_name] is not parts.rotary
        ):
            return native(self, positions, hidden_states)
        qkv, _ = children[projection](hidden_states)
        args = (
            qkv,
            *parts.heads,
            parts.head_dim,
            parts.q_norm.variance_epsilon,
            parts.q_norm.weight.data,
            parts.k_norm.weight.data,
            parts.rotary._match_cos_sin_cache_dtype(qkv),
            parts.rotary.is_neox_style,
            positions,
        )
        try:
            qkv = fn(*args)
        except Exception as error:
            annotate(error, OP, parts.winner, args, {})
            raise
        q, k, v = qkv.split(parts.widths, dim=-1)
        output, _ = children[last](children[attention](q, k, v))
        return output

    return forward
