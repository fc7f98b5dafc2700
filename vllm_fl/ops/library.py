# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.vllm_fl.<op>`: every contract as an opaque torch op, for graphs.

A compiler sees one node with the contract's schema. Its body looks up the binding that the layer
made when it was built, runs the guards on real tensors, calls, and counts there. Nothing of the
choice is traced, so none of it can be baked into an artifact. Where the winner's backend has an
operator of its own for graphs (`Backend.graph_operators`), the graph holds that: it does without
Python what it can, and passes the rest on.

The functional form returns new tensors, laid out as the fake promises: contiguous, unless the
contract says that strides depend on the arguments (`strided`). The in-place form
`<op>_` writes its arguments and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dispatch.binding import Binding, annotate
from ..dispatch.default import get_default_manager
from ..dispatch.errors import DispatchError
from ..dispatch.types import OpImpl
from .contract import OpContract

__all__ = ["NAMESPACE", "Entry", "bind_name", "define", "entries", "op_for", "operator_of"]

NAMESPACE = "vllm_fl"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_defined: dict[str, OpContract] = {}


@dataclass(slots=True)
class Entry:
    """A binding under the name that graphs hold.

    Attributes:
        name: the constant in the graph.
        binding: what the layer was bound to.
        fn: what runs; counting swaps it.
        calls: impl_id to the calls counted, by all layers that share the binding.
        backend: the winner's, where it has operators of its own for graphs.
    """

    name: str
    binding: Binding
    fn: Callable[..., Any]
    calls: dict[str, int] = field(default_factory=dict)
    backend: Any = None

    def set_counting(self, on: bool) -> None:
        """Swap the function for a counting one, or back. The graph stays."""
        traced = self.binding.traced if on else None
        self.fn = self.binding.fn if traced is None else traced(self.count)
        if self.backend is not None:
            self.backend.set_direct(self.name, traced is None)

    def count(self, impl: OpImpl) -> None:
        """One more call."""
        self.calls[impl.impl_id] = self.calls.get(impl.impl_id, 0) + 1


entries: dict[str, Entry] = {}
"""The bindings that graphs of this process may name."""


def bind_name(binding: Binding, facts: str) -> Entry:
    """Make a binding reachable from graphs, and return its entry.

    The name is the same in every process that makes the same choice for the same facts, because
    a graph compiled by one is run by the others.
    """
    candidates = binding.decision.candidates
    plain = f"{binding.op}({facts}):{'>'.join(impl.impl_id for impl in candidates)}"
    name, count = plain, 1
    while name in entries and not entries[name].binding.is_like(binding):
        count += 1  # made for another reason, or of other functions under the same ids
        name = f"{plain}#{count}"
    if name not in entries:
        entries[name] = Entry(name, binding, binding.fn, backend=_backend_of(binding))
        entries[name].set_counting(False)
    return entries[name]


def _backend_of(binding: Binding) -> Any:
    winner = binding.decision.winner
    if winner is None or not (binding.facts_known or winner.supports_layer is None):
        return None  # a guard on facts is left, which a native operator does not ask
    backend = winner.backend
    return backend if getattr(backend, "graph_operators", None) else None


def define(contract: OpContract) -> None:
    """Define the torch ops of a contract. A second time is fine."""
    if contract.name in _defined:
        return
    _defined[contract.name] = contract
    forms: list[tuple[str, str, Callable[..., Any], Callable[..., Any]]] = [
        (contract.name, contract.schema, _functional(contract), contract.fake)
    ]
    if contract.inplace_schema is not None:
        name = f"{contract.name}_"
        forms.append((name, contract.inplace_schema, _inplace(contract), _no_output))
    for name, schema, body, fake in forms:
        arguments, arrow, returns = schema.partition(") -> ")
        _library.define(
            f'{name}{arguments}, *, str binding=""{arrow}{returns}',
            tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
        )
        _library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _without_binding(fake), lib=_library)


def op_for(op_name: str, *, inplace: bool) -> Any:
    """The torch op of a contract, as a callable of plain arguments and `binding=`."""
    return getattr(getattr(torch.ops, NAMESPACE), f"{op_name}_" if inplace else op_name).default


_shaped: set[str] = set()
"""The backends' operators that have a fake."""


