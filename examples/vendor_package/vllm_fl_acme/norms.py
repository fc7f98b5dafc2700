# SPDX-License-Identifier: Apache-2.0
"""The RMS norm by a Triton kernel: a second backend, because it needs what the first does not."""

import os

from vllm_fl.backends import Backend


class AcmeTriton(Backend):
    """Acme's Triton kernels, which this example runs in Triton's interpreter."""

    impl_id = "vendor.acme.triton"
    vendor = "acme"
    device_types = ("cpu",)
    requires = ("torch", "triton")
    api_version = 1  # of vllm_fl's interface, for which this was written

    def is_available(self):
        # What Triton itself asks, when a kernel is defined; it is not imported for this.
        if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "yes", "y", "on"):
            return (
                "Triton compiles nothing for a CPU; its interpreter is on with TRITON_INTERPRET=1"
            )
        return True

    def load(self):
        """Import Triton and the kernel: in the worker, before a layer is first bound."""
        from . import kernels

        self.kernels = kernels


triton = AcmeTriton()


def _one_vector(facts):
    """A row is loaded at once, by one program."""
    if facts["variance_size"] is not None:
        return f"variance_size {facts['variance_size']} is given"
    if facts["weight_size"] is None:
        return "the layer has no weight"
    most, size = 65536, facts["hidden_size"]
    return 0 < size <= most or f"hidden_size {size} is not within 1 and {most}"


def _rows(x, weight, epsilon, variance_size=None):
    if x.requires_grad:
        return "a gradient is required, and the kernel has none"
    return x.is_contiguous() or "x is not contiguous"


@triton.implements(supports_layer=_one_vector, supports=_rows)
def rms_norm(x, weight, epsilon, variance_size=None):
    """x: (..., hidden), weight: (hidden,) -> x's shape and dtype."""
    return triton.kernels.rms_norm(x, weight, epsilon)
