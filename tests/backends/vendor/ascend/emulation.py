# SPDX-License-Identifier: Apache-2.0
"""The bodies of torch_npu's norms, activations, rotary, cache and sampling operators.

Formulas and limits are those that its documentation gives. Everything is computed in float32 and
rounded once, as the kernels do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .harness import STATE, emulates, need

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
A2_A3 = ("A2", "A3")

# ------------------------------------------------------------------------------------ norms


def _rms(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    size = gamma.dim()
    need(x.shape[x.dim() - size :] == gamma.shape, "gamma is as the last dimensions of x")
    dims = tuple(range(x.dim() - size, x.dim()))
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(dtype), rstd


@emulates()
def npu_rms_norm(input, gamma, epsilon=1e-6):
    need(input.dtype in FLOATS, f"npu_rms_norm: dtype {input.dtype}")
    need(gamma.dtype == input.dtype, "npu_rms_norm: gamma has the dtype of x")
    need(2 <= input.dim() <= 8, "npu_rms_norm: 2 to 8 dimensions")
    return _rms(input, gamma, epsilon, input.dtype)


@emulates()
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    need(x1.dtype in FLOATS, f"npu_add_rms_norm: dtype {x1.dtype}")
    need(x1.dtype == x2.dtype == gamma.dtype, "npu_add_rms_norm: one dtype")
    need(x1.shape == x2.shape, "npu_add_rms_norm: one shape")
    total = x1 + x2
    y, rstd = _rms(total, gamma, epsilon, x1.dtype)
    return y, rstd, total


@emulates()
def npu_add_rms_norm_v2(x1, x2, gamma, epsilon=1e-6):
    need(STATE.soc in A2_A3, "npu_add_rms_norm_v2: A2 and A3")
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


# ------------------------------------------------------------------------------ activations


@emulates()
def npu_swiglu(input, dim=-1):
    need(input.dtype in FLOATS and 1 <= input.dim() <= 8, "npu_swiglu: dtype or rank")
    need(input.shape[dim] % 2 == 0, "npu_swiglu: an even dimension")
    if STATE.soc == "310P":
        need(input.shape[dim] % 32 == 0, "npu_swiglu, 310P: a multiple of 32")
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


@emulates()
def npu_clipped_swiglu(
    x, *, group_index=None, dim=-1, alpha=1.702, limit=7.0, bias=1.0, interleaved=True
):
    need(x.dim() > 1, "npu_clipped_swiglu: 2 dimensions or more")
    need(STATE.soc in A2_A3, "npu_clipped_swiglu: A2 and A3")
    need(group_index is None and dim in (-1, x.dim() - 1), "not emulated: groups, other dimensions")
    need(x.shape[-1] % 2 == 0, "npu_clipped_swiglu: an even dimension")
    values = x.float()
    gate, up = (values[..., ::2], values[..., 1::2]) if interleaved else values.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


@emulates()
def npu_silu(input):
    return F.silu(input.float()).to(input.dtype)


@emulates()
def npu_gelu(input, *, approximate="none"):
    need(approximate in ("none", "tanh"), "npu_gelu: approximate is none or tanh")
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)


@emulates()
def npu_fast_gelu(input):
    need(STATE.soc in A2_A3 or input.dtype is not torch.bfloat16, "npu_fast_gelu: bf16, A2 and A3")
    values = input.float()
    return (values * torch.sigmoid(1.702 * values)).to(input.dtype)


@emulates()
def npu_gelu_mul(input, *, approximate="none"):
    need(input.shape[-1] <= 1024, "npu_gelu_mul: a last dimension of 1024 at most")
    gate, up = input.float().chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(input.dtype)


# -------------------------------------------------------------------------------- attention


@emulates()
def npu_attention_update(lse, local_out, update_type):
    """By its documented formula, which gives NaN where every part is empty (-inf)."""
    need(STATE.soc in A2_A3, "npu_attention_update: A2 and A3")
    rows, size = local_out[0].shape
    need(len(lse) == len(local_out), "npu_attention_update: as many outputs as logsumexps")
    need(all(t.shape == (rows,) for t in lse), "npu_attention_update: lse has one dimension")
    need(all(t.dtype is torch.float32 for t in lse), "npu_attention_update: lse is float32")
    need(all(t.shape == (rows, size) for t in local_out), "npu_attention_update: one shape")
    need(len({t.dtype for t in local_out}) == 1, "npu_attention_update: one dtype")
    need(local_out[0].dtype in FLOATS, f"npu_attention_update: dtype {local_out[0].dtype}")
    largest = torch.stack(lse).amax(0)
    merged = largest + sum((part - largest).exp() for part in lse).log()
    total = sum(
        out.float() * (part - merged).exp()[:, None]
        for out, part in zip(local_out, lse, strict=True)
    )
    # Without update_type 1 the second output is not valid.
    return total.to(local_out[0].dtype), merged if update_type == 1 else torch.full_like(
        merged, 7.0
    )


# ----------------------------------------------------------------------------------- rotary


def _turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotate_rows(x, cos, sin, head_size, neox):
    """x: [tokens, heads * head_size]; cos, sin: [tokens, rotary_dim / 2], float32."""
    rotary_dim = 2 * cos.shape[-1]
    heads = x.float().reshape(x.shape[0], x.shape[1] // head_size, head_size).clone()
    part = heads[..., :rotary_dim]
    wide = (lambda t: torch.cat((t, t), -1)) if neox else (lambda t: t.repeat_interleave(2, -1))
    cos, sin = wide(cos)[:, None], wide(sin)[:, None]
    mode = "half" if neox else "interleave"
    heads[..., :rotary_dim] = part * cos + _turned(part, mode) * sin
    return heads.reshape(x.shape).to(x.dtype)


SECTIONS = ([0, 0, 0], [16, 24, 24])


@emulates()
def npu_mrope(
    positions,
    query,
    key,
    cos_sin_cache,
    head_size,
    *,
    mrope_section=None,
    rotary_mode="half",
    cache_mode="default",
):
    tensors = (query, key, cos_sin_cache)
    need(STATE.soc in A2_A3, "npu_mrope: A2 and A3")
    need(all(t.dim() == 2 for t in tensors), "npu_mrope: query, key and cache have 2 dimensions")
    need(positions.dtype in (torch.int32, torch.int64), "npu_mrope: positions are integers")
    need(query.dtype == key.dtype == cos_sin_cache.dtype, "npu_mrope: one dtype")
    rotary_dim, step = cos_sin_cache.shape[1], 16 if query.dtype == torch.float32 else 32
    need(rotary_dim % step == 0 and head_size % step == 0, f"npu_mrope: multiples of {step}")
    need(rotary_dim <= head_size, "npu_mrope: rotary_dim is head_size at most")
    need(cache_mode in (None, "default"), "not emulated: another cache_mode")
    section = list(mrope_section or [0, 0, 0])
    need(section in SECTIONS, f"npu_mrope: mrope_section {section} is not one that it has")
    if positions.dim() == 2:
        need(sum(section) == rotary_dim // 2, "npu_mrope: the sections make up rotary_dim / 2")
        three = cos_sin_cache.float()[positions]
        picked = [
            torch.cat([m[i] for i, m in enumerate(half.split(section, -1))], -1)
            for half in three.chunk(2, -1)
        ]
        cos, sin = picked
    else:
        need(section == [0, 0, 0], "npu_mrope: sections go with positions of three rows")
        cos, sin = cos_sin_cache.float()[positions].chunk(2, -1)
    neox = rotary_mode == "half"  # any other text is the other style
    return tuple(_rotate_rows(t, cos, sin, head_size, neox) for t in (query, key))


@emulates()
def npu_apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    """Writes query and key, which the schema does not say, and returns the same tensors."""
    rank = 3 if layout == "TND" else 4
    tensors = (query, key, cos, sin)
    need(layout in ("BSND", "BSH", "TND"), f"layout {layout!r}")
    need(all(t.dim() == rank for t in tensors), f"{layout}: {rank} dimensions")
    need(len({t.dtype for t in tensors}) == 1, "npu_apply_rotary_pos_emb: one dtype")
    need(rotary_mode == "half", "npu_apply_rotary_pos_emb: half only")
    size = query.shape[-1]
    need(size in (64, 128) and cos.shape[-1] == size, "a head of 64 or 128, as wide as cos")
    need(query.numel() > 0, "npu_apply_rotary_pos_emb: not empty")
    for t in (query, key):
        t.copy_(t.float() * cos.float() + _turned(t.float(), "half") * sin.float())
    return query, key


@emulates("atb")
def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Expands the first table that it sees into statics, and never looks at another."""
    need(query.dim() == key.dim() == 2, "_npu_rotary_embedding: [tokens, heads * head_size]")
    if STATE.rope_table is None:
        STATE.rope_table = cos_sin_cache.clone()
    table = STATE.rope_table
    need(table.shape[1] == head_size, "_npu_rotary_embedding: the whole head is turned")
    cos, sin = table.float()[positions.flatten()].chunk(2, -1)
    for t in (query, key):
        t.copy_(_rotate_rows(t, cos, sin, head_size, is_neox_style))