def operator_of(entry: Entry, *, inplace: bool) -> Any:
    """What a graph calls for a binding: a backend's own operator, or `op_for` of its op."""
    op_name = entry.binding.op
    form = f"{op_name}_" if inplace else op_name
    name = entry.backend.graph_operators.get(form) if entry.backend is not None else None
    if name is None:
        return op_for(op_name, inplace=inplace)
    if name not in _shaped:
        _shaped.add(name)
        fake = _no_output if inplace else _without_binding(_defined[op_name].fake)
        torch.library.register_fake(name, fake)
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _without_binding(fake: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, binding: str = "", **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    return call


def _no_output(*args: Any, **kwargs: Any) -> None:
    """The fake of an in-place form."""


def _run(contract: OpContract, binding: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    if not binding:
        return get_default_manager().call(contract.name, *args, **kwargs)
    entry = entries.get(binding)
    if entry is None:
        raise DispatchError(
            f"torch.ops.{NAMESPACE}.{contract.name}: this graph was compiled for the binding "
            f"'{binding}', which no layer of this process made; known: "
            f"{', '.join(entries) or 'none'}. Delete vLLM's compile cache, or run once with "
            "VLLM_DISABLE_COMPILE_CACHE=1."
        )
    try:
        return entry.fn(*args, **kwargs)
    except Exception as error:
        annotate(error, contract.name, entry.binding.decision.winner_id, args, kwargs)
        raise


def _storages(values: Iterable[Any]) -> set[int]:
    return {
        v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor) and v.numel()
    }


def _overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two contiguous tensors, or two views that start at one address, share memory.
    Other views interleave without sharing, as the query and key of one projection do."""
    for i, a in enumerate(tensors):
        for b in tensors[:i]:
            apart = a.data_ptr() - b.data_ptr()
            if apart == 0:
                return True
            near = -a.nbytes < apart < b.nbytes
            if near and a.is_contiguous() and b.is_contiguous():
                return True
    return False


def _functional(contract: OpContract) -> Callable[..., Any]:
    strided = contract.strided

    def body(*args: Any, binding: str = "", **kwargs: Any) -> Any:
        result = _run(contract, binding, args, kwargs)
        if strided or not _is_new(result, args) or kwargs:
            return promised(result, args, kwargs)
        return result

    def promised(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _storages((*args, *kwargs.values()))
        outputs = result if isinstance(result, tuple) else (result,)
        promised: tuple[Any, ...] = (None,) * len(outputs)
        if strided:
            fake = contract.fake(*args, **kwargs)
            promised = fake if isinstance(fake, tuple) else (fake,)

        def own(t: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor:
            if t is None:  # a torch op cannot return None: it has no elements instead
                return outputs[0].new_empty(0)
            if like is None:
                # Without elements any strides count as contiguous, but a graph expects the fake's.
                t = t.contiguous() if t.numel() else t.new_empty(t.shape)
            elif t.stride() != like.stride():
                t = like.copy_(t)
            return t.clone() if _storages((t,)) & given else t

        owned = tuple(map(own, outputs, promised))
        return owned if isinstance(result, tuple) else owned[0]

    return body


def _is_new(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result is what a graph wants, as most are: one contiguous tensor with elements, in
    memory that no argument has."""
    if type(result) is not torch.Tensor or not result.is_contiguous() or not result.numel():
        return False
    address = result.untyped_storage().data_ptr()
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == address:
            return False
    return True


def _inplace(contract: OpContract) -> Callable[..., Any]:
    names = contract.signature.parameter_names
    written = contract.signature.inplace
    positions = tuple(names.index(name) for name in written)
    last = max(positions)

    def body(*args: Any, binding: str = "", **kwargs: Any) -> None:
        if kwargs or len(args) <= last:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            targets = [given.get(name) for name in written]
        else:
            targets = [args[i] for i in positions]
        if len(targets) > 1 and _overlap([t for t in targets if t is not None and t.numel()]):
            raise DispatchError(
                f"torch.ops.{NAMESPACE}.{contract.name}_: {' and '.join(written)} share memory, "
                f"which cannot hold both results. Call {contract.name} instead."
            )
        results = _run(contract, binding, args, kwargs)
        if not isinstance(results, tuple):
            results = (results,)
        for target, result in zip(targets, results, strict=True):
            if target is not None and result is not target:
                target.copy_(result)

    return body
