# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch_npu on a machine without an NPU, CANN or torch_npu.

- The operators have torch_npu's exact schemas (`schemas.txt`, as its dispatcher prints them), so
  a wrong name, count or type of an argument fails as it would on the device.
- Their bodies (`emulation.py` and its neighbours) follow the documented formulas on the CPU, the
  surprising behaviour included.
- What a kernel documents as unsupported, and no schema can express, is a `LimitError`.
- `device.py` makes tensors that report the device "npu".

`install` changes the process for good (torch's private device gets the name "npu"), so whoever
uses it has a process of its own.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.library import Library

__all__ = ["STATE", "LimitError", "emulates", "install", "need", "schemas"]

_SCHEMAS = Path(__file__).with_name("schemas.txt")

_WITHOUT_HASH_ROUTING = ("Tensor? input_ids=None, Tensor? tid2eid=None, ", "")
_CHANGES: dict[str, dict[str, tuple[str, str]]] = {
    "2.10.0": {
        "npu::npu_apply_rotary_pos_emb": ('layout="BSND"', 'layout="BSH"'),
        "npu::npu_moe_gating_top_k": _WITHOUT_HASH_ROUTING,
    },
    "2.11.0": {"npu::npu_moe_gating_top_k": _WITHOUT_HASH_ROUTING},
    "2.13.0": {},
}
"""Release to (operator to (text in 2.13.0, text there))."""

SOC_VERSIONS = {"A2": 223, "A3": 250, "A5": 260, "310P": 202}
_NAMES = {"A2": "Ascend910B3", "A3": "Ascend910_9391", "A5": "Ascend950", "310P": "Ascend310P3"}


TAKES_VIEWS = {("npu_grouped_matmul", "weight")}
"""Arguments that may be views: a transposed weight. Nothing else is documented for views, and
nothing at all for tensors without elements."""


class LimitError(RuntimeError):
    """The schema accepts the call; the documented limits of the kernel do not."""


@dataclass
class State:
    """What a test sets, and what it can look at.

    Attributes:
        soc: the chip: "A2", "A3", "A5" or "310P".
        calls: (operator, arguments, keywords) of every call.
        fails: operator to the exception that it raises.
        rope_table: the first table that the ATB rotary operator was given; it never looks again.
    """

    soc: str = "A2"
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    rope_table: torch.Tensor | None = None

    def reset(self) -> None:
        """As in a new process."""
        self.soc, self.rope_table = "A2", None
        self.calls.clear()
        self.fails.clear()

    def names(self) -> list[str]:
        """The operators that were called, in order."""
        return [name for name, _, _ in self.calls]


STATE = State()
_bodies: dict[str, Callable[..., Any]] = {}
_libraries: dict[str, Library] = {}


def need(condition: object, limit: str) -> None:
    """Refuse what the kernel documents as unsupported."""
    if not condition:
        raise LimitError(limit)


def emulates(namespace: str = "npu") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the body of the operator of its name."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        _bodies[f"{namespace}::{function.__name__}"] = function
        return function

    return mark


def schemas(release: str = "2.13.0") -> dict[str, str]:
    """Operator ("npu::npu_swiglu") to its schema in a release of torch_npu."""
    found = {}
    for line in _SCHEMAS.read_text(encoding="utf-8").splitlines():
        name = line.partition("(")[0]
        new, old = _CHANGES[release].get(name, ("", ""))
        assert new in line, f"{name} of {release}: {new} is not in {line}"
        found[name] = line.replace(new, old) if new else line
    return found


def _checked(name: str, schema: str) -> Callable[..., Any]:
    """The body of an operator, with what the dispatcher does not do before it is called.

    None for a tensor passes every schema, as an undefined tensor; a kernel crashes on it."""
    body, short = _bodies[name], name.partition("::")[2]
    arguments = torch._C.parse_schema(schema).arguments
    required = [(i, a.name) for i, a in enumerate(arguments) if str(a.type) == "Tensor"]

    def run(*args: Any, **kwargs: Any) -> Any:
        for i, argument in required:
            value = args[i] if i < len(args) else kwargs.get(argument)
            need(value is not None, f"{short}: {argument} is None, an undefined tensor")
        for argument, value in _named_tensors(arguments, args, kwargs):
            need(value.numel() > 0, f"{short}: {argument} has no elements")
            if (short, argument) not in TAKES_VIEWS:
                need(value.is_contiguous(), f"{short}: {argument} is not contiguous")
        STATE.calls.append((short, args, kwargs))
        if short in STATE.fails:
            raise STATE.fails[short]
        return body(*args, **kwargs)

    return run


def _named_tensors(
    arguments: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for i, argument in enumerate(arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield argument.name, tensor


def _define(release: str) -> None:
    for name, schema in schemas(release).items():
        namespace, _, rest = schema.partition("::")
        library = _libraries.setdefault(namespace, Library(namespace, "FRAGMENT"))
        library.define(rest)
        library.impl(rest.partition("(")[0], _checked(name, schema), "CPU")


def _npu_module() -> types.ModuleType:
    """`torch.npu`: what vllm_fl and torch itself ask of it."""
    module = types.ModuleType("torch_npu.npu")
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: _NAMES[STATE.soc],
        "get_device_capability": lambda device=None: None,
        "get_soc_version": lambda: SOC_VERSIONS[STATE.soc],
        "is_bf16_supported": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


def install(release: str = "2.13.0", *, device: str = "npu") -> types.ModuleType:
    """Define the operators and put a `torch_npu` into `sys.modules`. Once per process.

    Args:
        release: whose schemas.
        device: "npu" for tensors that report it; "cpu" leaves torch's devices alone.
    """
    from . import emulation, emulation_moe  # noqa: F401  (importing marks the bodies)

    npu = _npu_module()
    if device == "npu":
        from .device import make_device

        make_device(npu)
    _define(release)
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", loader=None)
    module.__path__ = []
    module.__version__ = release
    module.npu = npu
    for name in schemas(release):
        namespace, _, short = name.partition("::")
        setattr(module, short, getattr(getattr(torch.ops, namespace), short))
    sys.modules["torch_npu"] = module
    sys.modules["torch_npu.npu"] = npu
    return module
