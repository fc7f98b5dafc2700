# SPDX-License-Identifier: Apache-2.0
"""When an op that fuses others is used in their place. Pure.

Without it vLLM runs the layers one by one, each served by the best implementation there is. So the
fused op has to be worth it, and to be what the policy means:

- Its reference is used only where an order for the op names it: in one function the same PyTorch
  code is no faster, and three kernels are.
- What the policy says of the ops that it fuses (an order for one of them, a preference for a kind)
  holds until an order for the fused op says otherwise.
- Where nothing was said, priority decides, as everywhere: an implementation of a lower priority
  than what serves one of those ops does not take its place.
- Under a compiler, which fuses by itself, it is never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .policy import NATIVE, SelectionPolicy, token_matches
from .types import BackendImplKind, OpImpl, OpSignature, Rejected

__all__ = ["ONE_BY_ONE", "why_not_fused", "with_native"]

ONE_BY_ONE = "nothing takes the place of the layers: they run one by one"
"""Why an op that fuses others is native in eager mode, where no order says so."""


def with_native(ordered: Sequence[OpImpl | str], mode: str) -> list[OpImpl | str]:
    """The candidates with native where it belongs: first under a compiler, last otherwise."""
    if mode == "compiled":
        return [NATIVE, *(candidate for candidate in ordered if candidate != NATIVE)]
    return [*ordered] if NATIVE in ordered else [*ordered, NATIVE]


def why_not_fused(
    impl: OpImpl,
    signature: OpSignature,
    policy: SelectionPolicy,
    mode: str,
    parts: Mapping[str, OpImpl | None],
) -> Rejected | None:
    """Why an implementation of an op that fuses others does not take their place, or None.

    Args:
        parts: what serves each of the others.
    """
    op = signature.op_name
    if any(token_matches(token, impl) for token in policy.order_for(op, mode)):
        return None
    if impl.kind is BackendImplKind.REFERENCE:
        return Rejected(
            f"it is no faster than {' and '.join(signature.fuses)} one by one; an order for {op} "
            "that names it uses it",
            "fusion",
        )
    if policy.prefer is not None and policy.prefer != impl.kind.value:
        return Rejected(
            f"prefer = {policy.prefer} is for {' and '.join(signature.fuses)} too, which it fuses; "
            f"an order for {op} decides otherwise",
            "fusion",
        )
    for part in signature.fuses:
        if policy.order_for(part, mode):
            return Rejected(
                f"the policy has an order for {part}, which it fuses; an order for {op} decides "
                "otherwise",
                "fusion",
            )
        serves = parts.get(part)
        if serves is not None and serves.priority > impl.priority:
            return Rejected(
                f"its priority {int(impl.priority)} is below that of {serves.impl_id}, "
                f"{int(serves.priority)}, which serves {part}",
                "fusion",
            )
    return None
