# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001  (Chinese has punctuation of its own)
"""The words of the settings' table in Chinese, by the English ones: a text that changes in the code
has no translation until somebody gives it one."""

HEADER = "| 变量 | YAML 键 | 取值 | 作用 |"
DEFAULT = "（默认 {}）"

WORDS = {
    "0 or 1": "0 或 1",
    "path": "路径",
    "flagos, vendor or reference": "flagos、vendor 或 reference",
    "op=token|token;op2=token": "op=标记|标记;op2=标记",
    "name,name": "名称,名称",
    "module,module": "模块,模块",
    "DEBUG, INFO, WARNING, ERROR, CRITICAL": "DEBUG、INFO、WARNING、ERROR、CRITICAL",
    "op,op": "算子,算子",
    "a vendor's name": "厂商名称",
    "auto, cpu, cuda, hip or none": "auto、cpu、cuda、hip 或 none",
    "0: nothing is patched or replaced.": "0：不修补、不替换任何东西。",
    "A YAML file with the keys of this table.": "一个 YAML 文件，使用本表中的键。",
    "This kind first, the others after it.": "优先使用这一类实现，其余排在其后。",
    "Plugin errors raise; a guard's rejection of the first choice is an error; per-op orders are "
    "closed.": "插件出错即抛出异常；首选实现被其守卫拒绝视为错误；逐算子的顺序不再向后补充。",
    "The order for an op. Tokens: flagos, vendor, vendor:<name>, reference, impl:<impl_id>, "
    "native. op@eager or op@compiled is for that mode alone. In YAML: op: [token, token], or op: "
    "{compiled: [token]}.": "某个算子的选择顺序。标记：flagos、vendor、vendor:<名称>、reference、"
    "impl:<impl_id>、native。op@eager 或 op@compiled 只对该模式有效。YAML 写法：op: [标记, 标记]，"
    "或 op: {compiled: [标记]}。",
    "Only these vendors.": "只使用这些厂商。",
    "Not these vendors.": "不使用这些厂商。",
    "Modules with a register_builtins(registry) to load as plugins.": "作为插件加载的模块，"
    "其中须有 register_builtins(registry)。",
    "Level of the vllm_fl logger (stderr).": "vllm_fl 日志的级别（写到 stderr）。",
    "Serve only these vLLM layers and functions.": "只接管 vLLM 的这些层和函数。",
    "Leave these vLLM layers and functions native.": "vLLM 的这些层和函数保持原生。",
    "FlagGems for these ops only.": "只对这些算子使用 FlagGems。",
    "No FlagGems for these ops.": "对这些算子不使用 FlagGems。",
    "Take the device to be this vendor's instead of detecting it, and offer vLLM our platform for "
    "it.": "不做检测，直接认定设备属于该厂商，并向 vLLM 提供我们的平台。",
    "For setup.py alone: which native kernels to build.": "只用于 setup.py：编译哪些原生内核。",
}
