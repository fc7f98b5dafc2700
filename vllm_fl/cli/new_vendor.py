# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl new-vendor`: writes a complete vendor package, which passes its own tests at once."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..dispatch.errors import did_you_mean
from .errors import CommandError, UsageError
from .output import answer_stream
from .vendor_probe import built_in_registry

__all__ = ["DEFAULT_OPS", "add_parser", "package_files", "write_package"]

DEFAULT_OPS = ("silu_and_mul", "rms_norm", "rotary_embedding")


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "new-vendor",
        help="write a package for a vendor's kernels",
        description="Writes vllm-plugin-NAME: a package with an entry point, a backend, one "
        "function for each op with the signature of its contract, conformance tests, a CI file and "
        "a README. It installs and passes its tests as it is, with reference bodies.",
    )
    parser.add_argument("name", metavar="NAME", help="the vendor's name, e.g. acme")
    parser.add_argument(
        "--ops",
        default=",".join(DEFAULT_OPS),
        metavar="OP,OP",
        help="the ops to implement (default: %(default)s)",
    )
    parser.add_argument(
        "--device-type",
        default="cpu",
        metavar="TYPE",
        help="what PyTorch calls the device (default: %(default)s)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where the package's folder goes (default: here)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the package and say what to do next."""
    ops = [op.strip() for op in arguments.ops.split(",") if op.strip()]
    with answer_stream() as stream:
        folder, names = write_package(
            arguments.directory, arguments.name, ops, arguments.device_type
        )
        if arguments.json:
            json.dump({"folder": str(folder), "files": names}, stream, indent=2)
            stream.write("\n")
            return 0
        stream.write(f"wrote {folder}:\n")
        stream.writelines(f"  {name}\n" for name in names)
        here = folder.is_absolute() or folder.parts[0] == ".."
        place = shlex.quote(str(folder) if here else f"./{folder}")  # pip: a path, and no name
        stream.write(
            "next:\n"
            f"  pip install {place}\n"
            f"  pytest {shlex.quote(str(folder))}\n"
            f"  vllm-fl check-vendor vllm_fl_{arguments.name}\n"
        )
    return 0


def write_package(
    directory: Path, name: str, ops: Sequence[str], device_type: str = "cpu"
) -> tuple[Path, list[str]]:
    """Write the package; returns its folder and the files in it.

    Raises:
        UsageError: the name, an op or the device type is not one.
        CommandError: the folder is there already.
    """
    files = package_files(name, ops, device_type)
    folder = directory / f"vllm-plugin-{name}"
    if folder.exists():
        raise CommandError(f"{folder} is there already; remove it, or choose another --directory")
    unfinished = directory / f".vllm-plugin-{name}.{os.getpid()}"  # all of it, or nothing
    try:
        for path, text in files.items():
            target = unfinished / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder, list(files)


def package_files(name: str, ops: Sequence[str], device_type: str = "cpu") -> dict[str, str]:
    """The package's files, by their paths in it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(
            f'"{name}" cannot be a vendor\'s name; it starts with a small letter and goes on with '
            "small letters, digits and _"
        )
    if not re.fullmatch(r"[a-z]+", device_type):
        raise UsageError(f'"{device_type}" is no device type; PyTorch has cpu, cuda, npu, ...')
    _check_free(name)
    _check_device_type(device_type)
    ops = list(dict.fromkeys(ops))
    families = _families(ops)
    package = f"vllm_fl_{name}"
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        ".github/workflows/test.yml": _CI,
        f"{package}/__init__.py": _INIT,
        f"{package}/backend.py": _backend(name, device_type),
        f"{package}/register_ops.py": _register_ops(sorted(families)),
        f"{package}/impl/__init__.py": _IMPL_INIT,
        **{f"{package}/impl/{f}.py": _family_module(f, c) for f, c in sorted(families.items())},
        "tests/test_conformance.py": _TESTS,
    }
    title = name.replace("_", " ").title().replace(" ", "")
    values = {
        "@NAME@": name,
        "@TITLE@": title,
        "@PACKAGE@": package,
        "@DEVICE@": device_type,
        "@OPS@": ", ".join(f"`{op}`" for op in ops),
        "@FIRST@": ops[0],
        "@VERSION@": __version__,
    }
    for mark, value in values.items():
        files = {path: text.replace(mark, value) for path, text in files.items()}
    return files


def _check_free(name: str) -> None:
    """Refuse a vendor of whom vllm_fl itself has implementations: ids would be taken."""
    every = built_in_registry().snapshot().impls_by_op.values()
    taken = sorted({impl.vendor for impls in every for impl in impls if impl.vendor})
    if name in taken:
        raise UsageError(
            f'"{name}" is a vendor whose kernels vllm_fl brings itself, so vendor.{name} is taken; '
            f"taken are {', '.join(taken)}; choose another name"
        )


def _check_device_type(device_type: str) -> None:
    """Refuse what neither torch nor the device table knows as a device's type."""
    import torch

    from ..backends.vendor.devices import VENDORS

    known = sorted({vendor.device_type for vendor in VENDORS})
    if device_type in known:
        return
    try:
        torch.device(device_type)
    except RuntimeError as error:
        raise UsageError(
            f'unknown device type "{device_type}"; valid: {", ".join(known)}, and what torch '
            f"knows.{did_you_mean(device_type, known)} torch says: {str(error).splitlines()[0]}"
        ) from None


def _families(ops: Sequence[str]) -> dict[str, list[Any]]:
    """Family ("activation") to the contracts of the wanted ops."""
    import importlib

    from ..ops import CONTRACTS

    names = ("activation", "normalization", "rotary", "qk_norm_rope", "cache", "attention", "moe",
             "quantization", "sampling")  # fmt: skip
    homes = {
        contract.name: family
        for family in names
        for contract in importlib.import_module(f"vllm_fl.ops.{family}").CONTRACTS
    }
    known = {contract.name: contract for contract in CONTRACTS}
    families: dict[str, list[Any]] = {}
    for op in ops:
        if op not in homes:
            raise UsageError(
                f'unknown op "{op}"; valid: {", ".join(sorted(homes))}.{did_you_mean(op, homes)}'
            )
        families.setdefault(homes[op], []).append(known[op])
    if not families:
        raise UsageError("--ops names no op")
    return families


def _template(name: str) -> str:
    """A file of `vllm_fl.backends.vendor.template`, as a package outside of vllm_fl has it."""
    path = Path(__file__).parent.parent / "backends" / "vendor" / "template" / name
    text = path.read_text(encoding="utf-8")
    for inside, outside in (
        ("# SPDX-License-Identifier: Apache-2.0\n", ""),
        ("from ....types import", "from vllm_fl.types import"),
        ("from ....dispatch.registry import", "from vllm_fl.dispatch import"),
        ("from ...base import", "from vllm_fl.backends import"),
        ("from .template import", "from .backend import"),
    ):
        text = text.replace(inside, outside)
    return _IMPORTS.sub(_sorted_imports, text)


_IMPORTS = re.compile(r"^(?:from (?:vllm_fl|\.)\S* import .*\n)+", re.MULTILINE)


def _sorted_imports(block: re.Match[str]) -> str:
    """vllm_fl's first, then the package's own."""
    lines = sorted(block[0].splitlines(keepends=True))
    own = [line for line in lines if line.startswith("from .")]
    others = [line for line in lines if line not in own]
    return "".join([*others, "\n" if own and others else "", *own])


def _backend(name: str, device_type: str) -> str:
    text = _template("template.py").replace("TemplateBackend", "@TITLE@Backend")
    text = text.replace('"vendor.template"', '"vendor.@NAME@"').replace('"template"', '"@NAME@"')
    return text.replace('device_types = ("cpu",)', 'device_types = ("@DEVICE@",)')


def _register_ops(families: Sequence[str]) -> str:
    line = "from .impl import activation  # noqa: F401  (importing marks them)\n"
    head, comment = "from .impl import ", line.partition("activation")[2]
    wanted = f"{head}{', '.join(families)}{comment}"
    if len(wanted) > 101:  # with the end of the line
        names = "".join(f"    {family},\n" for family in families)
        wanted = f"{head}({comment}{names})\n"
    return _template("register_ops.py").replace(line, wanted)


def _family_module(family: str, contracts: Sequence[Any]) -> str:
    import importlib

    module = importlib.import_module(f"vllm_fl.ops.{family}")
    parts = [
        f'"""Ops of vllm_fl.ops.{family}, each still computed by its contract\'s reference."""\n',
        f"from vllm_fl.ops import {family} as contracts\n\nfrom ..backend import backend\n",
    ]
    for contract in contracts:
        constant = next(n for n, value in vars(module).items() if value is contract)
        signature = contract.signature
        summary = textwrap.fill(
            " ".join(signature.summary.split()) + '"""',
            100,
            initial_indent='    """',
            subsequent_indent="    ",
        )
        parameters = [_parameter(p) for p in signature.parameters]
        definition = _in_lines(f"def {signature.op_name}", parameters, ":", 0)
        reference = f"return contracts.{constant}.reference"
        call = _in_lines(reference, list(signature.parameter_names), "", 4)
        parts.append(
            f"\n@backend.implements()\n{definition}\n{summary}\n"
            f"    # Your kernel goes here.\n{call}\n"
        )
    return "\n".join(parts)


def _parameter(parameter: Any) -> str:
    text = str(parameter)
    name, equals, default = text.partition("=")
    if default.startswith("'") and '"' not in default:
        default = f'"{default[1:-1]}"'
    return f"{name}{equals}{default}"


def _in_lines(head: str, arguments: Sequence[str], tail: str, indent: int) -> str:
    """A call or definition of 100 columns at most, broken as formatters break it."""
    margin = " " * indent
    joined = ", ".join(arguments)
    for text in (
        f"{margin}{head}({joined}){tail}",
        f"{margin}{head}(\n{margin}    {joined}\n{margin}){tail}",
    ):
        if max(map(len, text.splitlines())) <= 100:
            return text
    lines = "".join(f"{margin}    {argument},\n" for argument in arguments)
    return f"{margin}{head}(\n{lines}{margin}){tail}"


_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm-plugin-@NAME@"
version = "0.1.0"
description = "@TITLE@'s kernels for vLLM, dispatched by vllm_fl"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["vllm-fl>=@VERSION@"]

# This line makes it a plugin: vllm_fl calls the function in every process that vLLM starts.
[project.entry-points."vllm_fl.plugin"]
@NAME@ = "@PACKAGE@:register_builtins"

[tool.setuptools]
packages = ["@PACKAGE@", "@PACKAGE@.impl"]

[tool.setuptools.package-data]
"@PACKAGE@" = ["policies/*.yaml"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

_INIT = '''"""@TITLE@'s kernels for vLLM: vllm_fl finds this module through the entry point."""

from .register_ops import register_builtins

__all__ = ["register_builtins"]
'''

_IMPL_INIT = '"""@TITLE@\'s functions, one file per family."""\n'

_TESTS = '''"""Each function does what its op's contract says: values, layouts, writes, guards."""

import pytest
from vllm_fl.dispatch import OpManager
from vllm_fl.testing import check_implementation

from @PACKAGE@ import register_ops  # noqa: F401  (importing marks the functions)
from @PACKAGE@.backend import backend

DEVICE = "@DEVICE@"
EACH = [pytest.param(impl, id=impl.op_name) for impl in backend.implementations]


@pytest.mark.parametrize("impl", EACH)
def test_it_does_what_the_contract_says(impl):
    report = check_implementation(impl, device=DEVICE)
    assert report.passed, report


@pytest.mark.parametrize("impl", EACH)
def test_it_is_found_through_the_entry_point(impl):
    manager = OpManager()
    manager.ensure_initialized()
    found = manager.registry.get_implementation(impl.op_name, "vendor.@NAME@")
    assert found is not None
    assert str(found.origin).startswith("entry point '@NAME@', vllm-plugin-@NAME@")
'''

_CI = """name: test
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest  # a runner with your chip tests your kernels
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install torch vllm-fl pytest
      - run: pip install .
      - run: pytest
      - run: vllm-fl check-vendor @PACKAGE@
"""

_README = """# vllm-plugin-@NAME@

@TITLE@'s kernels for vLLM, dispatched by vllm_fl: @OPS@.

    pip install .
    pytest
    vllm-fl check-vendor @PACKAGE@
    vllm-fl explain @FIRST@

## Where things are

- `@PACKAGE@/backend.py`: the devices (`device_types`), what must be installed (`requires`), whether
  it can run here (`is_available`), and the import of the kernels (`load`).
- `@PACKAGE@/impl/`: one function for each op. Its parameters are the contract's; its body is the
  contract's reference until you call your kernel there.
- `tests/test_conformance.py`: holds each function to its op's contract.

What a kernel cannot do, a guard refuses beforehand, and the next implementation serves the call:
`@backend.implements(supports=lambda x: x.is_contiguous() or "x is not contiguous")`. A function
that writes its arguments says so: `mutates=("x",)`.

## Being chosen

The highest priority that is available wins: FlagGems 150, vendors 100, the reference 50. Where your
kernel is faster than FlagGems', show it on your chip:

    vllm-fl verify --impl vendor.@NAME@
    vllm-fl bench @FIRST@

and ship the order as `@PACKAGE@/policies/@NAME@.yaml` (`package-data` takes it along):
`op_backends: {@FIRST@: [vendor:@NAME@, flagos]}`. `register_builtins` brings the folder with
`registry.add_policies(Path(__file__).with_name("policies"))`.
"""
