# SPDX-License-Identifier: Apache-2.0
"""The layers that vllm_fl serves, and the kernels of vLLM that it can serve them with."""

from __future__ import annotations

from .checks import (
    Built,
    Decorated,
    Does,
    Entry,
    IsA,
    MentionedOnlyIn,
    OnlySince,
    Sets,
    Takes,
)
from .served import DispatchesTo, ForwardsTake, Known, Subclasses
from .surface_activations import ACTIVATIONS

__all__ = ["LAYERS"]

CUSTOM_OP = "vllm.model_executor.custom_op:CustomOp"
HW_CUSTOM_OP = "vllm.model_executor.hw_agnostic.custom_op:CustomOp"
NORM = "vllm.model_executor.layers.layernorm:RMSNorm"
HW_NORM = "vllm.model_executor.hw_agnostic.layers.layernorm:RMSNorm"
SILU = "vllm.model_executor.layers.activation:SiluAndMul"
HW_SILU = "vllm.model_executor.hw_agnostic.layers.activation:SiluAndMul"
GELU = "vllm.model_executor.layers.activation:GeluAndMul"
GEMMA = "vllm.model_executor.layers.layernorm:GemmaRMSNorm"
GATED = "vllm.model_executor.layers.layernorm:RMSNormGated"
LAYER_NORM = "vllm.model_executor.layers.layernorm:LayerNorm"
LAYER_NORM_SINCE = "0.32.0"
ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
MROTARY = "vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding"
HW_SINCE = "0.28.0"

NORM_FACTS = ("hidden_size", "variance_epsilon", "variance_size_override", "has_weight", "weight")
ROTARY_FACTS = ("head_size", "rotary_dim", "is_neox_style", "use_flashinfer", "use_aiter",
                "cos_sin_cache")  # fmt: skip

KERNELS = tuple(
    Entry(f"vllm._custom_ops:{name}", "the kernel takes these, in this order", (Does(code),))
    for name, code in (
        ("rms_norm", "torch.ops._C.rms_norm(out, input, weight, epsilon)"),
        ("fused_add_rms_norm", "torch.ops._C.fused_add_rms_norm(input, residual, weight, epsilon)"),
        (
            "rotary_embedding",
            "torch.ops._C.rotary_embedding("
            "positions, query, key, head_size, cos_sin_cache, is_neox)",
        ),
    )
)


def _custom_op(path: str, since: str | None, dispatched: tuple[str, ...]) -> tuple[Entry, ...]:
    return (
        Entry(
            f"{path}.__init__",
            "the forward that vLLM chose is kept in the instance, where it is replaced",
            (
                Sets(("_enforce_enable", "_forward_method")),
                Does("self.dispatch_forward(compile_native=compile_native)"),
            ),
            since,
        ),
        Entry(
            f"{path}.forward",
            "calls what stands there",
            (Takes("*args, **kwargs"), Does("return self._forward_method(*args, **kwargs)")),
            since,
        ),
        Entry(
            f"{path}.dispatch_forward",
            "what it can return is what a subclass can have of its own; the rule for `enabled`",
            (
                DispatchesTo(dispatched),
                Does("self._enforce_enable or self.enabled()"),
            ),
            since,
        ),
        Entry(f"{path}.enabled", "whether custom_ops lets it run", (Takes(""),), since),
    )


def _rotary(
    name: str,
    module: str,
    becomes: str = "served",
    *,
    since: str | None = None,
    gone: str | None = None,
) -> Known:
    path = f"vllm.model_executor.layers.rotary_embedding.{module}:{name}"
    return Known(path, becomes, since, gone)


OWN = "own forward_native"

