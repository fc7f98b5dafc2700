# SPDX-License-Identifier: Apache-2.0
"""Facts about each vendor's device, as data, and a detection that imports and touches nothing."""

from __future__ import annotations

from pathlib import Path

from ...dispatch.config import check_names
from ...dispatch.registry import OpRegistry
from ...dispatch.types import DeviceFacts, VendorInfo

__all__ = ["VENDORS", "detect", "facts_of", "register_builtins"]

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


def facts_of(vendor: str, *, source: str = "vendor", assumed: bool = False) -> DeviceFacts:
    """The device facts of a vendor from the table.

    Raises:
        ConfigError: the vendor is not in the table; lists the valid names.
    """
    table = {info.name: info for info in VENDORS}
    check_names([vendor], table, what="vendor", source=source)
    return DeviceFacts(vendor, table[vendor].device_type, assumed=assumed)


def detect(vendor: str | None, dev: Path = Path("/dev")) -> DeviceFacts:
    """The device of this machine.

    Args:
        vendor: from VLLM_FL_PLATFORM; None looks for the vendors' device nodes.
        dev: where device nodes lie.
    """
    if vendor is not None:
        return facts_of(vendor, source="environment variable VLLM_FL_PLATFORM")
    for name, pattern in _NODES:
        if next(dev.glob(pattern), None) is not None:
            return facts_of(name)
    return facts_of("cpu")
