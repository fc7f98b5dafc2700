# SPDX-License-Identifier: Apache-2.0
"""What the tests ask a worker: the methods of this class are mixed into vLLM's own worker class
(`worker_extension_cls`) and called over RPC. Nothing here imports vllm_fl, so that a worker
without the plugin stays without it."""

import sys
from typing import Any


class Probes:
    """Every answer is JSON-ready."""

    def probe_profile_start(self) -> None:
        """Record the torch operators that run from here on."""
        from torch.profiler import ProfilerActivity, profile

        self._probe = profile(activities=[ProfilerActivity.CPU])
        self._probe.start()

    def probe_profile_stop(self) -> list[str]:
        """The names of the operators that ran."""
        self._probe.stop()
        return sorted({event.key for event in self._probe.key_averages()})

    def probe_layers(self) -> list[list[str | None]]:
        """For each module of the model: its name, its class, and the function behind
        `_forward_method` where it is one of vLLM's CustomOps."""
        return [
            [name, _name(type(module)), _name(getattr(module, "_forward_method", None))]
            for name, module in self.get_model().named_modules()
        ]

    def probe_vllm(self) -> dict[str, Any]:
        """vLLM's layer registries, the constructors of the layers that the plugin serves, and
        what of vllm_fl this process imported and installed."""
        from vllm.model_executor.custom_op import op_registry, op_registry_oot

        hooks = sys.modules.get("vllm_fl.vllm_plugin.hooks")
        return {
            "op_registry": {name: _name(cls) for name, cls in op_registry.items()},
            "op_registry_oot": {name: _name(cls) for name, cls in op_registry_oot.items()},
            "constructors": {
                name: _name(op_registry[name].__init__)
                for name in ("rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding")
            },
            "answers_rpc": hasattr(self, "vllm_fl_dispatch"),
            "imported": sorted(name for name in sys.modules if name.startswith("vllm_fl")),
            "hooks": [hook.name for hook in hooks.installed()] if hooks is not None else [],
            "finders": [str(finder) for finder in sys.meta_path if _is_ours(finder)],
        }


def _is_ours(finder: Any) -> bool:
    return getattr(finder, "__module__", type(finder).__module__).startswith("vllm_fl.")


def _name(found: Any) -> str | None:
    """Module, name and, for a function, its line: equal in two processes for one piece of code."""
    if found is None:
        return None
    function = getattr(found, "__func__", found)
    code = getattr(function, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{function.__module__}.{function.__qualname__}{line}"
