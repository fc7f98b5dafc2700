# SPDX-License-Identifier: Apache-2.0
"""Arguments in memory that is watched: who wrote where, and who shares with whom.

Every storage is copied into a buffer with a margin on each side. The margin, and what lies
between the elements of a slice, is filled with bytes that read as NaN in every floating-point
format and as -1 in integers: a kernel that reads there gives itself away in its result, and one
that writes there in the bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Placed",
    "bits",
    "footprint",
    "fresh_memory_is_nan",
    "place",
    "same_bits",
    "share_memory",
    "synchronize",
]

_MARGIN = 512
"""Bytes; a multiple of every alignment that a kernel may ask of an argument."""

_POISON = 0xFF


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One storage with its margins, and its bytes as they were."""

    now: torch.Tensor
    before: torch.Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """A call's arguments in watched memory.

    Attributes:
        args: the arguments, tensors with the sizes, strides and sharing of the originals.
    """

    args: tuple[Any, ...]
    _buffers: tuple[_Buffer, ...]

    def writes(self, names: Sequence[str], declared: Sequence[str]) -> list[str]:
        """What was written and should not have been.

        Args:
            names: the arguments' names.
            declared: those that may be written.

        Returns: one sentence for each storage that was.
        """
        found = []
        for buffer in self._buffers:
            changed = buffer.now.cpu() != buffer.before
            inside = self._masks(buffer, names)
            for name in declared:
                if name in inside:
                    changed &= ~inside[name]
            if not changed.any():
                continue
            first = int(changed.nonzero()[0])
            owners = [name for name, mask in inside.items() if mask[first]]
            count = int(changed.sum())
            if owners:
                found.append(f"{' and '.join(owners)} was written ({count} bytes changed)")
            else:
                found.append(
                    f"{count} bytes were written beside {' and '.join(inside)}: between its rows "
                    "or past its ends"
                )
        return found

    def shared_with(self, output: torch.Tensor, names: Sequence[str]) -> list[str]:
        """The arguments that an output shares memory with."""
        found = []
        for buffer in self._buffers:
            if output.untyped_storage().data_ptr() == buffer.now.untyped_storage().data_ptr():
                mine = footprint(output, buffer.before.numel())
                masks = self._masks(buffer, names).items()
                found += [name for name, mask in masks if (mask & mine).any()]
        return found

    def _masks(self, buffer: _Buffer, names: Sequence[str]) -> dict[str, torch.Tensor]:
        address = buffer.now.untyped_storage().data_ptr()
        return {
            name: footprint(value, buffer.before.numel())
            for name, value in zip(names, self.args, strict=False)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == address
        }


def place(args: tuple[Any, ...], device: str = "cpu") -> Placed:
    """Copy a call's arguments into watched memory on a device.

    Tensors that share a storage share one afterwards.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for value in args:
        if isinstance(value, torch.Tensor):
            groups.setdefault(_storage_key(value), []).append(value)
    buffers = {key: _buffer(tensors, device) for key, tensors in groups.items()}
    moved = tuple(
        _view(value, buffers[_storage_key(value)].now) if isinstance(value, torch.Tensor) else value
        for value in args
    )
    return Placed(moved, tuple(buffers.values()))


def footprint(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Which bytes of its storage of `size` bytes a tensor's elements lie in; made from metadata,
    on the CPU."""
    mask = torch.zeros(size, dtype=torch.bool)
    if tensor.numel():
        width = tensor.element_size()
        # An expanded dimension lies in one place: mark it once.
        shape = [
            1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        steps = [step * width for step in tensor.stride()]
        view = mask.as_strided((*shape, width), (*steps, 1), tensor.storage_offset() * width)
        view.fill_(True)
    return mask


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element's byte in common."""
    if not one.numel() or not other.numel():
        return False
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    size = storage.nbytes()
    return bool((footprint(one, size) & footprint(other, size)).any())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements in order, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are equal in dtype, shape and every bit; None equals None."""
    if one is None or other is None:
        return one is other
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(bits(one), bits(other))


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Inside, memory that torch hands out without values holds NaN, or the largest integer."""
    settings = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = before[2]


def synchronize(device: str) -> None:
    """Wait for the device, so that an error shows where it was made.

    A launch that the driver refused, as it does an empty one, is told to whoever launches next:
    here that is us, and not a right kernel.
    """
    kind = device.partition(":")[0]
    if kind != "cpu":
        torch.empty(1, device=device).add_(1)
        getattr(torch, kind).synchronize()


def _storage_key(tensor: torch.Tensor) -> int:
    # Storages without bytes have no address.
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or -storage._cdata)


def _buffer(tensors: list[torch.Tensor], device: str) -> _Buffer:
    size = tensors[0].untyped_storage().nbytes()
    covered = torch.zeros(size, dtype=torch.bool)
    for tensor in tensors:
        covered |= footprint(tensor, size)
    before = torch.full((size + 2 * _MARGIN,), _POISON, dtype=torch.uint8)
    given = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage(), 0, (size,), (1,))
    before[_MARGIN : _MARGIN + size][covered] = given[covered]
    now = before.clone() if device == "cpu" else before.to(device)
    return _Buffer(now, before)


def _view(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    offset = _MARGIN // tensor.element_size() + tensor.storage_offset()
    empty = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), offset, tensor.shape, tensor.stride())
