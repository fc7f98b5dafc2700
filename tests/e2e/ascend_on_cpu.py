# SPDX-License-Identifier: Apache-2.0
"""vendor.ascend on a CPU, for VLLM_FL_PLUGIN_MODULES=ascend_on_cpu: torch_npu is the harness of
its tests, and the backend says that it takes CPU tensors."""


def register_builtins(registry):
    from tests.backends.vendor.ascend.harness import STATE, install
    from vllm_fl.backends.vendor.ascend.ascend import AscendBackend

    install(device="cpu")
    AscendBackend.device_types = ("npu", "cpu")
    STATE.calls = Names()


class Names(list):
    """Keeps the operators' names, and not what they were given."""

    def append(self, call):
        if call[0] not in self:
            super().append(call[0])
