# SPDX-License-Identifier: Apache-2.0
"""Tensors that report the device "npu" and compute on the CPU.

Strides, views, offsets and aliasing are those of a real tensor. An operator of torch_npu refuses
a CPU tensor among them, as the device does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .harness import need

__all__ = ["NpuTensor", "make_device", "to_cpu", "to_npu"]


class NpuTensor(torch.Tensor):
    """A CPU tensor, `raw`, behind the face of one on an NPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NpuTensor:
        face = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("npu:0"),
        )
        face.raw = raw
        return face

    def __repr__(self) -> str:
        return f"NpuTensor({self.raw!r})"

    def tolist(self) -> Any:
        """torch reads a list's elements from memory, which a face does not have."""
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_cpu(func, args, kwargs or {})


def _on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.namespace in ("npu", "atb"):
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        host = sum(not isinstance(a, NpuTensor) for a in given)
        need(host == 0, f"{func._schema.name}: {host} of its tensors are on the CPU")
    faces: dict[int, NpuTensor] = {}

    def uncover(value: Any) -> Any:
        if isinstance(value, NpuTensor):
            faces[id(value.raw)] = value
            return value.raw
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    def cover(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor):
            # What was written in place stays the object that it was.
            return faces[id(value)] if id(value) in faces else NpuTensor(value)
        return value

    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type == "cpu"
    result = func(*tree_map(uncover, args), **tree_map(uncover, kwargs))
    return result if leaves else tree_map(cover, result)


class _Factories(TorchDispatchMode):
    """Gives `torch.empty(..., device="npu")` and `.to("npu")` an NpuTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "npu":
            return _on_cpu(func, args, kwargs)
        return func(*args, **kwargs)


_factories = _Factories()


def make_device(npu: ModuleType) -> None:
    """Give torch's private device the name "npu", with `npu` as its module."""
    from torch.utils import backend_registration

    # Experimental in torch, but the only way to a device guard, which indexing needs.
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=npu)
    _factories.__enter__()


def to_npu(value: Any) -> Any:
    """Tensors as they would be on the device: equal values, strides and views of one storage."""
    return tree_map(lambda v: NpuTensor(v) if isinstance(v, torch.Tensor) else v, value)


def to_cpu(value: Any) -> Any:
    """What is behind the faces."""
    return tree_map(lambda v: v.raw if isinstance(v, NpuTensor) else v, value)
