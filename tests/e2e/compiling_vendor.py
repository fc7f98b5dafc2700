# SPDX-License-Identifier: Apache-2.0
"""A plugin whose kernel is compiled as Triton's are: anew for one row, for numbers of rows that are
multiples of 16 and for others, and for each power of two of the size. It says so when it does.

For VLLM_FL_PLUGIN_MODULES=compiling_vendor; with COMPILES_UNANNOUNCED=1 the backend does not tell.
"""

import os
import sys

import torch

from vllm_fl.backends import Backend
from vllm_fl.types import BackendImplKind, BackendPriority, OpImpl

compiled = set()


class Compiling(Backend):
    device_types = ("cpu",)
    compiles_at_first_call = os.environ.get("COMPILES_UNANNOUNCED") != "1"

    def silu_and_mul(self, x):
        kind = (x.shape[0] == 1, x.shape[0] % 16 == 0, (x.numel() - 1).bit_length())
        if kind not in compiled:
            compiled.add(kind)
            print(f"compiled kind {kind}", file=sys.stderr, flush=True)
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]


def register_builtins(registry):
    registry.register_impl(
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.compiling",
            kind=BackendImplKind.VENDOR,
            fn=Compiling().silu_and_mul,
            vendor="compiling",
            priority=BackendPriority.VENDOR,
        )
    )
