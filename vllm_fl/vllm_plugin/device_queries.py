# SPDX-License-Identifier: Apache-2.0
"""Questions about a device before anything has been initialised on it.

On NVIDIA they go to NVML, so that vLLM can still fork its workers; elsewhere torch's module of
the device type answers, which initialises the device.

An index is that of a chip among those which the process may see, as torch counts. NVML counts all
of the machine, and is given the index that the platform has for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..backends.vendor.device_table import VendorDevice

__all__ = ["capability", "memory", "name", "physical_index"]


def _ask_nvml(chip: int | str, ask: Callable[[Any, Any], Any]) -> Any:
    """Ask about a chip by its index in the machine, or by its UUID."""
    from vllm.utils.import_utils import import_pynvml

    pynvml = import_pynvml()
    pynvml.nvmlInit()
    try:
        by_uuid = isinstance(chip, str)
        find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
        return ask(pynvml, find(chip))
    finally:
        pynvml.nvmlShutdown()


def _torch_module(device: VendorDevice) -> Any:
    import torch

    return getattr(torch, device.device_type)


def physical_index(device: VendorDevice, entry: str, variable: str) -> int:
    """The index in the machine of what one entry of a visible-devices variable names: an index,
    or on NVIDIA a UUID.

    Raises:
        ValueError: it names no chip of this machine.
    """
    try:
        return int(entry)
    except ValueError:
        pass
    expected = "an index"
    if device.name == "cuda":
        expected = "an index or the whole UUID of a chip of this machine"
        try:
            return int(_ask_nvml(entry, lambda nvml, handle: nvml.nvmlDeviceGetIndex(handle)))
        except Exception as error:
            raise ValueError(_unknown(device, variable, entry, expected)) from error
    raise ValueError(_unknown(device, variable, entry, expected))


def _unknown(device: VendorDevice, variable: str, entry: str, expected: str) -> str:
    return (
        f"vllm_fl's platform for {device.name}: {variable} has to name {expected}, found "
        f"{entry!r}; name its index"
    )


def capability(
    device: VendorDevice, index: int, physical: Callable[[int], int]
) -> tuple[int, int] | None:
    """(major, minor) of CUDA's compute capability; None where there is no such thing."""
    if device.name == "cuda":
        major, minor = _ask_nvml(
            physical(index), lambda nvml, handle: nvml.nvmlDeviceGetCudaComputeCapability(handle)
        )
        return int(major), int(minor)
    if device.device_type != "cuda":
        return None
    major, minor = _torch_module(device).get_device_capability(index)
    return int(major), int(minor)


def name(device: VendorDevice, index: int, physical: Callable[[int], int]) -> str:
    """The device's name."""
    if device.name == "cuda":
        found = _ask_nvml(physical(index), lambda nvml, handle: nvml.nvmlDeviceGetName(handle))
        return found.decode() if isinstance(found, bytes) else str(found)
    return str(_torch_module(device).get_device_name(index))


def memory(device: VendorDevice, index: int, physical: Callable[[int], int]) -> int:
    """The device's memory in bytes."""
    if device.name == "cuda":
        found = _ask_nvml(
            physical(index), lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle)
        )
        return int(found.total)
    return int(_torch_module(device).get_device_properties(index).total_memory)
