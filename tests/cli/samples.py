# SPDX-License-Identifier: Apache-2.0
"""A machine that is the same everywhere: what the commands' tests and pages show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_fl.backends import Backend
from vllm_fl.cli.diagnosis import diagnose
from vllm_fl.cli.explain import explain
from vllm_fl.cli.inventory import inventory
from vllm_fl.cli.list import listing
from vllm_fl.cli.snapshot import snapshot
from vllm_fl.dispatch import Config, OpImpl, OpManager, OpRegistry, load_config
from vllm_fl.dispatch.discovery import PluginRecord
from vllm_fl.dispatch.types import BackendImplKind, DeviceFacts, Origin, VendorInfo
from vllm_fl.native import how_to_build
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.ops.normalization import RMS_NORM

HERE = Path(__file__).parent
OURS = Origin("builtin", "vllm_fl", "vllm-fl", "0.1.0")
ACME = Origin("entry_point", "acme", "vllm-plugin-acme", "1.2.0")


class Kernels(Backend):
    """Two functions that nobody calls."""

    def silu_and_mul(self, x: Any) -> Any:
        return x

    def rms_norm(self, x: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> Any:
        return x


class Acme(Kernels):
    device_types = ("acme",)
    requires = ("acme_kernels",)


class Cpu(Kernels):
    device_types = ("cpu",)


class Reference(Kernels):
    pass


def whole_vectors(facts: Any) -> bool | str:
    """A guard on what a layer knows."""
    size = facts["hidden_size"]
    return size % 8 == 0 or f"hidden_size {size} is not a multiple of 8"


def contiguous(x: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> bool | str:
    """A guard on what changes from call to call."""
    return x.is_contiguous() or "x is not contiguous"


def impls_of(backend: Kernels, impl_id: str, priority: int, **guards: Any) -> list[OpImpl]:
    """Both functions of a backend; the guards are the norm's."""
    head, _, tail = impl_id.partition(".")
    kind = BackendImplKind(head if head != "default" else "flagos")
    fields: dict[str, Any] = {"vendor": tail} if head == "vendor" else {}
    return [
        OpImpl("silu_and_mul", impl_id, kind, backend.silu_and_mul, priority=priority, **fields),
        OpImpl("rms_norm", impl_id, kind, backend.rms_norm, priority=priority, **fields, **guards),
    ]


def registry() -> OpRegistry:
    """Reference, the CPU's kernels, and a vendor whose package and device are elsewhere."""
    made = OpRegistry()
    with made.batch(OURS):
        for contract in (SILU_AND_MUL, RMS_NORM):
            made.declare(contract.signature)
        made.register_many(impls_of(Reference(), "reference.torch", 50))
        guards = {"supports_layer": whole_vectors, "supports": contiguous}
        made.register_many(impls_of(Cpu(), "vendor.cpu", 100, **guards))
    with made.batch(ACME):
        made.declare_vendor(VendorInfo("acme", "acme", "Acme"))
        made.register_many(impls_of(Acme(), "vendor.acme", 100))
    made.plugins = (
        PluginRecord("vllm_fl", "builtin", "vllm_fl", "vllm-fl", "0.1.0", 0.1, 4),
        PluginRecord("acme", "entry_point", "vllm_fl_acme", "vllm-plugin-acme", "1.2.0", 0.1, 2),
    )
    return made


def manager(config: Config | None = None, *, cpu: bool = True) -> OpManager:
    """A manager of this machine."""
    device = DeviceFacts("cpu", "cpu") if cpu else DeviceFacts("acme", "acme")
    return OpManager(registry(), config=config or Config(), device=device)


def found(made: OpManager | None = None) -> dict[str, Any]:
    """What the survey of this machine finds."""
    data = inventory(made or manager())
    # Of these functions' own sources.
    return {**data, "config_error": None, "fingerprint": "5d2490a292aa7aba"}


VERSIONS: list[dict[str, Any]] = [
    {"package": "python", "version": "3.12.3", "distribution": ""},
    {"package": "vllm-fl", "version": "0.1.0", "distribution": "vllm-fl"},
    {"package": "vllm", "version": "0.32.0", "distribution": "vllm"},
    {"package": "torch", "version": "2.13.0+cpu", "distribution": "torch"},
    {"package": "triton", "version": "3.9.0", "distribution": "triton"},
    {"package": "flag-gems", "version": "5.0.2", "distribution": "flag-gems"},
    {"package": "torch-npu", "version": None, "distribution": ""},
    {"package": "numpy", "version": "2.3.5", "distribution": "numpy"},
    {"package": "sqlalchemy", "version": "2.0.48", "distribution": "sqlalchemy"},
]