# ------------------------------------------------------------------------ cache and sampling


@emulates()
def npu_scatter_pa_kv_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    compress_lens=None,
    compress_seq_offsets=None,
    seq_lens=None,
    cache_mode="PA_NZ",
):
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    need(cache_mode == "Norm", f"cache_mode {cache_mode!r} is the NZ layout, not that of the cache")
    need(len({t.dtype for t in tensors[:4]}) == 1, "npu_scatter_pa_kv_cache: one dtype")
    need(key.dim() == 3 and key_cache.dim() == 4, "key has 3 dimensions, the cache 4")
    need(slot_mapping.dtype in (torch.int32, torch.int64), "slots are integers")
    slots = slot_mapping.long()
    count = key_cache.shape[0] * key_cache.shape[1]
    need(key.shape[0] == slots.numel(), "one slot for each token")
    need(bool(((slots >= 0) & (slots < count)).all()), f"slots are within 0 and {count}")
    # Documented as unique. Equal rows may race: whoever wins, the result is the same.
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1)[slots] = rows
        same = cache.flatten(0, 1)[slots].view(torch.uint8) == rows.view(torch.uint8)
        need(bool(same.all()), "a slot occurs once")


@emulates()
def npu_dynamic_quant(
    input,
    *,
    smooth_scales=None,
    group_index=None,
    dst_type=None,
    quant_mode="pertoken",
    dst_type_max=0.0,
):
    need(input.dtype in (torch.float16, torch.bfloat16), "npu_dynamic_quant: half precision")
    need(input.dim() >= 2, "npu_dynamic_quant: 2 dimensions or more")
    need(smooth_scales is None and group_index is None, "not emulated: smoothing, groups")
    need(quant_mode == "pertoken" and not dst_type_max, "not emulated: another mode")
    need(dst_type in (None, torch.int8, 1), "not emulated: another type")
    values = input.float()
    scale = values.abs().amax(-1) / 127
    steps = (values / scale.unsqueeze(-1)).nan_to_num(0.0)
    return steps.round().clamp(-128, 127).to(torch.int8), scale


@emulates()
def npu_top_k_top_p(logits, p=None, k=None):
    vocabulary = logits.shape[-1]
    need(logits.dim() == 2, "npu_top_k_top_p: 2 dimensions")
    need(p is not None or k is not None, "npu_top_k_top_p: p or k")
    need(p is None or p.dtype == logits.dtype, "npu_top_k_top_p: p has the dtype of logits")
    need(k is None or k.dtype == torch.int32, "npu_top_k_top_p: k is int32")
    most = min(1024, vocabulary)
    need(k is None or bool(((k >= 1) & (k <= most)).all()), f"k is within 1 and {most}")
    ordered, places = logits.sort(dim=-1, stable=True)
    if k is not None:
        least = ordered.gather(1, vocabulary - k.long()[:, None])
        ordered = ordered.masked_fill(ordered < least, float("-inf"))
    if p is not None:
        reached = ordered.float().softmax(-1).cumsum(-1)
        out = reached <= 1 - p.float()[:, None]
        out[:, -1] = False
        ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(ordered).scatter_(1, places, ordered)
