# SPDX-License-Identifier: Apache-2.0
"""The configuration table: each setting's names, form, meaning, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, did_you_mean
from .policy import check_kind, check_order_key, check_token

__all__ = [
    "BY_KEY",
    "BY_VARIABLE",
    "CONTEXT",
    "EXCLUSIVE",
    "PREFIX",
    "SETTINGS",
    "UNITED",
    "Setting",
    "read_tokens",
    "split_by_mode",
    "typed",
    "variable_names",
]

PREFIX = "VLLM_FL_"
CONTEXT = "policy_context"
"""The source of a value that a policy context gave."""
DEVICES = ("auto", "cpu", "cuda", "hip", "none")
"""What setup.py builds kernels for."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the configuration table.

    Attributes:
        name: the key in YAML and in Config.sources.
        form: what a value looks like, for people.
        summary: what it does.
        from_text: reads the environment variable's text.
        from_data: checks a YAML or JSON value; None where only the variable exists.
        default: shown in the table.
        variable: the environment variable.
    """

    name: str
    form: str
    summary: str
    from_text: Callable[[str], Any]
    from_data: Callable[[Any], Any] | None = None
    default: str = ""
    variable: str = ""

    @property
    def default_value(self) -> Any:
        """The default as a value; None where there is none."""
        return self.from_text(self.default) if self.default else None


def _bool_text(text: str) -> bool:
    folded = text.strip().lower()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise ConfigError(f'"{text}" is not a yes or no; valid: {", ".join((*_TRUE, *_FALSE))}')


def _bool_data(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"must be true or false, found {typed(value)}")


def _level(text: str) -> str:
    if text.upper() in LOG_LEVELS:
        return text.upper()
    raise ConfigError(
        f'unknown level "{text}"; valid: {", ".join(LOG_LEVELS)}.'
        f"{did_you_mean(text.upper(), LOG_LEVELS)}"
    )


def _device(text: str) -> str:
    if text in DEVICES:
        return text
    raise ConfigError(
        f'unknown device "{text}"; valid: {", ".join(DEVICES)}.{did_you_mean(text, DEVICES)}'
    )


def _names_text(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _names_data(value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ConfigError(f"must be a list of names, found {typed(value)}")


def _orders_text(text: str) -> dict[str, tuple[str, ...]]:
    orders: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        op_name, separator, tokens = entry.partition("=")
        op_name = op_name.strip()
        if not separator or not op_name or not tokens.strip():
            raise ConfigError(
                f'cannot read the entry "{entry}"; expected op=token|token, entries separated '
                'by ";", for example rms_norm=vendor:cpu|reference;silu_and_mul=native'
            )
        if op_name in orders:
            raise ConfigError(f'the op "{op_name}" is given twice')
        orders[check_order_key(op_name)] = read_tokens(tokens)
    return orders


def _orders_data(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"must map op names to lists of order tokens, found {typed(value)}")
    orders: dict[str, tuple[str, ...]] = {}
    for key, tokens in split_by_mode(value):
        if key in orders:
            raise ConfigError(f'the order of "{key}" is given twice')
        orders[key] = read_tokens(tokens)
    return orders


def split_by_mode(orders: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Orders by key: {"op": {"eager": [...]}} gives "op@eager"."""
    for op_name, order in orders.items():
        if isinstance(order, Mapping):
            for mode, tokens in order.items():
                yield check_order_key(f"{op_name}@{mode}"), tokens
        else:
            yield check_order_key(str(op_name)), order


def read_tokens(value: Any) -> tuple[str, ...]:
    """Order tokens from a list, or from text with \"|\" between them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split("|")]
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(f"must be a list of order tokens, found {typed(value)}")
    for token in value:
        if not isinstance(token, str):
            raise ConfigError(f"must be a list of order tokens, found {typed(token)} in it")
        check_token(token)
    return tuple(value)


def typed(value: Any) -> str:
    """A value and its type, for an error."""
    return f"{value!r} of type {type(value).__name__}"


def _row(
    variable: str,
    name: str,
    form: str,
    summary: str,
    from_text: Callable[[str], Any],
    from_data: Callable[[Any], Any] | None = None,
    default: str = "",
) -> Setting:
    return Setting(name, form, summary, from_text, from_data, default, PREFIX + variable)


SETTINGS: tuple[Setting, ...] = (
    _row("ENABLED", "enabled", "0 or 1", "0: nothing is patched or replaced.", _bool_text,
         default="1"),
    _row("CONFIG", "config", "path", "A YAML file with the keys of this table.", str),
    _row("PREFER", "prefer", "flagos, vendor or reference",
         "This kind first, the others after it.", check_kind, check_kind),
    _row("STRICT", "strict", "0 or 1",
         "Plugin errors raise; a guard's rejection of the first choice is an error; per-op "
         "orders are closed.", _bool_text, _bool_data, "0"),
    _row("PER_OP", "op_backends", "op=token|token;op2=token",
         "The order for an op. Tokens: flagos, vendor, vendor:<name>, reference, "
         "impl:<impl_id>, native. op@eager or op@compiled is for that mode alone. In YAML: "
         "op: [token, token], or op: {compiled: [token]}.", _orders_text, _orders_data),
    _row("ALLOW_VENDORS", "allow_vendors", "name,name", "Only these vendors.",
         _names_text, _names_data),
    _row("DENY_VENDORS", "deny_vendors", "name,name", "Not these vendors.",
         _names_text, _names_data),
    _row("PLUGIN_MODULES", "plugin_modules", "module,module",
         "Modules with a register_builtins(registry) to load as plugins.", _names_text),
    _row("LOG_LEVEL", "log_level", ", ".join(LOG_LEVELS),
         "Level of the vllm_fl logger (stderr).", _level, default="INFO"),
    _row("OOT_WHITELIST", "oot_whitelist", "op,op", "Serve only these vLLM layers and functions.",
         _names_text),
    _row("OOT_BLACKLIST", "oot_blacklist", "op,op", "Leave these vLLM layers and functions native.",
         _names_text, _names_data),
    _row("FLAGOS_WHITELIST", "flagos_whitelist", "op,op", "FlagGems for these ops only.",
         _names_text),
    _row("FLAGOS_BLACKLIST", "flagos_blacklist", "op,op", "No FlagGems for these ops.",
         _names_text, _names_data),
    _row("PLATFORM", "platform", "a vendor's name",
         "Take the device to be this vendor's instead of detecting it, and offer vLLM our "
         "platform for it.", str),
    _row("DEVICE", "device", "auto, cpu, cuda, hip or none",
         "For setup.py alone: which native kernels to build.", _device, default="auto"),
)  # fmt: skip

BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
BY_KEY = {setting.name: setting for setting in SETTINGS if setting.from_data is not None}
UNITED = ("deny_vendors", "oot_blacklist", "flagos_blacklist")
"""Deny lists: the sources' entries add up."""
EXCLUSIVE = (("oot_whitelist", "oot_blacklist"), ("flagos_whitelist", "flagos_blacklist"))
"""Lists that must not be given together."""


def variable_names() -> tuple[str, ...]:
    """Every environment variable of vllm_fl, for vLLM's own validation of names."""
    return tuple(BY_VARIABLE)