ROTARIES = (
    _rotary("BailingMRotaryEmbedding", "bailing_mrope", OWN, since="0.30.0"),
    _rotary("DeepseekScalingRotaryEmbedding", "deepseek_scaling_rope", OWN),
    _rotary("DeepseekV4ScalingRotaryEmbedding", "deepseek_scaling_rope", OWN),
    _rotary("DynamicNTKAlphaRotaryEmbedding", "dynamic_ntk_alpha_rope"),
    _rotary("DynamicNTKScalingRotaryEmbedding", "dynamic_ntk_scaling_rope"),
    _rotary("Ernie4_5_VLRotaryEmbedding", "ernie45_vl_rope", OWN),
    _rotary("FourierRotaryEmbedding", "fope", OWN),
    _rotary("Gemma4RotaryEmbedding", "gemma4_rope"),
    _rotary("LinearScalingRotaryEmbedding", "linear_scaling_rope"),
    _rotary("Llama3RotaryEmbedding", "llama3_rope"),
    _rotary("Llama4VisionRotaryEmbedding", "llama4_vision_rope", OWN),
    _rotary("MRotaryEmbedding", "mrope", OWN),
    _rotary("MRotaryEmbeddingInterleaved", "mrope_interleaved", OWN),
    _rotary("NTKScalingRotaryEmbedding", "ntk_scaling_rope"),
    _rotary("TeleChat3RoPEScaledRotaryEmbedding", "telechat3_scaling_rope", gone="0.30.0"),
    _rotary("XDRotaryEmbedding", "xdrope", OWN, gone="0.30.0"),
    _rotary("YaRNScalingRotaryEmbedding", "yarn_scaling_rope"),
)

NORMS = (
    Entry(
        GEMMA,
        "served; its subclasses are those that are known",
        (
            IsA(CUSTOM_OP),
            Decorated("CustomOp.register('gemma_rms_norm')"),
            ForwardsTake("x, residual=None"),
            Subclasses(
                (
                    Known(
                        "vllm.model_executor.models.transformers.fusers.rms_norm:"
                        "TPAwareGemmaRMSNorm"
                    ),
                ),
            ),
        ),
    ),
    Entry(
        f"{GEMMA}.__init__",
        "wrapped; its facts, and the arguments of the op",
        (Sets(("weight", "variance_epsilon")),),
    ),
    Entry(
        f"{GEMMA}.forward_native",
        "the op's formula; leaves x and the residual as they are, so another implementation must",
        (
            Does("self.weight.float() + 1.0"),
            Does("ir.ops.rms_norm(x, weight, self.variance_epsilon)"),
            Does("ir.ops.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)"),
        ),
    ),
    Entry(f"{GEMMA}.forward_cuda", "the same", (Does("self.forward_native(x, residual)"),)),
    Entry(
        GATED,
        "served; nobody inherits from it (others of its name do have heirs)",
        (
            IsA(CUSTOM_OP),
            Decorated("CustomOp.register('rms_norm_gated')"),
            ForwardsTake("x, z=None"),
            Subclasses(),
        ),
    ),
    Entry(
        f"{GATED}.__init__",
        "wrapped; its facts, and the arguments of the op",
        (Sets(("eps", "activation", "weight", "group_size", "norm_before_gate")),),
    ),
    Entry(
        f"{GATED}.forward_static",
        "the op's formula",
        (
            Does("x = x.float()"),
            Does("activation in ['silu', 'sigmoid', 'swish']"),
            Does("F.sigmoid if activation == 'sigmoid' else F.silu"),
            Does("x * torch.rsqrt(variance + epsilon)"),
            Does("out = out * act_fn(z)"),
            Does("return out.to(orig_dtype)"),
        ),
    ),
    Entry(
        LAYER_NORM,
        "served where it is a CustomOp; its __init__ is wrapped, and nobody inherits from it",
        tuple(
            OnlySince(LAYER_NORM_SINCE, check, "a plain module, left alone")
            for check in (
                IsA(CUSTOM_OP),
                Decorated("CustomOp.register('layer_norm')"),
                ForwardsTake("x"),
                Subclasses(),
            )
        ),
    ),
    Entry(
        f"{LAYER_NORM}.__init__",
        "its facts, and the arguments of the op",
        (
            OnlySince(
                LAYER_NORM_SINCE,
                Sets(("normalized_shape", "eps", "weight", "bias")),
                "a plain module, left alone",
            ),
        ),
    ),
    Entry(
        f"{LAYER_NORM}.forward_native",
        "the op's formula",
        (
            Does(
                "F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)",
            ),
        ),
        LAYER_NORM_SINCE,
    ),
    Entry(
        f"{LAYER_NORM}._compute_dtype",
        "the wider dtype of the two",
        (Does("torch.promote_types(x.dtype, self.weight.dtype)"),),
        LAYER_NORM_SINCE,
    ),
)

