# SPDX-License-Identifier: Apache-2.0
"""Acme's kernels for vLLM: vllm_fl finds this module through the package's entry point."""

from torch.nn.functional import silu

from vllm_fl.backends import Backend
from vllm_fl.types import BackendImplKind, BackendPriority, OpImpl

from .norms import triton


class Acme(Backend):
    device_types = ("cpu",)  # the chips it runs on, by PyTorch's name

    def silu_and_mul(self, x):
        gate, up = x.chunk(2, dim=-1)
        return (silu(gate) * up).contiguous()  # a vendor calls its kernel here


def register_builtins(registry):
    silu_and_mul = OpImpl(
        op_name="silu_and_mul",
        impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR,
        fn=Acme().silu_and_mul,
        vendor="acme",
        priority=BackendPriority.VENDOR,
    )
    registry.register_many([silu_and_mul, *triton.implementations])
