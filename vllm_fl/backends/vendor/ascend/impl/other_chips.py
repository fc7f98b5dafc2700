# SPDX-License-Identifier: Apache-2.0
"""The 310P and the A5: fewer operators than on A2 and A3.

What is served is what vllm-ascend runs there by torch_npu. The fused norm is the one that writes
nothing, because the other is only known on A2; rotary embedding, the cache, experts and sampling
have operators that are documented for A2 and A3 alone, and go to whoever is next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ascend import AscendBackend, backend, backend_310p, backend_a5
from . import activation, moe, normalization  # noqa: F401  (importing marks what is taken over)
from .common import rows_of

NORMS = ("rms_norm", "gemma_rms_norm", "fused_add_gemma_rms_norm")
"""They call `npu_rms_norm` and nothing else."""

ROW = 32
"""A row of npu_swiglu's input on the 310P is a multiple of it."""

Guard = Callable[..., Any]


def _without_bfloat16(guard: Guard) -> Guard:
    def supports(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool | str:
        if x.dtype is torch.bfloat16:
            return "x is bfloat16, which is not known to work on the 310P"
        return guard(x, *args, **kwargs)  # type: ignore[no-any-return]

    return supports


def _rows_of_32(guard: Guard) -> Guard:
    def supports(x: torch.Tensor) -> bool | str:
        if x.shape[-1] % ROW:
            return f"the last dimension {x.shape[-1]} is not a multiple of {ROW}"
        return guard(x)  # type: ignore[no-any-return]

    return supports


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, the sum), both new: `npu_add_rms_norm` gives the norm, 1 / rms and the sum."""
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(x.shape)
    assert weight is not None
    y, _, total = torch.ops.npu.npu_add_rms_norm(
        rows_of(x), rows_of(residual), weight.contiguous(), epsilon=epsilon
    )
    return y.view(x.shape), total.view(x.shape)


def _serve(
    other: AscendBackend,
    op: str,
    *wraps: Callable[[Guard], Guard],
    fn: Callable[..., Any] | None = None,
) -> None:
    """Mark what serves an op on A2 and A3, or `fn` in its place, for another chip, with more
    guards around its own."""
    [known] = [impl for impl in backend.implementations if impl.op_name == op]
    assert known.supports is not None
    supports = known.supports
    for wrap in wraps:
        supports = wrap(supports)
    mark = other.implements(op, supports_layer=known.supports_layer, supports=supports)
    mark(fn or known.fn)


for _op in NORMS:
    _serve(backend_310p, _op, _without_bfloat16)
    _serve(backend_a5, _op)
_serve(backend_310p, "fused_add_rms_norm", _without_bfloat16, fn=fused_add_rms_norm)
_serve(backend_a5, "fused_add_rms_norm", fn=fused_add_rms_norm)
_serve(backend_310p, "silu_and_mul", _without_bfloat16, _rows_of_32)
_serve(backend_a5, "silu_and_mul")
_serve(backend_310p, "gelu_quick", _without_bfloat16)
_serve(backend_a5, "grouped_topk")
