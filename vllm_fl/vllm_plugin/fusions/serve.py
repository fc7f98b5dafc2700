# SPDX-License-Identifier: Apache-2.0
"""Serving a module: once the model is loaded its op is bound, and if anything but the layers one
by one won, the forward of its class is replaced by one that calls the op for what was bound.

Under a compiler nothing is replaced, so that the graph is vLLM's own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...dispatch.default import get_default_manager
from .. import hooks
from ..compile import COMPILED, EAGER
from ..layers.serve import Asked, ServedLayer, ServedOp, bind_served
from ..layers.serve import records as layers
from .qk_norm_rope import BOUND, FUSES, OP, Parts, bound_forward, facts, parts_of, refuses

__all__ = ["NAMES", "ServedModule", "bind", "fused_layers", "records", "release"]

NAMES = (OP,)
"""The ops that are served in this way; also their names in the OOT lists."""

HOOKED = (("forward of modules like Qwen3's attention", f"serve {OP}"),)
"""What is hooked when a model is loaded, and what for; for people."""


@dataclass(slots=True, eq=False)
class ServedModule:
    """What was decided for one module.

    Attributes:
        layer: the module, which may be gone.
        class_name: of the module.
        mode: "eager" or "compiled".
        ops: its op, alone.
        parts: what it is made of; None where its forward is of no known form.
        hook: its class's forward, where an op was bound.
    """

    layer: weakref.ref[Any]
    class_name: str
    mode: str
    ops: tuple[ServedOp]
    parts: Parts | None = None
    hook: hooks.Hook | None = None

    @property
    def replaced(self) -> bool:
        """Whether somebody pointed the forward elsewhere since."""
        return self.hook is not None and not self.hook.in_place

    @property
    def fused(self) -> bool:
        """Whether the op is what runs."""
        return self.hook is not None and self.hook.in_place and self.layer() is not None

    def set_counting(self, on: bool) -> None:
        """Swap the bound function for a counting one, or back."""
        (served,) = self.ops
        if served.binding is not None and self.parts is not None:
            traced = served.binding.traced
            self.parts.fn = traced(served.count) if on and traced else served.binding.fn


records: list[ServedModule] = []
"""The modules of this process that were looked at, since the last model was loaded."""

_users: dict[int, list[Any]] = {}
"""For each layer that a recognised module has, by id: the modules of the model that have it."""


def bind(model: Any, *, compiled: bool = False) -> None:
    """Decide for every module of a loaded model that looks like one to serve.

    Args:
        compiled: vLLM traces and compiles the model.
    """
    release()
    mode = COMPILED if compiled else EAGER
    of_layer = {id(layer): r for r in list(layers) if (layer := r.layer()) is not None}
    read: dict[type, Any] = {}
    # All are read before the first is served: a class may share its forward with another.
    found = [(module, parts_of(module, read)) for module in model.modules()]
    for module, parts in found:
        if parts is not None:
            records.append(_decide(module, parts, mode, of_layer))
    mine = {id(x) for r in records if r.parts is not None for x in r.parts.layers.values()}
    for module in model.modules() if mine else ():
        for child in module._modules.values():
            if id(child) in mine:
                _users.setdefault(id(child), []).append(weakref.ref(module))


def _decide(
    module: Any, parts: Parts | str, mode: str, of_layer: dict[int, ServedLayer]
) -> ServedModule:
    native = parts if isinstance(parts, str) else refuses(parts, of_layer)
    if not get_default_manager().config.serves_layer(OP):
        native = "the OOT lists leave it native"
    known = None if isinstance(parts, str) else parts
    asked = Asked(OP, mode, enabled=False, donate=True)
    of_op = None if known is None or native is not None else facts(known)
    served = bind_served(OP, of_op, asked, native)
    record = ServedModule(weakref.ref(module), type(module).__name__, mode, (served,), known)
    if served.binding is not None and known is not None:
        known.fn, known.winner = served.binding.fn, served.binding.decision.winner_id
        module.__dict__[BOUND] = known
        record.hook = hooks.install(
            known.owner,
            "forward",
            partial(bound_forward, names=known.names),
            purpose=f"serve {OP}",
        )
    return record


def release() -> None:
    """Give every module its own forward back."""
    for record in records:
        module = record.layer()
        if module is not None:
            module.__dict__.pop(BOUND, None)
        if record.hook is not None and record.hook in hooks.installed():
            hooks.uninstall(record.hook)
    records.clear()
    _users.clear()


def fused_layers() -> dict[tuple[int, str], ServedModule]:
    """The layers that only served modules have, by id and op, each with one of these modules:
    what serves them is the module's op."""
    fused = {id(record.layer()): record for record in records if record.fused}
    return {
        (id(layer), FUSES[name]): record
        for record in fused.values()
        for name, layer in (record.parts.layers.items() if record.parts is not None else ())
        if all(id(user()) in fused for user in _users.get(id(layer), ()))
    }