MROTARIES = (
    Entry(
        MROTARY,
        "served; its __init__ is wrapped, and its subclasses are those that are known",
        (
            IsA(f"{ROTARY}Base"),
            Built(),
            ForwardsTake("positions, query, key=None, offsets=None"),
            Subclasses(
                (
                    _rotary("BailingMRotaryEmbedding", "bailing_mrope", OWN, since="0.30.0"),
                    _rotary("Ernie4_5_VLRotaryEmbedding", "ernie45_vl_rope", OWN),
                    _rotary("MRotaryEmbeddingInterleaved", "mrope_interleaved", "own forward"),
                ),
                once=("use_flashinfer", "use_aiter"),
            ),
        ),
    ),
    Entry(
        f"{MROTARY}.__init__",
        "its facts, and the arguments of the op",
        (Sets(("mrope_section", "mrope_interleaved")),),
    ),
    Entry(
        f"{MROTARY}.forward_native",
        "the op's formula; a key is needed, and sections for positions of two dimensions",
        (
            Does("assert key is not None"),
            Does("assert self.mrope_section"),
            Does("cos_sin_cache[positions]"),
            Does("apply_interleaved_rope(cos, self.mrope_section)"),
            Does("cos.split(self.mrope_section, dim=-1)"),
        ),
    ),
    Entry(
        "vllm.model_executor.layers.rotary_embedding.mrope:triton_mrope",
        "writes query and key, so another implementation may",
        (Does("return (q, k)"),),
    ),
)

