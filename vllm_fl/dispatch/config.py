# SPDX-License-Identifier: Apache-2.0
"""The only reader of VLLM_FL_* variables and of the YAML file. Every value knows its source.

Sources merge key by key, the first that speaks wins: environment, then vLLM's
``--additional-config '{"vllm_fl": {...}}'``, then the file named by VLLM_FL_CONFIG, then the
policies of packages for the device, then the device's shipped policy, then the default.
``op_backends`` merges op by op; deny lists unite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError, did_you_mean
from .policy import SelectionPolicy, token_matches
from .registry import OpRegistrySnapshot
from .settings import (
    BY_KEY,
    BY_VARIABLE,
    CONTEXT,
    EXCLUSIVE,
    PREFIX,
    SETTINGS,
    UNITED,
    Setting,
    read_tokens,
    split_by_mode,
    typed,
    variable_names,
)
from .types import DeviceFacts

ADDITIONAL_CONFIG = "--additional-config vllm_fl"
SHIPPED = "shipped policy"

_COMPANIES = {"cuda": "nvidia"}
"""Vendors whose products bear another name than theirs here."""

__all__ = [
    "ADDITIONAL_CONFIG",
    "PREFIX",
    "SETTINGS",
    "Config",
    "Setting",
    "check_names",
    "load_config",
    "shipped_policy",
    "sources_in_context",
    "variable_names",
]


@dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration of a process.

    Attributes:
        values: setting name to value; settings that nobody gave are absent.
        sources: setting name, or "per_op_order.<op>", to where the value came from.
        policy: the selection policy that follows from them.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    policy: SelectionPolicy = field(default_factory=SelectionPolicy)

    @property
    def enabled(self) -> bool:
        """False: vllm_fl does nothing."""
        return bool(self.values.get("enabled", True))

    @property
    def log_level(self) -> str:
        """Level of the vllm_fl logger."""
        return str(self.values.get("log_level", "INFO"))

    @property
    def platform(self) -> str | None:
        """The vendor that the device is taken to be; None: detect it."""
        return self.values.get("platform")

    @property
    def plugin_modules(self) -> tuple[str, ...]:
        """Modules to load as plugins."""
        return tuple(self.values.get("plugin_modules", ()))

    def serves_layer(self, op_name: str) -> bool:
        """Whether the OOT lists let vllm_fl serve the layer of this op."""
        whitelist = self.values.get("oot_whitelist")
        if whitelist is not None:
            return op_name in whitelist
        return op_name not in self.values.get("oot_blacklist", ())

    def to_dict(self) -> dict[str, Any]:
        """Setting to value and source, defaults included, JSON-ready."""
        shown: dict[str, Any] = {}
        for setting in SETTINGS:
            value = self.values.get(setting.name, setting.default_value)
            source: Any = self.sources.get(setting.name, "default")
            if setting.name == "op_backends":
                value = {op: list(tokens) for op, tokens in (value or {}).items()}
                source = {
                    op: self.sources.get(f"per_op_order.{op}", "default") for op in value
                } or "default"
            elif isinstance(value, (tuple, frozenset)):
                value = list(value)
            shown[setting.name] = {"value": value, "source": source}
        return shown

    def check_against(self, snapshot: OpRegistrySnapshot, notes: Sequence[str] = ()) -> None:
        """Refuse names of ops, vendors and implementations that nobody knows.

        Args:
            snapshot: the registry after discovery.
            notes: sentences to append, e.g. that a plugin failed to load.
        """
        ops = {*snapshot.declarations, *snapshot.impls_by_op}
        vendors = snapshot.known_vendors()
        more = "".join(f" {note}" for note in notes)
        for key, tokens in self.policy.per_op_order:
            source = self.sources.get(f"per_op_order.{key}", "the policy")
            op_name = key.partition("@")[0]
            check_names([op_name], ops, what="op", source=source, more=more)
            for token in tokens:
                head, _, tail = token.partition(":")
                if head == "vendor" and tail:
                    check_names([tail], vendors, what="vendor", source=source, more=more)
                if head == "impl" and not source.startswith(SHIPPED):  # a build may lack some
                    impls = snapshot.impls_by_op.get(op_name, ())
                    if not any(token_matches(token, impl) for impl in impls):
                        check_names(
                            [tail],
                            [impl.impl_id for impl in impls],
                            what=f"implementation of {op_name}",
                            source=source,
                            more=more,
                        )
        for name, valid, what in (
            ("allow_vendors", vendors, "vendor"),
            ("deny_vendors", vendors, "vendor"),
            ("flagos_whitelist", ops, "op"),
            ("flagos_blacklist", ops, "op"),
        ):
            names = getattr(self.policy, name)
            source = self.sources.get(name, "the policy")
            check_names(names or (), valid, what=what, source=source, more=more)


def check_names(
    names: Iterable[str], valid: Iterable[str], *, what: str, source: str, more: str = ""
) -> None:
    """Raise ConfigError for the first name that is not valid, with the valid ones."""
    known = sorted(valid)
    for name in names:
        if name not in known:
            raise ConfigError(
                f'{source}: unknown {what} "{name}"; valid: {", ".join(known) or "none"}.'
                f"{did_you_mean(name, known)}{more}"
            )


def sources_in_context(policy: SelectionPolicy, config: Config) -> dict[str, str]:
    """Where the values of a policy context come from: those that it shares with the
    configuration keep their source."""

    def values_of(policy: SelectionPolicy) -> dict[str, Any]:
        values = {f.name: getattr(policy, f.name) for f in fields(policy)}
        orders = values.pop("per_op_order")
        return values | {f"per_op_order.{op}": order for op, order in orders}

    base = values_of(config.policy)
    return {
        name: config.sources.get(name, CONTEXT) if base.get(name) == value else CONTEXT
        for name, value in values_of(policy).items()
    }


@dataclass(frozen=True, slots=True)
class _Given:
    """What one source said: values by setting name, and the place of each."""

    values: dict[str, Any]
    places: dict[str, str]


def load_config(
    environ: Mapping[str, str] | None = None,
    additional: Mapping[str, Any] | None = None,
    shipped: Path | None = None,
    packaged: Sequence[tuple[Path, str]] = (),
) -> Config:
    """Read, check and merge every source.

    Args:
        environ: the environment; None reads os.environ.
        additional: the "vllm_fl" entry of vLLM's additional_config.
        shipped: the device's shipped policy file.
        packaged: policy files of packages, each with what stands for its folder in places.

    Raises:
        ConfigError: naming the variable, or file and line, the value and the valid ones.
    """
    environ = os.environ if environ is None else environ
    switch = _from_environ({k: v for k, v in environ.items() if k == f"{PREFIX}ENABLED"})
    if not switch.values.get("enabled", True):
        return Config(switch.values, switch.places)  # off means off: nothing else is read
    from_environ = _from_environ(environ)
    given = [from_environ]
    if additional is not None:
        given.append(_from_additional(additional))
    named = from_environ.values.get("config")
    if named:
        given.append(_from_file(Path(named), f"{PREFIX}CONFIG={named}"))
    # The orders of the rest say which kind is best here; whoever prefers a kind has said otherwise.
    kind_is_given = any("prefer" in source.values for source in given)
    for path, label in packaged:
        policy = _from_file(path, label, label=f"{label}, {path.name}")
        others = [key for key in policy.values if key != "op_backends"]
        if others:
            raise ConfigError(
                f"{policy.places[others[0]]}: a package orders implementations (op_backends) and "
                f"nothing else; found {others[0]}"
            )
        if not kind_is_given:
            given.append(policy)
    if shipped is not None:
        policy = _from_file(shipped, SHIPPED, label=f"{SHIPPED} {shipped.name}")
        if kind_is_given:
            policy.values.pop("op_backends", None)
        for white, black in EXCLUSIVE:
            if any(white in source.values for source in given):
                policy.values.pop(black, None)
        given.append(policy)
    return _merge(given)


def shipped_policy(device: DeviceFacts, folder: Path | None = None) -> Path | None:
    """The policy file that ships with vllm_fl for a device, or None.

    The most particular one counts: for "NVIDIA H200" `nvidia_h200.yaml`, else `nvidia.yaml`, which
    is the vendor's too: for "Tesla T4", and where the product's name is not known.
    """
    folder = folder or Path(__file__).parent.parent / "policies"
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    vendor = _COMPANIES.get(device.vendor, device.vendor)
    paths = (folder / f"{name}.yaml" for name in (*names, vendor))
    return next((path for path in paths if path.is_file()), None)


def _from_environ(environ: Mapping[str, str]) -> _Given:
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        setting = BY_VARIABLE.get(variable)
        if setting is None:
            raise ConfigError(
                f'environment variable {variable}="{environ[variable]}" is not a setting of '
                f"vllm_fl; valid: {', '.join(BY_VARIABLE)}.{did_you_mean(variable, BY_VARIABLE)}"
            )
        text = environ[variable]
        if not text.strip():
            continue  # VLLM_FL_X= is how a shell says "not set"
        try:
            values[setting.name] = setting.from_text(text)
        except ConfigError as error:
            raise ConfigError(f'environment variable {variable}="{text}": {error}') from None
        places[setting.name] = f"environment variable {variable}"
    return _Given(values, places)


def _from_additional(data: Any) -> _Given:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{ADDITIONAL_CONFIG}: must be a mapping, found {typed(data)}")
    places = {str(key): f"{ADDITIONAL_CONFIG}.{key}" for key in data}
    return _check_keys({str(k): v for k, v in data.items()}, places, {})


def _from_file(path: Path, who: str, label: str | None = None) -> _Given:
    """Read a YAML file; `label` stands for its path where places are named."""
    import yaml

    named = label or str(path)

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{who}: cannot read the file ({reason}); expected a YAML file with the keys "
            f"{', '.join(BY_KEY)}"
        ) from None
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.AliasToken):  # eight lines of them fill any memory
                raise ConfigError(
                    f"{named}:{token.start_mark.line + 1}: *{token.value} is an alias; write out "
                    "what it stands for"
                )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader("")
        if root is None:
            return _Given({}, {})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{named}:1: expected a mapping with the keys {', '.join(BY_KEY)}, "
                f"found {typed(loader.construct_object(root, deep=True))}"
            )
        values, places, inner = {}, {}, {}
        _refuse_duplicates(root, named, (), set())
        for key_node, value_node in root.value:
            key = str(key_node.value)
            places[key] = f"{named}:{key_node.start_mark.line + 1}"
            values[key] = loader.construct_object(value_node, deep=True)
            if isinstance(value_node, yaml.MappingNode):
                for inner_node, _ in value_node.value:
                    where = f"{named}:{inner_node.start_mark.line + 1}"
                    inner[key, str(inner_node.value)] = where
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{named}{line}: not valid YAML ({problem})") from None
    except Exception as error:  # what PyYAML raises for a date or number that is none
        raise ConfigError(
            f"{named}: a value cannot be read ({type(error).__name__}: {error})"
        ) from None
    return _check_keys(values, places, inner)


def _refuse_duplicates(node: Any, named: str, inside: tuple[str, ...], seen: set[int]) -> None:
    """Refuse a mapping of a YAML file, at any depth, that gives a key twice: YAML would take the
    last one and say nothing."""
    if id(node) in seen:  # an alias, which may even hold itself
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for child in node.value if isinstance(node.value, list) else ():
        if not isinstance(child, tuple):
            _refuse_duplicates(child, named, inside, seen)
            continue
        key_node, value_node = child
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            where = f" in {'.'.join(inside)}" if inside else ""
            raise ConfigError(
                f'{named}:{line}: the key "{key}" is given twice{where}; first in line {lines[key]}'
            )
        lines[key] = line
        _refuse_duplicates(value_node, named, (*inside, key), seen)


def _check_keys(
    data: dict[str, Any], places: dict[str, str], inner: Mapping[tuple[str, str], str]
) -> _Given:
    values: dict[str, Any] = {}
    kept: dict[str, str] = {}
    for key, value in data.items():
        place = places[key]
        setting = BY_KEY.get(key)
        if setting is None or setting.from_data is None:
            raise ConfigError(
                f'{place}: unknown key "{key}"; valid: {", ".join(BY_KEY)}.'
                f"{did_you_mean(key, BY_KEY)}"
            )
        if key == "op_backends" and isinstance(value, Mapping):
            values[key] = {}
            for op_name, order in value.items():
                where = inner.get((key, str(op_name)), place)
                try:
                    for order_key, tokens in split_by_mode({op_name: order}):
                        if order_key in values[key]:
                            first = kept[f"per_op_order.{order_key}"]
                            raise ConfigError(
                                f'the order of "{order_key}" is given twice; first at {first}'
                            )
                        values[key][order_key] = read_tokens(tokens)
                        kept[f"per_op_order.{order_key}"] = where
                except ConfigError as error:
                    raise ConfigError(f"{where}: {key}.{op_name}: {error}") from None
            continue
        try:
            values[key] = setting.from_data(value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {key}: {error}") from None
        kept[key] = place
    return _Given(values, kept)


def _merge(given: Sequence[_Given]) -> Config:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source in given:
        for name, value in source.values.items():
            if name == "op_backends":
                orders = values.setdefault(name, {})
                stronger = tuple(orders)
                for key, tokens in value.items():
                    # An order for both modes, given earlier, outranks one for a single mode.
                    if key not in stronger and key.partition("@")[0] not in stronger:
                        orders[key] = tokens
                        place = source.places.get(f"per_op_order.{key}")
                        sources[f"per_op_order.{key}"] = place or source.places[name]
            elif name in UNITED:
                values[name] = tuple(dict.fromkeys((*values.get(name, ()), *value)))
                before = sources.get(name)
                place = source.places[name]
                sources[name] = f"{before} and {place}" if before else place
            elif name not in values:
                values[name] = value
                sources[name] = source.places[name]
    for white, black in EXCLUSIVE:
        if white in values and black in values:
            raise ConfigError(
                f"{sources[white]} and {sources[black]} exclude each other: "
                f"{white} = {','.join(values[white])}, {black} = {','.join(values[black])}; "
                "keep one of them"
            )
    policy = SelectionPolicy(
        prefer=values.get("prefer"),
        strict=values.get("strict", False),
        per_op_order=values.get("op_backends", {}),
        allow_vendors=values.get("allow_vendors"),
        deny_vendors=values.get("deny_vendors", ()),
        flagos_whitelist=values.get("flagos_whitelist"),
        flagos_blacklist=values.get("flagos_blacklist", ()),
    )
    return Config(values, sources, policy)
