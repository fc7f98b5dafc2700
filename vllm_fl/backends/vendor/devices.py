# SPDX-License-Identifier: Apache-2.0
"""Facts about each vendor's device, as data, and a detection that imports and touches nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...dispatch.config import check_names
from ...dispatch.errors import ConfigError
from ...dispatch.log import logger
from ...dispatch.registry import OpRegistry
from ...dispatch.types import DeviceFacts, VendorInfo

__all__ = ["VENDORS", "detect", "facts_of", "observed", "register_builtins"]

VENDORS: tuple[VendorInfo, ...] = (
    VendorInfo("cpu", "cpu", "vLLM's CPU kernels"),
    VendorInfo("cuda", "cuda", "NVIDIA"),
    VendorInfo("rocm", "cuda", "AMD ROCm"),
    VendorInfo("xpu", "xpu", "Intel"),
    VendorInfo("ascend", "npu", "Huawei Ascend"),
    VendorInfo("cambricon", "mlu", "Cambricon"),
    VendorInfo("metax", "cuda", "MetaX MACA"),
    VendorInfo("mthreads", "musa", "Moore Threads"),
    VendorInfo("iluvatar", "cuda", "Iluvatar CoreX"),
    VendorInfo("kunlunxin", "cuda", "Kunlunxin"),
    VendorInfo("hygon", "cuda", "Hygon DCU"),
    VendorInfo("enflame", "gcu", "Enflame GCU"),
    VendorInfo("tsingmicro", "txda", "Tsingmicro"),
    VendorInfo("thead", "cuda", "T-Head PPU"),
    VendorInfo("sunrise", "ptpu", "Sunrise PTPU"),
)

_NODES = (("ascend", "davinci*"), ("metax", "mxcd"), ("hygon", "mkfd"), ("sunrise", "tang*"),
          ("cuda", "nvidia[0-9]*"), ("rocm", "kfd"))  # fmt: skip
"""Device nodes by which a chip is recognised, most particular first."""


def register_builtins(registry: OpRegistry) -> None:
    """Make the vendors' names known."""
    for vendor in VENDORS:
        registry.declare_vendor(vendor)


def facts_of(
    vendor: str,
    known: Mapping[str, VendorInfo] = MappingProxyType({}),
    *,
    source: str = "vendor",
    assumed: bool = False,
) -> DeviceFacts:
    """The device facts of a vendor of the table, or of one that a plugin brought.

    Args:
        known: vendors beside those of the table, e.g. `registry.snapshot().known_vendors()`.
        source: who names the vendor, for the error.

    Raises:
        ConfigError: nobody knows the vendor (lists the valid names), or its device type.
    """
    table = {**{info.name: info for info in VENDORS}, **known}
    check_names([vendor], table, what="vendor", source=source)
    if not table[vendor].device_type:
        raise ConfigError(
            f'{source}: the vendor "{vendor}" has implementations, but nobody said what PyTorch '
            "calls its device. Its package should set Backend.device_types, or call "
            f'registry.declare_vendor(VendorInfo("{vendor}", "<device type>"))'
        )
    return DeviceFacts(vendor, table[vendor].device_type, assumed=assumed)


def detect(
    vendor: str | None,
    known: Mapping[str, VendorInfo] = MappingProxyType({}),
    dev: Path = Path("/dev"),
) -> DeviceFacts:
    """The device of this machine.

    Args:
        vendor: from VLLM_FL_PLATFORM; None looks for the vendors' device nodes.
        known: vendors beside those of the table.
        dev: where device nodes lie.
    """
    if vendor is not None:
        return facts_of(vendor, known, source="environment variable VLLM_FL_PLATFORM")
    for name, pattern in _NODES:
        if next(dev.glob(pattern), None) is not None:
            return facts_of(name)
    return facts_of("cpu")


def observed(facts: DeviceFacts) -> DeviceFacts:
    """The same facts, with the product's name and architecture where PyTorch tells them.

    It asks the device, which initialises it: only for a process that has done so already or
    will not fork. Nothing is imported, and where nothing can be learned nothing is changed.
    """
    torch = sys.modules.get("torch")
    device: Any = getattr(torch, facts.device_type, None)
    if facts.device_type == "cpu" or not hasattr(device, "get_device_name"):
        return facts
    try:
        if not device.is_available():
            return facts
        name = str(device.get_device_name())
        arch = ""
        if facts.vendor == "cuda":
            arch = "sm_{}{}".format(*device.get_device_capability())
        elif facts.vendor == "rocm":
            arch = str(device.get_device_properties(0).gcnArchName).partition(":")[0]
    except Exception as error:  # a driver that answers with an error is none of our business
        logger.debug("the device was not described: %s: %s", type(error).__name__, error)
        return facts
    return replace(facts, name=name, arch=arch)
