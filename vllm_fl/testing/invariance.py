# SPDX-License-Identifier: Apache-2.0
"""What `batch_invariant=True` claims: a token's bits do not depend on the tokens beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dispatch.types import Rejected
from ..ops.arrays import bind_axes
from .cases import named_arguments
from .compare import outputs_of
from .guards import verdict_on
from .memory import place, same_bits, synchronize
from .report import Kind
from .target import Target

__all__ = ["problems"]

_ALONE = 8
"""How many tokens are computed alone: the first, the last and some between."""

_TILED = 67
"""Tokens of the batch that the case's own are repeated into; a prime, above a vector's width."""

_LARGEST = 2**20
"""Elements of an argument in a repeated batch."""


def problems(
    target: Target, args: tuple[Any, ...], device: str, outputs: tuple[Any, ...]
) -> list[tuple[Kind, str]]:
    """What the claim does not keep; nothing where nothing is claimed.

    Args:
        outputs: those of the whole batch.
    """
    contract = target.contract
    if not (target.impl.batch_invariant and contract.batched):
        return []
    if bind_axes(contract.arrays, named_arguments(contract, args)).get("...") == ():
        return []  # one row without a dimension of tokens
    names = contract.signature.parameter_names
    batched = [i for i, n in enumerate(names[: len(args)]) if n in contract.batched]
    batched = [i for i in batched if args[i] is not None]
    tokens = args[batched[0]].shape[0]
    for i, output in enumerate(outputs):
        if output is not None and output.shape[:1] != (tokens,):
            text = f"output {i} has shape {list(output.shape)} for {tokens} tokens"
            return [(Kind.CONTRACT, text)]
    found = []
    for first, last in _parts(tokens):
        part = _chosen(args, batched, lambda x, a=first, b=last: x[a:b])
        result = _run(target, part, device)
        if isinstance(result, str):
            return [(Kind.BATCH, f"tokens {first} to {last - 1} of {tokens} alone: {result}")]
        expected = tuple(None if o is None else o[first:last] for o in outputs)
        if result is not None and not all(map(same_bits, result, expected)):
            alone = f"token {first} alone" if last - first == 1 else f"tokens {first} to {last - 1}"
            found.append((Kind.BATCH, f"{alone}: other bits than in the batch of {tokens}"))
            break
    times = -(-_TILED // tokens) if tokens else 0
    dense = all(args[i].is_contiguous() for i in batched)
    if times and dense and max(args[i].numel() for i in batched) * times <= _LARGEST:
        whole = _chosen(args, batched, lambda x: x.repeat(times, *[1] * (x.dim() - 1))[:_TILED])
        result = _run(target, whole, device)
        if isinstance(result, str):
            return [*found, (Kind.BATCH, f"a batch of {_TILED}: {result}")]
        size = min(tokens, _TILED)
        if result is not None and not all(
            o is None or same_bits(o[:size], r[:size]) for o, r in zip(outputs, result, strict=True)
        ):
            text = f"in a batch of {_TILED} the first {size} tokens have other bits than alone"
            found.append((Kind.BATCH, text))
    return found


def _parts(tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens, each a batch of its own."""
    if tokens < 2:
        return
    step = max(1, (tokens - 1) // (_ALONE - 1))
    for first in dict.fromkeys([*range(0, tokens, step), tokens - 1]):
        yield first, first + 1
    for size in (2, 3, 5, tokens // 2, tokens - 1):
        if 1 < size < tokens:
            yield tokens - size, tokens


def _chosen(args: tuple[Any, ...], batched: list[int], choose: Any) -> tuple[Any, ...]:
    return tuple(choose(a) if i in batched else a for i, a in enumerate(args))


def _run(target: Target, args: tuple[Any, ...], device: str) -> tuple[Any, ...] | str | None:
    """The outputs on memory of their own; what was raised instead; None where a guard refuses."""
    placed = place(args, device)
    if isinstance(verdict_on(target, placed.args), Rejected):
        return None
    try:
        result = outputs_of(target.impl.fn(*placed.args))
        synchronize(device)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    return result
