# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch import Config, ConfigError, OpRegistry, SelectionPolicy, load_config
from vllm_fl.dispatch.config import (
    SETTINGS,
    check_names,
    shipped_policy,
    variable_names,
)
from vllm_fl.dispatch.types import DeviceFacts, VendorInfo

from .helpers import SCALE, make_impl

VARIABLES = (
    "VLLM_FL_ENABLED, VLLM_FL_CONFIG, VLLM_FL_PREFER, VLLM_FL_STRICT, VLLM_FL_PER_OP, "
    "VLLM_FL_ALLOW_VENDORS, VLLM_FL_DENY_VENDORS, VLLM_FL_PLUGIN_MODULES, VLLM_FL_LOG_LEVEL, "
    "VLLM_FL_OOT_WHITELIST, VLLM_FL_OOT_BLACKLIST, VLLM_FL_FLAGOS_WHITELIST, "
    "VLLM_FL_FLAGOS_BLACKLIST, VLLM_FL_PLATFORM, VLLM_FL_DEVICE"
)
KEYS = "prefer, strict, op_backends, allow_vendors, deny_vendors, oot_blacklist, flagos_blacklist"
TOKENS = "flagos, vendor, reference, vendor:<name>, impl:<impl_id>, native"


def text_of(environ: dict[str, str] | None = None, **more: Any) -> str:
    """The text of the error that a configuration gives."""
    with pytest.raises(ConfigError) as caught:
        load_config(environ or {}, **more)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a YAML file and returns the environment that names it, and its path."""

    def write(text: str) -> tuple[dict[str, str], Path]:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        return {"VLLM_FL_CONFIG": str(path)}, path

    return write


# ----------------------------------------------------------------------- what is accepted


def test_nothing_given_is_the_default_configuration() -> None:
    config = load_config({"PATH": "/usr/bin", "VLLM_USE_V1": "1"})
    assert (config.enabled, config.log_level, config.platform) == (True, "INFO", None)
    assert config.plugin_modules == ()
    assert config.policy == SelectionPolicy()
    assert config.values == config.sources == {}


def test_the_table_names_every_variable_once_and_the_documented_yaml_keys() -> None:
    assert ", ".join(variable_names()) == VARIABLES
    assert ", ".join(s.name for s in SETTINGS if s.from_data is not None) == KEYS


def test_every_variable_is_read_and_its_source_recorded() -> None:
    config = load_config(
        {
            "VLLM_FL_ENABLED": "yes",
            "VLLM_FL_PREFER": "vendor",
            "VLLM_FL_STRICT": "1",
            "VLLM_FL_PER_OP": " rms_norm = vendor:cpu | reference ; scale=native; ",
            "VLLM_FL_ALLOW_VENDORS": "cpu, cuda",
            "VLLM_FL_DENY_VENDORS": "rocm",
            "VLLM_FL_PLUGIN_MODULES": "one, two.three",
            "VLLM_FL_LOG_LEVEL": "debug",
            "VLLM_FL_OOT_WHITELIST": "rms_norm",
            "VLLM_FL_FLAGOS_BLACKLIST": "rms_norm,scale",
            "VLLM_FL_PLATFORM": "ascend",
        }
    )
    assert config.policy == SelectionPolicy(
        prefer="vendor",
        strict=True,
        per_op_order=(("rms_norm", ("vendor:cpu", "reference")), ("scale", ("native",))),
        allow_vendors=frozenset({"cpu", "cuda"}),
        deny_vendors=frozenset({"rocm"}),
        flagos_blacklist=frozenset({"rms_norm", "scale"}),
    )
    assert (config.enabled, config.log_level, config.platform) == (True, "DEBUG", "ascend")
    assert config.plugin_modules == ("one", "two.three")
    assert config.serves_layer("rms_norm")
    assert not config.serves_layer("scale")
    assert config.sources["prefer"] == "environment variable VLLM_FL_PREFER"
    assert config.sources["per_op_order.scale"] == "environment variable VLLM_FL_PER_OP"


def test_every_key_of_a_file_is_read_and_its_line_recorded(file: Any) -> None:
    environ, path = file(
        "# a comment\n"
        "prefer: reference\n"
        "strict: true\n"
        "op_backends:\n"
        "  rms_norm: [vendor:cpu, reference]\n"
        "  scale: native|flagos\n"
        "allow_vendors: [cpu]\n"
        "deny_vendors: [rocm]\n"
        "oot_blacklist: [rotary]\n"
        "flagos_blacklist: [scale]\n"
    )
    config = load_config(environ)
    assert config.policy == SelectionPolicy(
        prefer="reference",
        strict=True,
        per_op_order=(("rms_norm", ("vendor:cpu", "reference")), ("scale", ("native", "flagos"))),
        allow_vendors=frozenset({"cpu"}),
        deny_vendors=frozenset({"rocm"}),
        flagos_blacklist=frozenset({"scale"}),
    )
    assert not config.serves_layer("rotary")
    assert config.serves_layer("rms_norm")
    assert config.sources == {
        "config": "environment variable VLLM_FL_CONFIG",
        "prefer": f"{path}:2",
        "strict": f"{path}:3",
        "per_op_order.rms_norm": f"{path}:5",
        "per_op_order.scale": f"{path}:6",
        "allow_vendors": f"{path}:7",
        "deny_vendors": f"{path}:8",
        "oot_blacklist": f"{path}:9",
        "flagos_blacklist": f"{path}:10",
    }


def test_an_empty_file_says_nothing(file: Any) -> None:
    environ, _ = file("# nothing yet\n")
    assert load_config(environ).policy == SelectionPolicy()


@pytest.mark.parametrize("variable", VARIABLES.split(", "))
@pytest.mark.parametrize("nothing", ["", "  "])
def test_an_empty_variable_is_one_that_is_not_set(variable: str, nothing: str) -> None:
    config = load_config({variable: nothing})
    assert config.values == {}
    assert config.enabled


def test_the_environment_of_the_process_is_read_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert load_config().policy.prefer == "reference"


@pytest.mark.parametrize("word", ["0", "false", "NO", " off "])
def test_switched_off_means_that_nothing_else_is_read(word: str, tmp_path: Path) -> None:
    config = load_config(
        {
            "VLLM_FL_ENABLED": word,
            "VLLM_FL_CONFIG": str(tmp_path / "absent.yaml"),
            "VLLM_FL_PREFER": "cuda",
            "VLLM_FL_TYPO": "1",
            "VLLM_FL_OOT_WHITELIST": "a",
            "VLLM_FL_OOT_BLACKLIST": "b",
        },
        additional={"nonsense": 1},
        shipped=tmp_path / "absent.yaml",
    )
    assert config.enabled is False
    assert config.policy == SelectionPolicy()
    assert config.sources == {"enabled": "environment variable VLLM_FL_ENABLED"}


# ---------------------------------------------------------------------- what is an error


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        (
            "VLLM_FL_ENABLED",
            "maybe",
            '"maybe" is not a yes or no; valid: 1, true, yes, on, 0, false, no, off',
        ),
        (
            "VLLM_FL_STRICT",
            "2",
            '"2" is not a yes or no; valid: 1, true, yes, on, 0, false, no, off',
        ),
        (
            "VLLM_FL_PREFER",
            "cuda",
            'unknown kind "cuda"; valid: flagos, vendor, reference.',
        ),
        (
            "VLLM_FL_PREFER",
            "vendors",
            'unknown kind "vendors"; valid: flagos, vendor, reference. Did you mean "vendor"?',
        ),
        (
            "VLLM_FL_LOG_LEVEL",
            "warn",
            'unknown level "warn"; valid: DEBUG, INFO, WARNING, ERROR, CRITICAL. '
            'Did you mean "WARNING"?',
        ),
        (
            "VLLM_FL_PER_OP",
            "rms_norm",
            'cannot read the entry "rms_norm"; expected op=token|token, entries separated by '
            '";", for example rms_norm=vendor:cpu|reference;silu_and_mul=native',
        ),
        (
            "VLLM_FL_PER_OP",
            "rms_norm=",
            'cannot read the entry "rms_norm="; expected op=token|token, entries separated by '
            '";", for example rms_norm=vendor:cpu|reference;silu_and_mul=native',
        ),
        (
            "VLLM_FL_PER_OP",
            "rms_norm=flagoss|native",
            f'unknown order token "flagoss"; valid: {TOKENS}. Did you mean "flagos"?',
        ),
        ("VLLM_FL_PER_OP", "a=native;a=vendor", 'the op "a" is given twice'),
        (
            "VLLM_FL_PER_OP",
            "a@compile=native",
            '"a@compile": unknown mode "compile"; valid: eager, compiled. Did you mean "compiled"?',
        ),
    ],
)
def test_a_wrong_value_names_variable_value_and_the_valid_ones(
    variable: str, value: str, problem: str
) -> None:
    assert text_of({variable: value}) == f'environment variable {variable}="{value}": {problem}'


def test_an_unknown_variable_names_the_valid_ones_and_the_closest() -> None:
    assert text_of({"VLLM_FL_PREFERS": "vendor"}) == (
        'environment variable VLLM_FL_PREFERS="vendor" is not a setting of vllm_fl; valid: '
        f'{VARIABLES}. Did you mean "VLLM_FL_PREFER"?'
    )


def test_a_missing_file_names_the_variable_and_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    assert text_of({"VLLM_FL_CONFIG": str(path)}) == (
        f"VLLM_FL_CONFIG={path}: cannot read the file (No such file or directory); expected a "
        f"YAML file with the keys {KEYS}"
    )
    assert text_of({"VLLM_FL_CONFIG": str(tmp_path)}).startswith(
        f"VLLM_FL_CONFIG={tmp_path}: cannot read the file (Is a directory); "
    )


def test_a_missing_shipped_policy_is_an_error_too(tmp_path: Path) -> None:
    assert text_of(shipped=tmp_path / "absent.yaml").startswith(
        "shipped policy: cannot read the file (No such file or directory)"
    )


def test_a_file_that_is_not_text_is_an_error(file: Any) -> None:
    environ, path = file("")
    path.write_bytes(b"prefer: \xff\xfe")
    assert text_of(environ).startswith(
        f"VLLM_FL_CONFIG={path}: cannot read the file ('utf-8' codec can't decode byte 0xff"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "prefer: vendor\nop_backends: [unclosed\n",
            ":3: not valid YAML (expected ',' or ']', but got '<stream end>')",
        ),
        ("prefer: vendor\n\tstrict: true\n", ":2: not valid YAML (found character '\\t' that"),
        ("prefer: vendor\n---\nprefer: vendor\n", ":2: not valid YAML (but found another"),
        ("strict: !!python/object:os.system {}\n", ":1: not valid YAML (could not determine"),
        ("prefer: *nobody\n", ":1: *nobody is an alias; write out what it stands for"),
        (
            "strict:\n- &a [x, x, x]\n- &b [*a, *a, *a]\n- [*b, *b, *b]\n",
            ":3: *a is an alias; write out what it stands for",
        ),
        ("prefer: vend\x01or\n", ": not valid YAML (unacceptable character #x0001"),
        ("- prefer\n", f":1: expected a mapping with the keys {KEYS}, found ['prefer'] of type"),
        ("vendor\n", f":1: expected a mapping with the keys {KEYS}, found 'vendor' of type str"),
        (
            "strict: true\nperfer: vendor\n",
            f':2: unknown key "perfer"; valid: {KEYS}. Did you mean "prefer"?',
        ),
        ("\nplugin_modules: [a]\n", f':2: unknown key "plugin_modules"; valid: {KEYS}.'),
        ("strict: true\n\nstrict: false\n", ':3: the key "strict" is given twice; first in line 1'),
        (
            "op_backends:\n  a: [native]\n  a: [vendor]\n",
            ':3: the key "a" is given twice in op_backends; first in line 2',
        ),
        (
            "op_backends:\n  a:\n    eager: [native]\n    eager: [vendor]\n",
            ':4: the key "eager" is given twice in op_backends.a; first in line 3',
        ),
        (
            "op_backends:\n  a@eager: [native]\n  a:\n    eager: [vendor]\n",
            ':3: op_backends.a: the order of "a@eager" is given twice; first at ',
        ),
        (
            "op_backends:\n  a: {compiled: [native]}\n  a@compiled: [vendor]\n",
            ':3: op_backends.a@compiled: the order of "a@compiled" is given twice; first at ',
        ),
        ("deny_vendors: &a [*a]\n", ":1: *a is an alias; write out what it stands for"),
        (
            "prefer: cuda\n",
            ':1: prefer: unknown kind "cuda"; valid: flagos, vendor, reference.',
        ),
        ("prefer: [vendor]\n", ":1: prefer: unknown kind \"['vendor']\"; valid: flagos, vendor,"),
        ("strict: 1\n", ":1: strict: must be true or false, found 1 of type int"),
        ("strict: 'yes'\n", ":1: strict: must be true or false, found 'yes' of type str"),
        (
            "deny_vendors: cuda\n",
            ":1: deny_vendors: must be a list of names, found 'cuda' of type str",
        ),
        (
            "allow_vendors: [1]\n",
            ":1: allow_vendors: must be a list of names, found [1] of type list",
        ),
        (
            "oot_blacklist:\n",
            ":1: oot_blacklist: must be a list of names, found None of type NoneType",
        ),
        (
            "op_backends: [rms_norm]\n",
            ":1: op_backends: must map op names to lists of order tokens, found ['rms_norm'] of "
            "type list",
        ),
        (
            "op_backends:\n  scale: [native]\n  rms_norm: [cuda]\n",
            f':3: op_backends.rms_norm: unknown order token "cuda"; valid: {TOKENS}.',
        ),
        (
            "op_backends:\n  rms_norm: [vendor, 5]\n",
            ":2: op_backends.rms_norm: must be a list of order tokens, found 5 of type int in it",
        ),
        (
            "op_backends:\n  a: [native]\n  b: {eagre: [native]}\n",
            ':3: op_backends.b: "b@eagre": unknown mode "eagre"; valid: eager, compiled. '
            'Did you mean "eager"?',
        ),
        (
            "op_backends:\n  rms_norm: []\n",
            ":2: op_backends.rms_norm: must be a list of order tokens, found [] of type list",
        ),
    ],
)
def test_a_wrong_file_names_file_line_value_and_the_valid_ones(
    file: Any, text: str, problem: str
) -> None:
    environ, path = file(text)
    assert text_of(environ).startswith(f"{path}{problem}")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"perfer": "vendor"},
            f'.perfer: unknown key "perfer"; valid: {KEYS}. Did you mean "prefer"?',
        ),
        ({"strict": 1}, ".strict: strict: must be true or false, found 1 of type int"),
        (
            {"op_backends": {"scale": ["cuda"]}},
            f'.op_backends: op_backends.scale: unknown order token "cuda"; valid: {TOKENS}.',
        ),
        ([], ": must be a mapping, found [] of type list"),
    ],
)
def test_a_wrong_additional_config_names_its_key(given: Any, text: str) -> None:
    assert text_of(additional=given) == f"--additional-config vllm_fl{text}"


def test_a_whitelist_and_a_blacklist_exclude_each_other_wherever_they_come_from(
    file: Any,
) -> None:
    assert text_of({"VLLM_FL_OOT_WHITELIST": "a,b", "VLLM_FL_OOT_BLACKLIST": "c"}) == (
        "environment variable VLLM_FL_OOT_WHITELIST and environment variable "
        "VLLM_FL_OOT_BLACKLIST exclude each other: oot_whitelist = a,b, oot_blacklist = c; keep "
        "one of them"
    )
    environ, path = file("flagos_blacklist: [c]\n")
    assert text_of({**environ, "VLLM_FL_FLAGOS_WHITELIST": "a"}) == (
        f"environment variable VLLM_FL_FLAGOS_WHITELIST and {path}:1 exclude each other: "
        "flagos_whitelist = a, flagos_blacklist = c; keep one of them"
    )
    load_config({"VLLM_FL_OOT_WHITELIST": "a", "VLLM_FL_FLAGOS_BLACKLIST": "a"})


# ------------------------------------------------------------- names that must be known


def check(environ: dict[str, str], notes: tuple[str, ...] = ()) -> None:
    registry = OpRegistry()
    registry.declare(SCALE)
    registry.declare_vendor(VendorInfo("ascend", "npu"))
    registry.register_many([make_impl("vendor.acme"), make_impl("vendor.acme", op_name="shift")])
    load_config(environ).check_against(registry.snapshot(), notes)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("PER_OP", "scal=native", 'unknown op "scal"; valid: scale, shift. Did you mean "scale"?'),
        ("PER_OP", "scal@eager=native", 'unknown op "scal"; valid: scale, shift. '
         'Did you mean "scale"?'),
        (
            "PER_OP",
            "scale=vendor:acne",
            'unknown vendor "acne"; valid: acme, ascend. Did you mean "acme"?',
        ),
        (
            "PER_OP",
            "scale=impl:vendor.acne",
            'unknown implementation of scale "vendor.acne"; valid: vendor.acme. '
            'Did you mean "vendor.acme"?',
        ),
        ("ALLOW_VENDORS", "acme,zz", 'unknown vendor "zz"; valid: acme, ascend.'),
        ("DENY_VENDORS", "Acme", 'unknown vendor "Acme"; valid: acme, ascend. '
         'Did you mean "acme"?'),
        ("FLAGOS_WHITELIST", "shit", 'unknown op "shit"; valid: scale, shift. '
         'Did you mean "shift"?'),
        ("FLAGOS_BLACKLIST", "rotary", 'unknown op "rotary"; valid: scale, shift.'),
    ],
)  # fmt: skip
def test_an_unknown_name_is_an_error_that_names_its_source(
    variable: str, value: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check({f"VLLM_FL_{variable}": value}, ("Note: acme failed (OSError: x).",))
    assert str(caught.value) == (
        f"environment variable VLLM_FL_{variable}: {problem} Note: acme failed (OSError: x)."
    )


def test_known_names_pass_whether_declared_or_registered() -> None:
    check(
        {
            "VLLM_FL_PER_OP": "scale=vendor:ascend|impl:vendor.acme|native;shift=vendor",
            "VLLM_FL_ALLOW_VENDORS": "acme",
            "VLLM_FL_DENY_VENDORS": "ascend",
            "VLLM_FL_FLAGOS_BLACKLIST": "shift,scale",
        }
    )


def test_check_names_says_none_where_nothing_is_valid() -> None:
    with pytest.raises(ConfigError, match=r'^here: unknown op "a"; valid: none\.$'):
        check_names(["a"], [], what="op", source="here")


# --------------------------------------------------------------------------- how they merge


def test_sources_merge_key_by_key_and_the_first_that_speaks_wins(file: Any, tmp_path: Path) -> None:
    environ, path = file("prefer: reference\nstrict: true\nallow_vendors: [b]\n")
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("prefer: flagos\nstrict: true\nallow_vendors: [c]\nflagos_blacklist: [x]\n")
    config = load_config(
        {**environ, "VLLM_FL_PREFER": "vendor"}, additional={"strict": False}, shipped=shipped
    )
    assert config.policy == SelectionPolicy(
        prefer="vendor",
        strict=False,
        allow_vendors=frozenset({"b"}),
        flagos_blacklist=frozenset({"x"}),
    )
    assert {k: v for k, v in config.sources.items() if k != "config"} == {
        "prefer": "environment variable VLLM_FL_PREFER",
        "strict": "--additional-config vllm_fl.strict",
        "allow_vendors": f"{path}:3",
        "flagos_blacklist": "shipped policy shipped.yaml:4",
    }


def test_a_no_is_a_word_too_and_beats_a_later_yes(file: Any) -> None:
    environ, _ = file("strict: true\n")
    assert load_config({**environ, "VLLM_FL_STRICT": "0"}).policy.strict is False


def test_op_backends_merge_op_by_op(file: Any, tmp_path: Path) -> None:
    environ, path = file("op_backends:\n  a: [vendor]\n  b: [vendor]\n  c: [vendor]\n")
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("op_backends:\n  c: [flagos]\n  d: [flagos]\n")
    config = load_config(
        {**environ, "VLLM_FL_PER_OP": "a=native"},
        additional={"op_backends": {"b": ["reference"], "a": ["reference"]}},
        shipped=shipped,
    )
    assert dict(config.policy.per_op_order) == {
        "a": ("native",),
        "b": ("reference",),
        "c": ("vendor",),
        "d": ("flagos",),
    }
    assert {op: config.sources[f"per_op_order.{op}"] for op in "abcd"} == {
        "a": "environment variable VLLM_FL_PER_OP",
        "b": "--additional-config vllm_fl.op_backends",
        "c": f"{path}:4",
        "d": "shipped policy shipped.yaml:3",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"environ": {"VLLM_FL_PREFER": "vendor"}},
        {"environ": {}, "additional": {"prefer": "vendor"}},
    ],
)
def test_whoever_prefers_a_kind_does_without_the_orders_of_the_shipped_policy(
    given: dict[str, Any], tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("op_backends:\n  a: [flagos]\nflagos_blacklist: [b]\n")
    assert load_config({}, shipped=shipped).policy.order_for("a") == ("flagos",)
    config = load_config(**given, shipped=shipped)
    assert config.policy.per_op_order == ()
    assert config.policy.flagos_blacklist == {"b"}


@pytest.mark.parametrize(
    ("product", "found"),
    [
        ("NVIDIA H200", "nvidia_h200.yaml"),
        ("NVIDIA H200 NVL", "nvidia_h200.yaml"),
        ("NVIDIA A100-SXM4-80GB", "nvidia.yaml"),
        ("", "nvidia.yaml"),
        ("Tesla T4", "nvidia.yaml"),
    ],
)
def test_the_most_particular_shipped_policy_of_a_device_counts(tmp_path, product, found) -> None:
    for name in ("nvidia.yaml", "nvidia_h200.yaml", "cuda.yaml"):  # the last one is nobody's
        (tmp_path / name).touch()
    assert shipped_policy(DeviceFacts("cuda", "cuda", product), tmp_path) == tmp_path / found


def test_a_device_without_a_shipped_policy_has_none(tmp_path) -> None:
    assert shipped_policy(DeviceFacts("nobody", "cpu"), tmp_path) is None


def test_a_shipped_policy_may_name_an_implementation_that_this_build_lacks(tmp_path: Path) -> None:
    registry = OpRegistry()
    registry.register_impl(make_impl("vendor.cpu"))
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("op_backends:\n  scale: [impl:vendor.cpu.fl, vendor:cpu]\n")
    load_config({}, shipped=shipped).check_against(registry.snapshot())
    with pytest.raises(ConfigError, match=r'of scale "vendor\.cpu\.fl"'):
        load_config({"VLLM_FL_CONFIG": str(shipped)}).check_against(registry.snapshot())


def test_a_broken_shipped_policy_is_named_without_its_folder(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("strict: 1\n")
    assert text_of(shipped=shipped) == (
        "shipped policy shipped.yaml:1: strict: must be true or false, found 1 of type int"
    )


def test_an_order_may_be_given_for_one_mode(file: Any) -> None:
    environ, path = file(
        "op_backends:\n  a: {eager: [vendor], compiled: [native]}\n  b: [flagos]\n"
    )
    config = load_config({**environ, "VLLM_FL_PER_OP": "c@compiled=flagos|native"})
    assert dict(config.policy.per_op_order) == {
        "a@compiled": ("native",),
        "a@eager": ("vendor",),
        "b": ("flagos",),
        "c@compiled": ("flagos", "native"),
    }
    assert config.sources["per_op_order.a@compiled"] == f"{path}:2"
    assert config.sources["per_op_order.c@compiled"] == "environment variable VLLM_FL_PER_OP"


def test_an_order_for_both_modes_outranks_one_for_a_mode_from_a_later_source(file: Any) -> None:
    environ, _ = file("op_backends:\n  a: {compiled: [flagos]}\n  b: [flagos]\n")
    config = load_config({**environ, "VLLM_FL_PER_OP": "a=native;b@compiled=native"})
    assert config.policy.order_for("a", "compiled") == ("native",)
    assert config.policy.order_for("b", "compiled") == ("native",)
    assert config.policy.order_for("b", "eager") == ("flagos",)


def test_deny_lists_are_united_and_name_every_source(file: Any) -> None:
    environ, path = file("deny_vendors: [b, a]\noot_blacklist: [y]\nflagos_blacklist: [q]\n")
    config = load_config(
        {**environ, "VLLM_FL_DENY_VENDORS": "a", "VLLM_FL_OOT_BLACKLIST": "x"},
        additional={"deny_vendors": ["c"], "flagos_blacklist": ["p"]},
    )
    assert config.policy.deny_vendors == {"a", "b", "c"}
    assert config.policy.flagos_blacklist == {"p", "q"}
    assert config.values["oot_blacklist"] == ("x", "y")
    assert config.sources["deny_vendors"] == (
        "environment variable VLLM_FL_DENY_VENDORS and --additional-config vllm_fl.deny_vendors "
        f"and {path}:1"
    )


# -------------------------------------------------------------------------------- as data


def test_a_configuration_as_data_shows_every_setting_with_its_source(file: Any) -> None:
    environ, path = file("op_backends:\n  scale: [vendor, native]\ndeny_vendors: [b, a]\n")
    data = load_config({**environ, "VLLM_FL_STRICT": "1"}).to_dict()
    assert list(json.loads(json.dumps(data))) == [setting.name for setting in SETTINGS]
    assert data["strict"] == {"value": True, "source": "environment variable VLLM_FL_STRICT"}
    assert data["op_backends"] == {
        "value": {"scale": ["vendor", "native"]},
        "source": {"scale": f"{path}:2"},
    }
    assert data["deny_vendors"] == {"value": ["b", "a"], "source": f"{path}:3"}
    assert data["log_level"] == {"value": "INFO", "source": "default"}
    assert data["prefer"] == {"value": None, "source": "default"}
    assert Config().to_dict()["op_backends"] == {"value": {}, "source": "default"}
    assert {name: entry["value"] for name, entry in Config().to_dict().items()} == {
        "enabled": True,
        "config": None,
        "prefer": None,
        "strict": False,
        "op_backends": {},
        "allow_vendors": None,
        "deny_vendors": None,
        "plugin_modules": None,
        "log_level": "INFO",
        "oot_whitelist": None,
        "oot_blacklist": None,
        "flagos_whitelist": None,
        "flagos_blacklist": None,
        "platform": None,
        "device": "auto",
    }


def test_a_list_keeps_the_order_in_which_it_was_given() -> None:
    data = load_config({"VLLM_FL_PLUGIN_MODULES": "zeta,acme"}).to_dict()
    assert data["plugin_modules"]["value"] == ["zeta", "acme"]
