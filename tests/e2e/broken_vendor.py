# SPDX-License-Identifier: Apache-2.0
"""A plugin whose kernel fails, for VLLM_FL_PLUGIN_MODULES=broken_vendor."""

from vllm_fl.types import BackendImplKind, BackendPriority, OpImpl


def silu_and_mul(x):
    raise RuntimeError("the kernel broke")


def register_builtins(registry):
    registry.register_impl(
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.broken",
            kind=BackendImplKind.VENDOR,
            fn=silu_and_mul,
            vendor="broken",
            priority=BackendPriority.VENDOR,
        )
    )
