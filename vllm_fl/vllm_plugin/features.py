# SPDX-License-Identifier: Apache-2.0
"""What this vLLM offers: tested for, never derived from a version number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ..backends.vendor.devices import VENDORS, detect, facts_of
from ..backends.vendor.vllm_extension import has_kernel
from ..dispatch.default import get_default_manager
from ..dispatch.log import logger
from ..dispatch.types import DeviceFacts, VendorInfo

__all__ = [
    "batch_invariant",
    "has_kernels",
    "on_cpu",
    "platform_device",
    "platform_has_kernels",
    "runs_triton",
    "tuned_by_vllm",
]


def platform_device(known: Mapping[str, VendorInfo] = MappingProxyType({})) -> DeviceFacts:
    """The device facts of the platform that vLLM chose, without touching the device.

    Args:
        known: vendors beside those of the device table, e.g. those that plugins brought.
    """
    facts = _facts_of_platform(known)
    if facts.vendor != "cuda" or facts.name:
        return facts
    from vllm.platforms import current_platform

    try:  # of NVIDIA's library, which leaves CUDA alone; a shipped policy may be for the product
        return replace(facts, name=str(current_platform.get_device_name() or ""))
    except Exception as error:
        logger.debug("the GPU's name is not known: %r", error)
        return facts


def _facts_of_platform(known: Mapping[str, VendorInfo]) -> DeviceFacts:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return facts_of("cpu")
    device_type = current_platform.device_type
    found = detect(None)
    if found.device_type == device_type:
        return found  # by its markers: many vendors' device type is "cuda"
    for vendor, is_vendor in (
        ("rocm", current_platform.is_rocm),
        ("cuda", current_platform.is_cuda),
        ("xpu", current_platform.is_xpu),
    ):
        if is_vendor():
            return facts_of(vendor)
    table: dict[str, VendorInfo] = {info.name: info for info in VENDORS} | dict(known)
    vendors = [info.name for info in table.values() if info.device_type == device_type]
    name = vendors[0] if len(vendors) == 1 else device_type
    return DeviceFacts(name, device_type)


def platform_has_kernels() -> bool:
    """Whether vLLM brings compiled kernels for its layers' forwards on this platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike() or current_platform.is_xpu())


def has_kernels(names: Iterable[str]) -> bool:
    """Whether vLLM's extension brings these kernels, such as "_moe_C.moe_sum", for this platform.

    A schema without a kernel does not count.
    """
    from vllm.platforms import current_platform

    return all(has_kernel(name, current_platform.dispatch_key) for name in names)


def on_cpu() -> bool:
    """Whether vLLM runs on its CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def runs_triton() -> bool:
    """Whether vLLM's own Triton kernels can run."""
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def tuned_by_vllm() -> bool:
    """Whether the device is of a vendor for whose devices vLLM makes kernels, with its extension
    or without."""
    return get_default_manager().device.vendor in ("cuda", "rocm", "xpu")


def batch_invariant() -> bool:
    """Whether vLLM was asked for results that do not depend on the batch."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))
