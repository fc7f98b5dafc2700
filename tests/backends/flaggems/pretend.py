# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver without a device: Triton compiles for sm_90, launches are written down.

FlagGems, its launch cache and Triton are the real ones; nothing is computed.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.backends.flaggems import interpreter


class Launches(list[tuple[Any, ...]]):
    """(grid, arguments) of each launch, with the addresses of tensors in their place."""


launches = Launches()


class Launcher:
    """Stands in for the C function that Triton compiles to launch a kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = src.fn.__name__

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        addresses = tuple(a.data_ptr() if hasattr(a, "data_ptr") else a for a in rest[4:])
        launches.append((self.name, (x, y, z), stream, function, addresses))


class Driver:
    """What Triton and FlagGems ask of a driver."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, *rest: (1, hash(name) & 0xFFFF, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        """All configurations are equally fast, after one run."""

        def benchmark(run: Any, quantiles: tuple[float, ...]) -> list[float]:
            run()
            return [1.0] * len(quantiles)

        return benchmark

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


def load() -> None:
    """FlagGems as a worker loads it, on that driver."""
    from triton.runtime import driver

    from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend, backend

    interpreter.pretend_cuda()
    driver.set_active(Driver())
    FlagGemsBackend.device_vendor = lambda self: "cuda"  # type: ignore[method-assign]
    backend.load()
