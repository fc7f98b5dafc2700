# SPDX-License-Identifier: Apache-2.0
"""Eager or compiled: which of the two questions a layer asks, and how a graph gets the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..dispatch.binding import Binding
from ..dispatch.errors import DispatchError
from ..dispatch.policy import MODES
from ..ops import CONTRACTS
from ..ops.library import Entry, bind_name, define, operator_of

__all__ = [
    "COMPILED",
    "EAGER",
    "explicitly_off",
    "fused_by_vllm",
    "layer_mode",
    "mode_of",
    "opaque",
]

EAGER, COMPILED = MODES


def _current() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def layer_mode() -> str:
    """ "eager" or "compiled", from the configuration of the model that is being built."""
    return mode_of(_current())


def mode_of(vllm_config: Any) -> str:
    """ "eager" or "compiled".

    Compiled means that Dynamo will trace the layers' forwards; graphs captured without it
    (mode NONE) count as eager.
    """
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    return EAGER if mode in (None, CompilationMode.NONE) else COMPILED


def explicitly_off(layer_name: str) -> bool:
    """Whether `custom_ops` holds "-layer_name"."""
    return f"-{layer_name}" in _current().compilation_config.custom_ops


_NORM_FUSIONS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("fuse_norm_quant", lambda config: config.quant_config is not None),
    ("fuse_allreduce_rms", lambda config: config.parallel_config.tensor_parallel_size > 1),
    ("enable_sp", lambda config: config.parallel_config.tensor_parallel_size > 1),
    ("enable_qk_norm_rope_fusion", lambda config: True),
    ("fuse_qk_norm_rope_kvcache", lambda config: True),
)

_FUSIONS: Mapping[str, tuple[tuple[str, Callable[[Any], bool]], ...]] = {
    "rms_norm": _NORM_FUSIONS,
    "gemma_rms_norm": _NORM_FUSIONS,  # the same nodes, with another weight
    "rms_norm_gated": (("fuse_norm_quant", lambda config: config.quant_config is not None),),
    "silu_and_mul": (("fuse_act_quant", lambda config: config.quant_config is not None),),
    "rotary_embedding": (
        ("enable_qk_norm_rope_fusion", lambda config: True),
        ("fuse_rope_kvcache", lambda config: True),
        ("fuse_qk_norm_rope_kvcache", lambda config: True),
    ),
}
"""Layer to the fields of vLLM's PassConfig whose passes match its native nodes, and when such a
pass has anything to match."""


def fused_by_vllm(layer_name: str) -> str | None:
    """Why a layer should keep the nodes that vLLM's own fusion passes look for, or None.

    The passes exist where vLLM compiles piecewise, on platforms like CUDA.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return None
    config = _current()
    passes = config.compilation_config.pass_config
    for field, applies in _FUSIONS.get(layer_name, ()):
        if getattr(passes, field, None) and applies(config):  # a release may lack the field
            return f"vLLM's own fusion ({field}) matches the native form"
    return None


_INPLACE_OUTPUTS = {
    contract.name: tuple(
        contract.signature.parameter_names.index(name) for name in contract.signature.inplace
    )
    for contract in CONTRACTS
}


def opaque(
    binding: Binding, facts: Mapping[str, Any] | None, *, inplace: bool
) -> tuple[Entry, Callable[..., Any]]:
    """A binding as a function that a compiler sees as one node: `torch.ops.vllm_fl.<op>`, or what
    the winner's backend has for it.

    Args:
        facts: what the binding was made for; part of its name in the graph.
        inplace: the winner writes its arguments and the caller gave them up: the node is of
            the in-place form, which the compiler keeps free of copies.
    """
    contracts = {contract.name: contract for contract in CONTRACTS}
    if binding.op not in contracts:
        raise DispatchError(
            f"op '{binding.op}' has no contract, so a graph cannot hold it; with one: "
            f"{', '.join(contracts)}. Leave it native in compiled mode."
        )
    define(contracts[binding.op])
    said = ",".join(f"{name}={value}" for name, value in sorted((facts or {}).items()))
    entry = bind_name(binding, f"{said}{'!' if inplace else ''}")
    op, name = operator_of(entry, inplace=inplace), entry.name
    outputs = _INPLACE_OUTPUTS[binding.op]

    def one_output(*args: Any) -> Any:
        return op(*args, binding=name)

    def new_outputs(*args: Any) -> tuple[Any, ...]:
        results = op(*args, binding=name)
        # A torch op cannot return None: for an argument that is not there it has no elements.
        return tuple(None if args[i] is None else out for i, out in zip(outputs, results))  # noqa: B905  (Dynamo traces it; the op's schema fixes both lengths)

    def written_outputs(*args: Any) -> tuple[Any, ...]:
        op(*args, binding=name)
        return tuple(args[i] for i in outputs)

    if inplace:
        return entry, written_outputs
    return entry, new_outputs if outputs else one_output
