# SPDX-License-Identifier: Apache-2.0
"""The activations that vllm_fl serves: their attributes, their formulas, their kernels' calls."""

from __future__ import annotations

from .checks import Built, Check, Decorated, Does, Entry, IsA, Sets
from .served import ForwardsTake, Subclasses

__all__ = ["ACTIVATIONS"]

CUSTOM_OP = "vllm.model_executor.custom_op:CustomOp"
MODULE = "vllm.model_executor.layers.activation"

FORMULAS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    # class, name: attributes that its __init__ sets; code that stands in it
    ("MulAndSilu", "mul_and_silu"): (
        (),
        ("x[..., :d] * F.silu(x[..., d:])", "self.op(out, x)"),
    ),
    ("SiluAndMulWithClamp", "silu_and_mul_with_clamp"): (
        ("swiglu_limit", "alpha", "beta"),
        (
            "torch.clamp(x[..., :d], max=self.swiglu_limit)",
            "torch.clamp(x[..., d:], min=-self.swiglu_limit, max=self.swiglu_limit)",
            "gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)",
            "self.op(out, x, self.swiglu_limit, self.alpha, self.beta)",
        ),
    ),
    ("SwigluOAIAndMul", "swigluoai_and_mul"): (
        ("alpha", "limit"),
        (
            "x[..., ::2], x[..., 1::2]",
            "gate.clamp(min=None, max=self.limit)",
            "up.clamp(min=-self.limit, max=self.limit)",
            "gate * torch.sigmoid(gate * self.alpha)",
            "(up + 1) * glu",
            "torch.ops._C.swigluoai_and_mul(out, x, self.alpha, self.limit)",
        ),
    ),
    ("FatreluAndMul", "fatrelu_and_mul"): (
        ("threshold",),
        ("F.threshold(x1, self.threshold, 0.0)", "x1 * x2", "self.op(out, x, self.threshold)"),
    ),
    ("NewGELU", "gelu_new"): (
        (),
        (
            "math.sqrt(2.0 / math.pi)",
            "0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0))))",
            "torch.ops._C.gelu_new",
            "self.op(out, x)",
        ),
    ),
    ("FastGELU", "gelu_fast"): (
        (),
        (
            "0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))",
            "torch.ops._C.gelu_fast",
            "self.op(out, x)",
        ),
    ),
    ("QuickGELU", "quick_gelu"): (
        (),
        ("x * torch.sigmoid(1.702 * x)", "torch.ops._C.gelu_quick", "self.op(out, x)"),
    ),
    ("ReLUSquaredActivation", "relu2"): ((), ("torch.square(F.relu(x))",)),
}


def _entries(
    cls: str, name: str, attributes: tuple[str, ...], codes: tuple[str, ...]
) -> list[Entry]:
    path = f"{MODULE}:{cls}"
    checks: tuple[Check, ...] = (
        IsA(CUSTOM_OP),
        Decorated(f"CustomOp.register('{name}')"),
        Built(),
        ForwardsTake("x"),
        Subclasses(),
        *map(Does, codes),
    )
    why = "served: its formula is the op's; its __init__ is wrapped, and nobody inherits from it"
    entries = [Entry(path, why, checks)]
    if attributes:
        entries.append(Entry(f"{path}.__init__", "the op's arguments", (Sets(attributes),)))
    return entries


ACTIVATIONS: tuple[Entry, ...] = tuple(
    entry
    for (cls, name), (attributes, codes) in FORMULAS.items()
    for entry in _entries(cls, name, attributes, codes)
)
