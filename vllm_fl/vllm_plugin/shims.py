# SPDX-License-Identifier: Apache-2.0
"""What vLLM expects of its compiled extension, and finds missing without it.

Four things, each put in place only where the real one is absent, each listed with its reason:

- views of pinned host memory on the device (the second model runner's buffers);
- `_C::weak_ref_tensor` (the piecewise graphs);
- Triton's experts for layers of experts (`platform_experts`);
- schemas of `_C` operators that vLLM's passes name when they are imported, or when they meet an
  operator that writes into its arguments. They get no kernel: a call still fails, as it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from . import hooks, platform_experts

__all__ = [
    "Shim", "States", "install", "installed", "survey", "uninstall", "view_on_device", "weak_ref",
]  # fmt: skip

States = Literal["needed", "not needed", "in place"]

_SCHEMAS = (
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, "
    "int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
    "bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, "
    "int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
    "Tensor? scale_ub) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, "
    "Tensor weight, Tensor scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, "
    "Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, "
    "float epsilon, Tensor? scale_ub, Tensor!? residual, int group_size, "
    "bool is_scale_transposed) -> ()",
)

_VIEW = "get_accelerator_view_from_cpu_tensor"
_EXPERTS = "select_unquantized_moe_backend"
_IMPORTERS = (
    "vllm.utils.torch_utils",
    "vllm.v1.worker.gpu.buffer_utils",
    "vllm.model_executor.model_loader.utils",
    "vllm.model_executor.offloader.uva",
)


@dataclass(frozen=True, slots=True)
class Shim:
    """One stand-in: what it stands for, and who needs it."""

    name: str
    purpose: str


_installed: dict[str, Shim] = {}
_viewed: list[torch.Tensor] = []
_library: torch.library.Library | None = None


def installed() -> tuple[Shim, ...]:
    """The stand-ins of this process."""
    return tuple(_installed.values())


_SCHEMA_NAMES = tuple(schema.partition("(")[0] for schema in _SCHEMAS)


def survey(platform: str, *, ours: bool) -> list[dict[str, str]]:
    """Each stand-in: name, state (one of `States`) and reason.

    Args:
        platform: the name of vLLM's platform in this process.
        ours: whether that is PlatformFL.
    """
    absent = [name for name in _SCHEMA_NAMES if not _is_real(name)]
    given = [name for name in absent if f"_C::{name} (schema)" in _installed]
    states: list[tuple[str, States, str]] = [
        (
            "schemas of _C",
            _state(real=not absent, ours=len(given) == len(absent) > 0),
            f"vLLM's compiler passes name them: {', '.join(absent)}"
            if absent
            else "vLLM's extension has them",
        ),
        (
            "_C::weak_ref_tensor",
            _state(real=_is_real("weak_ref_tensor"), ours="_C::weak_ref_tensor" in _installed),
            "vLLM's extension has it"
            if _is_real("weak_ref_tensor")
            else "vLLM's piecewise graphs keep outputs without owning them",
        ),
        (
            _VIEW,
            _state(real=False, ours=_VIEW in _installed),
            "vLLM's second model runner shares pinned buffers with the device, and vLLM's own "
            "function knows its own platforms only",
        ),
        (
            "Triton's experts",
            _state(real=False, ours=_EXPERTS in _installed),
            "vLLM leaves layers of experts without any on a platform out of its tree",
        ),
        (
            "the worker's memory pool",
            "in place",
            "vLLM's asks for the allocator of sleep mode, a part of its extension; ours is none",
        ),
    ]
    if not ours:
        why = f"vLLM's platform here is {platform}"
        states = [(name, "not needed", why) for name, _, _ in states]
    return [{"name": n, "state": state, "reason": reason} for n, state, reason in states]


def _is_real(name: str) -> bool:
    """Whether vLLM's extension itself has an operator."""
    ours = f"_C::{name}" in _installed or f"_C::{name} (schema)" in _installed
    return hasattr(torch.ops._C, name) and not ours


def _state(*, real: bool, ours: bool) -> States:
    return "in place" if ours else "not needed" if real else "needed"


def install() -> None:
    """Put in place what is missing. A second time changes nothing."""
    global _library
    if _library is None:
        _library = torch.library.Library("_C", "FRAGMENT")
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _library.define(schema)
            _note(f"_C::{name} (schema)", "vLLM's compiler passes name it")
    if not hasattr(torch.ops._C, "weak_ref_tensor"):
        _library.define("weak_ref_tensor(Tensor input) -> Tensor")
        _library.impl("weak_ref_tensor", weak_ref, "CompositeExplicitAutograd")
        _note("_C::weak_ref_tensor", "vLLM's piecewise graphs keep outputs without owning them")
    platform_experts.await_method()
    _note(_EXPERTS, "vLLM has no experts for platforms out of its tree")
    for module in _IMPORTERS:
        hooks.when_imported(module, _give_view)
    _note(_VIEW, "vLLM's second model runner shares pinned buffers with the device")


def _note(name: str, purpose: str) -> None:
    _installed.setdefault(name, Shim(name, purpose))


def _give_view(module: ModuleType) -> None:
    if hasattr(module, _VIEW):
        purpose = "views of host memory, without vLLM's extension"
        hooks.install(module, _VIEW, lambda original: view_on_device, purpose=purpose)


def _at(address: int, device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """A tensor on memory that somebody else owns, with the sizes and strides of `like`."""
    size = like.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=like.dtype, device=device).set_(
        storage, like.storage_offset(), like.size(), like.stride()
    )


def view_on_device(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """A pinned host tensor as the device sees it, through unified virtual addresses.

    The tensor is kept for the life of the process, because the view does not own its memory, and
    vLLM keeps nothing but the view of a weight that it offloads. It makes views of offloaded
    weights and of an engine's buffers: who builds engine after engine in one process keeps the
    pinned memory of each.

    Raises:
        ValueError: the tensor is not pinned.
    """
    from vllm.platforms import current_platform

    if not cpu_tensor.numel():  # there is nothing to share, and nothing of it is pinned
        return torch.empty_like(cpu_tensor, device=current_platform.device_type)
    if not cpu_tensor.is_pinned():
        raise ValueError(
            "vllm_fl: a view on the device needs pinned memory, found a pageable tensor of shape "
            f"{list(cpu_tensor.shape)}; allocate it with pin_memory=True"
        )
    module = getattr(torch, current_platform.device_type)
    device = torch.device(current_platform.device_type, module.current_device())
    _viewed.append(cpu_tensor)
    return _at(cpu_tensor.untyped_storage().data_ptr(), device, cpu_tensor)


def weak_ref(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a share in owning it."""
    return _at(tensor.untyped_storage().data_ptr(), tensor.device, tensor)


def uninstall() -> None:
    """Forget the operators that were defined here (hooks are taken back by `hooks`)."""
    global _library
    _library = None
    _installed.clear()