IMPORTS: dict[str, str | None] = {"torch": None, "numpy": None}

HOOKS: dict[str, Any] = {
    "error": None,
    "vllm": "0.32.0",
    "enabled": True,
    "device": "cpu",
    "installed": [
        {
            "name": "vllm.v1.worker.worker_base.WorkerBase.vllm_fl_dispatch",
            "purpose": "answer for the route table over RPC",
            "in_place": True,
        }
    ],
    "awaited": ["vllm.model_executor.layers.layernorm"],
    "with_a_model": [
        {"name": "forward of modules like Qwen3's attention", "purpose": "serve fused_qk_norm_rope"}
    ],
}


NATIVE: dict[str, Any] = {
    "asked": "auto",
    "torch": "2.13.0+cpu",
    "problem": None,
    "devices": [
        {
            "device": "cpu",
            "state": "works, with AVX512",
            "code": "works",
            "advice": "",
            "compiler": "g++ 12.2.0",
            "architectures": ["DEFAULT", "AVX2", "AVX512"],
        },
        {
            "device": "cuda",
            "state": "vllm_fl was built without CUDA kernels: torch 2.13.0+cpu is built without "
            "CUDA",
            "code": "missing",
            "advice": how_to_build("cuda"),
            "compiler": None,
            "architectures": [],
        },
    ],
}


def platform() -> dict[str, Any]:
    """What is found of vLLM's platform."""
    from vllm_fl.vllm_plugin.shims import survey

    active = "vllm.platforms.cpu.CpuPlatform"
    return {
        "error": None,
        "steps_in": False,
        "reason": "the device is a CPU, which vLLM's own platform serves",
        "vendor": "cpu",
        "extension": True,
        "asked": None,
        "rival": None,
        "active": active,
        "shims": survey(active, ours=False),
    }


def sample_list() -> dict[str, Any]:
    """The answer of `vllm-fl list`."""
    return listing(found())


def sample_explain() -> dict[str, Any]:
    """The answer of `vllm-fl explain rms_norm --vendor acme --shape 32,4096`."""
    return explain(manager(), "rms_norm", shapes={"": (32, 4096)}, vendor="acme")


def sample_config() -> dict[str, Any]:
    """The answer of `vllm-fl config` with a file and a variable."""
    import contextlib

    with contextlib.chdir(HERE):
        config = load_config({"VLLM_FL_CONFIG": "policy.yaml", "VLLM_FL_STRICT": "1"})
    return config.to_dict()


def sample_doctor() -> dict[str, Any]:
    """The answer of `vllm-fl doctor`."""
    return diagnose(VERSIONS, IMPORTS, found(), HOOKS, NATIVE, platform())


def sample_bench() -> dict[str, Any]:
    """The answer of `vllm-fl bench silu_and_mul --tokens 1,512`."""

    def row(impl_id: str, us: float, spread: float, ratio: float) -> dict[str, Any]:
        times = {"host_us": us, "device_us": us, "how": "wall"}
        return {"impl_id": impl_id, **times, "spread": spread, "ratio": ratio}

    refused = [{"impl_id": "vendor.ascend", "reason": "runs on npu, this device is cpu"}]
    said = {"policy": "vendor.cpu", "refused": refused}
    small = [row("vendor.cpu", 2.99, 0.063, 1.0), row("vendor.acme", 3.04, 0.071, 1.017)]
    large = [row("vendor.acme", 371.18, 0.012, 0.687), row("vendor.cpu", 540.25, 0.012, 1.0)]
    sizes = [
        {"tokens": 1, "arguments": {"x": "bfloat16[1, 8192]"}, **said, "timings": small,
         "fastest": None},
        {"tokens": 512, "arguments": {"x": "bfloat16[512, 8192]"}, **said, "timings": large,
         "fastest": "vendor.acme"},
    ]  # fmt: skip
    return {"op": "silu_and_mul", "device": "cpu", "dtype": "bfloat16", "sizes": sizes}


def sample_snapshot() -> dict[str, Any]:
    """The answer of `vllm-fl snapshot`."""
    return snapshot(VERSIONS, found(), machine="Linux-6.8-x86_64-with-glibc2.39")
