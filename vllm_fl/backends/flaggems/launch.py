# SPDX-License-Identifier: Apache-2.0
"""Launch FlagGems' kernels without FlagGems' Python in between.

Of the 28 to 129 us of host time that a call costs, the kernel's launch takes a tenth: the rest
is spent on working out, again for the same shapes, what to launch. A `Planned` function lets
FlagGems do it twice for each layout, watches the second time, and from then on makes the same
launches itself: same compiled kernels, same grids, same integers, with the addresses of the
present tensors.

A plan is made only if nothing but those launches can matter: while it watches, every address
that a kernel gets must lie in an argument or in a result, and PyTorch must do nothing but
allocate and view. Otherwise that layout keeps going through FlagGems.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...dispatch.log import logger

__all__ = ["PLANS_KEPT", "Planned", "planned"]

PLANS_KEPT = 1024
"""Layouts that a function remembers; a server meets new token counts without end."""

_ALIGNED = 16
"""Bytes. Triton compiles another kernel for addresses that are no multiple."""

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "expand",
    "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
}  # fmt: skip


class _NoPlan(Exception):
    """Why a layout keeps going through FlagGems."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """One kernel launch as Triton makes it: kernel.run(*before, *arguments)."""

    kernel: Any
    before: tuple[Any, ...]
    arguments: tuple[Any, ...]


def planned(function: Callable[..., Any]) -> Planned:
    """Decorates a function that launches FlagGems' kernels.

    It takes tensors and plain values, all by position and a tensor first, and returns a tensor
    that is new or an argument, a tuple of such, or None.
    """
    return Planned(function)


class Planned:
    """The function, and a plan for each layout that it was called with.

    Attributes:
        function: what goes through FlagGems.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._plans: dict[tuple[Any, ...], _Plan | bool] = {}

    def __call__(self, *args: Any) -> Any:
        """Call it. The arguments are not changed unless the function changes them."""
        key: list[Any] = []
        addresses: list[int] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                addresses.append(address)
                key += (arg.dtype, arg.shape, arg.stride(), address % _ALIGNED == 0)
            else:
                key.append(arg)
        key.append(args[0].device)
        plan = self._plans.get(layout := tuple(key))
        # True: seen once. False: has no plan.
        if plan is None or plan is True or plan is False:
            return self._through_flaggems(layout, plan, args)
        if plan.fits():
            return plan.run(args, addresses)
        return self.function(*args)

    def forget(self) -> None:
        """Drop all plans."""
        self._plans.clear()

    def _through_flaggems(self, layout: tuple[Any, ...], seen: bool | None, args: Any) -> Any:
        if seen is False:
            return self.function(*args)
        if seen is None:
            # What is compiled or tuned the first time is no part of a plan.
            result = self.function(*args)
            if len(self._plans) >= PLANS_KEPT:
                self._plans.clear()
            self._plans[layout] = _plans_are_possible()
            return result
        with _watching() as watch:
            result = self.function(*args)
        try:
            self._plans[layout] = _Plan(watch, args, result)
        except _NoPlan as why:
            self._plans[layout] = False
            logger.debug("%s: no launch plan: %s", self.__name__, why)
        return result


# ------------------------------------------------------------------------------- watching


class _Watch(TorchDispatchMode):
    """What one call launches, and what else it asks of PyTorch, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[_Launch] = []
        self.also: list[str] = []
        self.thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _ALLOCATES and name not in _VIEWS:
            self.also.append(str(func))
        return func(*args, **(kwargs or {}))


_watching_lock = threading.Lock()


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Watch the launches of this thread through the one attribute that all go through."""
    from triton.compiler import CompiledKernel

    watch = _Watch()
    with _watching_lock:
        original = CompiledKernel.run

        def run(kernel: Any) -> Callable[..., Any]:
            launch = original.fget(kernel)
            if threading.get_ident() != watch.thread:
                return launch

            def watched(*args: Any) -> Any:
                watch.launches.append(_Launch(kernel, args[:_BEFORE], args[_BEFORE:]))
                return launch(*args)

            return watched

        CompiledKernel.run = property(run)
        try:
            with watch:
                yield watch
        finally:
            CompiledKernel.run = original


_BEFORE = 9
"""gridX, gridY, gridZ, stream, function, packed metadata, launch metadata, two hooks."""


def _plans_are_possible() -> bool:
    """Whether launches can be repeated as they are: compiled kernels, on NVIDIA's driver.

    Others specialise on more than a layout: AMD's on the size of the storage.
    """
    from triton import knobs
    from triton.runtime import driver

    return not knobs.runtime.interpret and driver.active.get_current_target().backend == "cuda"


