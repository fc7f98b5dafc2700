# SPDX-License-Identifier: Apache-2.0
"""What ships with vllm_fl, by name: the dispatch core imports none of it by itself."""

BUILTIN_MODULES: tuple[str, ...] = (
    "vllm_fl.ops",
    "vllm_fl.backends.vendor.devices",
    "vllm_fl.backends.reference.register_ops",
    "vllm_fl.backends.vendor.cpu.register_ops",
    "vllm_fl.backends.vendor.ascend.register_ops",
    "vllm_fl.backends.flaggems.register_ops",
    "vllm_fl.backends.vendor.cuda.register_ops",
)
"""Modules with `register_builtins(registry)`, in the order in which they are run."""

DEVICE_PROBE = "vllm_fl.backends.vendor.devices:detect"
"""`detect(vendor: str | None, known: Mapping[str, VendorInfo]) -> DeviceFacts`: the device of this
process."""
