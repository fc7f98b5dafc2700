# SPDX-License-Identifier: Apache-2.0
"""The worker, which claims layers when it is made: later than general plugins run."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


def claim_layers() -> None:
    """Register an own class for layers of vLLM. A name that is taken is an AssertionError."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.activation import QuickGELU, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for base in (RMSNorm, GemmaRMSNorm, SiluAndMul, QuickGELU, RotaryEmbedding):
        assert base.__name__ not in op_registry_oot, f"Duplicate op name: {base.__name__}"

        def forward_oot(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.forward_native(*args, **kwargs)

        own = type(f"Ascend{base.__name__}", (base,), {"forward_oot": forward_oot})
        own.forward_cpu = forward_oot  # this platform is still the CPU's
        CustomOp.register_oot(own, name=base.__name__)


class NPUWorker(CPUWorker):
    """Claims, then works as a CPU worker does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        claim_layers()
        super().__init__(*args, **kwargs)