# --------------------------------------------------------------------------------- a plan


@dataclass(frozen=True, slots=True)
class _Result:
    """A result: the argument at `index`, or a new tensor of this layout."""

    index: int | None
    shape: torch.Size | None = None
    strides: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class _Plan:
    """What to launch for one layout."""

    __slots__ = (
        "_device", "_get_device", "_get_stream", "_launches", "_new", "_results", "_runtime",
        "_shape",
    )  # fmt: skip

    def __init__(self, watch: _Watch, args: tuple[Any, ...], result: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        if watch.also:
            raise _NoPlan(f"PyTorch is asked for {', '.join(watch.also)}")
        if not watch.launches:
            raise _NoPlan("nothing is launched")
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        devices = {t.device for t in tensors}
        if len(devices) != 1:
            raise _NoPlan(f"tensors on {len(devices)} devices")
        self._device = devices.pop().index or 0
        self._runtime = knobs.runtime
        self._get_device = driver.active.get_current_device
        self._get_stream = driver.active.get_current_stream
        self._shape = type(result)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        self._results = tuple(_result(r, args) for r in results)
        self._new = tuple(r for r in self._results if r.index is None)
        owners = tensors + [
            r for r, known in zip(results, self._results, strict=True) if known.index is None
        ]
        self._launches = tuple(_steps(launch, owners) for launch in watch.launches)

    def fits(self) -> bool:
        """Whether the tensors' device is the current one, and nobody profiles launches."""
        if self._get_device() != self._device:
            return False
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        if enter is None and leave is None:
            return True
        # From Triton 3.5 on they are chains, which are there while empty.
        return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def run(self, args: tuple[Any, ...], addresses: list[int]) -> Any:
        """Make the launches on these arguments."""
        new = [
            torch.empty_strided(r.shape, r.strides, dtype=r.dtype, device=r.device)
            for r in self._new
        ]
        addresses += [t.data_ptr() for t in new]
        stream = self._get_stream(self._device)
        for run, x, y, z, function, packed, constants, places in self._launches:
            arguments = list(constants)
            for at, owner, offset in places:
                arguments[at] = addresses[owner] + offset
            run(x, y, z, stream, function, packed, None, None, None, *arguments)
        if self._shape is torch.Tensor:
            only = self._results[0].index
            return new[0] if only is None else args[only]
        if self._shape is not tuple:
            return None
        fresh = iter(new)
        return tuple(next(fresh) if r.index is None else args[r.index] for r in self._results)


def _result(result: Any, args: tuple[Any, ...]) -> _Result:
    for index, arg in enumerate(args):
        if arg is result:
            return _Result(index)
    size = result.numel() * result.element_size()
    if result.storage_offset() or result.untyped_storage().nbytes() != size:
        raise _NoPlan("a result is a view")
    return _Result(None, result.shape, result.stride(), result.dtype, result.device)


def _steps(launch: _Launch, owners: list[torch.Tensor]) -> tuple[Any, ...]:
    """A launch, with the places of addresses among its arguments: (place, owner, offset)."""
    places = []
    arguments = list(launch.arguments)
    for at, value in enumerate(arguments):
        if not hasattr(value, "data_ptr"):
            _check_constant(at, value, owners)
            continue
        address = value.data_ptr()
        starts = [i for i, t in enumerate(owners) if t.data_ptr() == address]
        inside = [i for i, t in enumerate(owners) if _contains(t, address)]
        # Of two tensors in one buffer, the one that starts there; else it must be unmistakable.
        if len(starts) != 1 and len(inside) != 1:
            raise _NoPlan(f"argument {at} lies in {len(inside)} of the tensors")
        owner = starts[0] if len(starts) == 1 else inside[0]
        places.append((at, owner, address - owners[owner].data_ptr()))
        arguments[at] = None
    x, y, z, _, function, packed, *_ = launch.before
    run = launch.kernel.run
    return run, x, y, z, function, packed, tuple(arguments), tuple(places)


def _check_constant(at: int, value: Any, owners: list[torch.Tensor]) -> None:
    """Neither a descriptor, which has an address inside, nor an address itself."""
    if value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
        kind = type(value)
        if not kind.__module__.startswith("triton.language"):  # a dtype, a constant
            raise _NoPlan(f"argument {at} is a {kind.__name__}")
    if isinstance(value, int) and any(_contains(t, value) for t in owners):
        raise _NoPlan(f"argument {at} is an address")


def _contains(tensor: torch.Tensor, address: int) -> bool:
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return bool(tensor.numel()) and start <= address < start + elements * tensor.element_size()
