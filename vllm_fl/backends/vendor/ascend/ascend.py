# SPDX-License-Identifier: Apache-2.0
"""The backend of torch_npu's operators (torch.ops.npu), releases 2.10 to 2.13."""

from __future__ import annotations

from typing import ClassVar

from packaging.version import Version

from ....dispatch.log import logger
from ....dispatch.types import BackendImplKind
from ...base import Backend

__all__ = ["OPERATORS", "AscendBackend", "backend", "backend_310p", "backend_a5"]

OPERATORS = (
    "npu_add_rms_norm_v2",
    "npu_attention_update",
    "npu_clipped_swiglu",
    "npu_dynamic_quant",
    "npu_fast_gelu",
    "npu_gelu",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_moe_token_unpermute",
    "npu_mrope",
    "npu_rms_norm",
    "npu_scatter_pa_kv_cache",
    "npu_silu",
    "npu_swiglu",
    "npu_top_k_top_p",
)
"""The operators that the implementations for A2 and A3 call."""

OLDEST, NEWEST = Version("2.10"), Version("2.13")

CHIPS = {
    "310P": range(200, 206),
    "A2": range(220, 226),
    "A3": range(250, 256),
    "A5": range(260, 261),
}
"""Chip to what `torch.npu.get_soc_version()` says of it."""


class AscendBackend(Backend):
    """Operators of torch_npu whose documented limits the guards keep.

    Arguments with a default are passed by keyword, because releases inserted new ones in between.
    None of the operators is documented for tensors without elements, so those do not reach them.

    Attributes:
        chips: the families that the implementations are for.
        operators: what they call.
    """

    chips: ClassVar[tuple[str, ...]] = ("A2", "A3")
    operators: ClassVar[tuple[str, ...]] = OPERATORS

    impl_id = "vendor.ascend"
    kind = BackendImplKind.VENDOR
    vendor = "ascend"
    device_types = ("npu",)
    requires = ("torch", "torch_npu")

    def load(self) -> None:
        """Import torch_npu and make sure that it and the chip are of those that are known.

        Raises:
            ImportError: the loader's own, where CANN is not there.
            RuntimeError: an operator is missing, or the chip is of another family.
        """
        import torch
        import torch_npu

        release = Version(Version(torch_npu.__version__).base_version)
        if not OLDEST <= Version(f"{release.major}.{release.minor}") <= NEWEST:
            logger.warning(
                "torch_npu %s is not of the releases that vendor.ascend was written for "
                "(%s to %s); compare with `vllm-fl verify`",
                torch_npu.__version__,
                OLDEST,
                NEWEST,
            )
        missing = [name for name in self.operators if not hasattr(torch.ops.npu, name)]
        if missing:
            raise RuntimeError(f"torch_npu {torch_npu.__version__} has no {', '.join(missing)}")
        # The first call that touches the device: this runs in the worker, behind every fork.
        soc = torch_npu.npu.get_soc_version()
        family = next((chip for chip, versions in CHIPS.items() if soc in versions), "unknown")
        if family not in self.chips:
            raise RuntimeError(
                f"it is for {' and '.join(self.chips)}, and this chip is "
                f"{torch_npu.npu.get_device_name()} (version {soc}, {family})"
            )


class Ascend310PBackend(AscendBackend):
    """What is known to run on the 310P: no operator that is documented for A2 and A3 alone, and
    no bfloat16."""

    impl_id = "vendor.ascend.310p"
    chips = ("310P",)
    operators = ("npu_add_rms_norm", "npu_fast_gelu", "npu_rms_norm", "npu_swiglu")


class AscendA5Backend(AscendBackend):
    """What is known to run on the A5: no operator that is documented for A2 and A3 alone."""

    impl_id = "vendor.ascend.a5"
    chips = ("A5",)
    operators = ("npu_add_rms_norm", "npu_moe_gating_top_k", "npu_rms_norm", "npu_swiglu")


backend = AscendBackend()
backend_310p = Ascend310PBackend()
backend_a5 = AscendA5Backend()