LAYERS: tuple[Entry, ...] = (
    *_custom_op(CUSTOM_OP, None, ("cpu", "cuda", "hip", "native", "oot", "tpu", "xpu")),
    *_custom_op(HW_CUSTOM_OP, HW_SINCE, ("native", "oot")),
    Entry(
        CUSTOM_OP,
        "nothing else replaces the forward of a layer that is served",
        (
            MentionedOnlyIn(
                "_forward_method",
                (
                    "vllm/model_executor/custom_op.py",
                    "vllm/model_executor/hw_agnostic/custom_op.py",
                    # In their own __init__, which has ended when a layer is served.
                    "vllm/model_executor/layers/activation.py",
                    "vllm/model_executor/layers/attention/static_sink_attention.py",
                    "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
                ),
            ),
        ),
    ),
    Entry(
        NORM,
        "served; its subclasses are those that are known",
        (
            IsA(CUSTOM_OP),
            Decorated("CustomOp.register('rms_norm')"),
            ForwardsTake("x, residual=None"),
            Subclasses(
                (
                    Known("vllm.model_executor.models.transformers.fusers.rms_norm:TPAwareRMSNorm"),
                    Known(
                        "vllm.model_executor.models.k2_horizon:K2HorizonRMSNorm",
                        "own forward",
                        since="0.30.0",
                    ),
                ),
            ),
        ),
    ),
    Entry(
        f"{NORM}.__init__",
        "wrapped; its facts, and the arguments of the op",
        (
            Sets(NORM_FACTS),
            # has_weight is read for both: nobody may set them apart.
            Does("self.pass_weight = self.has_weight"),
            Does("self.pass_weight_add = self.has_weight"),
            MentionedOnlyIn("pass_weight", ("vllm/model_executor/layers/layernorm.py",)),
        ),
    ),
    Entry(
        f"{NORM}.forward_native",
        "may write x and the residual, so another implementation may",
        (Does("ir.ops.fused_add_rms_norm.maybe_inplace"),),
    ),
    Entry(
        HW_NORM,
        "served; its subclasses are those that are known",
        (
            IsA(HW_CUSTOM_OP),
            Decorated("CustomOp.register('rms_norm')"),
            ForwardsTake("x, residual=None"),
            Subclasses(),
        ),
        HW_SINCE,
    ),
    Entry(
        f"{HW_NORM}.__init__",
        "wrapped; its facts, and the arguments of the op",
        (Sets(NORM_FACTS),),
        HW_SINCE,
    ),
    Entry(
        f"{HW_NORM}._fused_add_rms_norm",
        "leaves x and the residual as they are, so another implementation must",
        (
            Does("x = x + x_residual.to(torch.float32)"),
            Does("return (x.to(orig_dtype), x_residual)"),
        ),
        HW_SINCE,
    ),
    Entry(
        "vllm.model_executor.models.transformers.layers:_resolve",
        "the Transformers models take their norm from one of the two modules",
        (Does("importlib.import_module(_)"),),
        HW_SINCE,
    ),
    *(
        Entry(
            path,
            "served; its __init__ is wrapped, and its subclasses are those that are known",
            (
                IsA(op),
                Decorated(f"CustomOp.register('{name}')"),
                Built(),
                ForwardsTake("x"),
                Subclasses(),
                *map(Does, kernels),
            ),
            since,
        )
        for path, op, name, kernels, since in (
            (
                SILU,
                CUSTOM_OP,
                "silu_and_mul",
                ("torch.ops._C.silu_and_mul", "self.op(out, x)"),
                None,
            ),
            (
                GELU,
                CUSTOM_OP,
                "gelu_and_mul",
                ("torch.ops._C.gelu_and_mul", "torch.ops._C.gelu_tanh_and_mul", "self.op(out, x)"),
                None,
            ),
            (HW_SILU, HW_CUSTOM_OP, "silu_and_mul", (), HW_SINCE),
        )
    ),
    Entry(
        f"{GELU}.__init__",
        "wrapped; the op's argument, which is one of two",
        (Sets(("approximate",)), Does("approximate not in ('none', 'tanh')")),
    ),
    Entry(
        ROTARY,
        "served, and so are subclasses that keep its forwards",
        (IsA(f"{ROTARY}Base"), Built(), ForwardsTake("positions, query, key=None")),
    ),
    Entry(
        f"{ROTARY}Base",
        "its __init__ is wrapped, and its subclasses are those that are known",
        (
            IsA(CUSTOM_OP),
            Decorated("CustomOp.register('rotary_embedding')"),
            Subclasses(ROTARIES, served=ROTARY, once=("use_flashinfer", "use_aiter")),
        ),
    ),
    Entry(
        f"{ROTARY}Base.__init__",
        "wrapped; its facts, and the arguments of the op",
        (Sets(ROTARY_FACTS),),
    ),
    *(
        Entry(
            f"{ROTARY}.{name}",
            "writes query and key, so another implementation may",
            (
                Does(
                    "ops.rotary_embedding(positions, query, key, self.head_size, cos_sin_cache, "
                    "self.is_neox_style)"
                ),
            ),
        )
        for name in ("forward_cpu", "forward_cuda")
    ),
    Entry(
        f"{ROTARY}._match_cos_sin_cache_dtype",
        "the cache in the query's dtype and on its device",
        (Takes("query"), Does("return cos_sin_cache")),
    ),
    *NORMS,
    *MROTARIES,
    *ACTIVATIONS,
    *KERNELS,
)
