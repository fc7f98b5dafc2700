# SPDX-License-Identifier: Apache-2.0
"""The checklist: a package as it is written has every item; each item that is broken is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from vllm_fl.cli.check_vendor import ITEMS, check_vendor
from vllm_fl.cli.diagnosis import remedies
from vllm_fl.cli.errors import CommandError, UsageError
from vllm_fl.cli.main import main
from vllm_fl.cli.new_vendor import write_package

pytestmark = pytest.mark.extended  # a process that imports torch for each package

COUNT = iter(range(1000))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package((file, old, new), ...) writes a package of silu_and_mul with these changes, and
    returns its module's name, which no other test has."""
    made = []

    def make(*changes: tuple[str, str, str]) -> str:
        name = f"acme{next(COUNT)}"
        folder, _ = write_package(tmp_path, name, ["silu_and_mul"])
        for file, old, new in changes:
            path = folder / f"vllm_fl_{name}" / file
            text = path.read_text()
            assert old in text, f"{file} has no {old!r}"
            path.write_text(text.replace(old, new).replace("@NAME@", name))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        made.append(f"vllm_fl_{name}")
        return made[-1]

    yield make
    for module in [m for m in sys.modules if m.partition(".")[0] in made]:
        del sys.modules[module]


def missing(module: str, conformance: bool = False) -> dict[str, str]:
    """Item to what is said of it."""
    findings, _ = check_vendor(module, conformance=conformance)
    return {f.item: f.what for f in findings if not f.note}


def test_a_package_as_it_is_written_has_every_item(package, capfd):
    module = package()
    assert main(["check-vendor", module, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["passed"] and told["items"] == dict.fromkeys(ITEMS, True)
    [note] = told["findings"]
    vendor = f"vendor.{module.removeprefix('vllm_fl_')}"
    assert note["note"] and note["item"] == "priority"
    assert note["what"].startswith(
        f"where vendor.cpu.fl serves the device it is always chosen before {vendor}, by its "
        "priority of 110, for silu_and_mul; "
    )
    for remedy in (
        "registry.add_policies",
        "a priority above",
        f"vllm-fl verify --impl {vendor}",
        "vllm-fl bench silu_and_mul",
    ):
        assert remedy in note["what"]


def test_where_flaggems_serves_the_device_the_note_is_on_flaggems(package):
    module = package((BACKEND, 'device_types = ("cpu",)', 'device_types = ("npu",)'))
    [note] = check_vendor(module, conformance=False)[0]
    assert note.note and note.item == "priority"
    assert note.what.startswith("where FlagGems serves the device it is always chosen before ")
    assert "by its priority of 150, for silu_and_mul; " in note.what


def test_no_benchmark_is_advised_of_an_op_without_a_contract():
    assert "vllm-fl bench" in remedies("vendor.acme", "rms_norm")
    assert "vllm-fl" not in remedies("vendor.acme", None)


def test_a_package_that_is_not_there_is_no_finding():
    with pytest.raises(CommandError, match=r"there is no module vllm_fl_nobody; install"):
        check_vendor("vllm_fl_nobody")


BACKEND, IMPL, REGISTER, INIT = (
    "backend.py",
    "impl/activation.py",
    "register_ops.py",
    "__init__.py",
)
REGISTERED = "registry.register_many(backend.implementations)"
MARK = "@backend.implements()"
BROKEN = {
    "import": (
        [(INIT, "from .register_ops import register_builtins", "register = 1")],
        "has none of register_builtins",
    ),
    "API version": (
        [(BACKEND, "api_version = 1", "api_version = 9")],
        "was written for version 9 of vllm_fl's API; this is version 1. Install a newer vllm_fl",
    ),
    "registration": (
        [(REGISTER, REGISTERED, "pass")],
        "it registers nothing",
    ),
    "backend": (
        [(BACKEND, "Backend(Backend):", "Backend:\n    implementations = ()\n"),
         (REGISTER, REGISTERED,
          "from vllm_fl.types import OpImpl\n    from .impl.activation import silu_and_mul\n"
          "    registry.register_impl(OpImpl('silu_and_mul', 'vendor.@NAME@', 'vendor', "
          "silu_and_mul, vendor='@NAME@', priority=100))"),
         (IMPL, MARK + "\n", "")],
        "belongs to no subclass of vllm_fl.backends.Backend",
    ),
    "vendor": (
        [(BACKEND, "    vendor = ", "    no_vendor = ")],
        "Set the class attribute `vendor`",
    ),
    "impl_id": (
        [(BACKEND, 'impl_id = "vendor.', 'impl_id = "kernels.')],
        "expected vendor.",
    ),
    "priority": (
        [(BACKEND, "    api_version", "    priority = 10\n    api_version")],
        "so the reference (50) is always chosen",
    ),
    "policy": (
        [(REGISTER, REGISTERED, REGISTERED + "\n    registry.add_policies('/nowhere')")],
        "/nowhere holds no *.yaml",
    ),
    "signatures": (
        [(IMPL, "def silu_and_mul(x)", "def silu_and_mul(input)"), (IMPL, "(x)\n", "(input)\n")],
        "unexpected 'input'",
    ),
    "availability": (
        [(BACKEND, "        return True", "        import rich  # noqa\n        return True")],
        "rich; import kernels in load()",
    ),
    "missing dependency": (
        [(BACKEND, "from vllm_fl.types", "import kernels_that_nobody_has\nfrom vllm_fl.types")],
        "Import it in the backend's load(), and name it in `requires`",
    ),
    "guards": (
        [(IMPL, MARK, "@backend.implements(supports=lambda x: bool((x == x).all()) or 'nan')")],
        "on fake tensors",
    ),
    "conformance": (
        [(IMPL, ".reference(x)", ".reference(x) * 1.1")],
        "values:",
    ),
}  # fmt: skip


def test_every_item_is_broken_once():
    assert set(BROKEN) == set(ITEMS)


@pytest.mark.parametrize("item", BROKEN)
def test_a_broken_item_is_caught_by_its_name(package, item):
    changes, said = BROKEN[item]
    found = missing(package(*changes), conformance=item in ("guards", "conformance"))
    assert item in found, found
    assert said in found[item]


MORE = {
    "an API that is no more": (
        "API version",
        (BACKEND, "api_version = 1", "api_version = 0"),
        "was written for version 0 of vllm_fl's API; this is version 1. Install a newer vllm_fl_ac",
    ),
    "a load that fails": (
        "availability",
        (BACKEND, "with the exception as the reason.\"\"\"",
         "...\"\"\"\n        raise OSError('libacme.so')"),
        "says that it is available, but load() raised OSError: libacme.so",
    ),
    "a probe that raises": (
        "availability",
        (BACKEND, "        return True", "        raise OSError('no driver')"),
        "its availability probe raised OSError: no driver; return False or a reason instead",
    ),
    "a module that is imported where it is required": (
        "missing dependency",
        (BACKEND, 'requires = ("torch",)', 'import rich\n    requires = ("torch", "rich")'),
        "without rich it does not register: ModuleNotFoundError",
    ),
    "an id that a built-in has": (
        "registration",
        (BACKEND, 'impl_id = "vendor.', 'impl_id = "vendor.cpu"  # "'),
        "DuplicateImplementationError: op 'silu_and_mul' already has",
    ),
    "a vendor's name with a space": (
        "vendor",
        (BACKEND, "    vendor = ", '    vendor = "of " '),
        "a vendor's name must be a non-empty string without spaces",
    ),
    "an op that nobody declared": (
        "signatures",
        (IMPL, "def silu_and_mul", "def silu_und_mul"),
        "the op is not declared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_another_way_to_break_an_item_is_caught_too(package, name):
    item, change, said = MORE[name]
    found = missing(package(change))
    assert said in found.get(item, ""), found


POLICY = (
    REGISTER,
    REGISTERED,
    REGISTERED + "\n    from pathlib import Path\n"
    "    registry.add_policies(Path(__file__).with_name('policies'))",
)


@pytest.mark.parametrize(
    ("op", "said"),
    [("silu_and_mul", None), ("silu_and_mlu", 'unknown op "silu_and_mlu"; valid: '), ("", "holds")],
)
def test_a_policy_of_its_own_is_checked_and_answers_the_note_on_flaggems(
    package, tmp_path, op, said
):
    module = package(POLICY)
    name = module.removeprefix("vllm_fl_")
    folder = tmp_path / f"vllm-plugin-{name}" / module / "policies"
    folder.mkdir()
    if op:
        (folder / f"{name}.yaml").write_text(f"op_backends:\n  {op}: [vendor:{name}, flagos]\n")
    findings, _ = check_vendor(module, conformance=False)
    if said is None:
        assert findings == []
    else:
        assert [f.item for f in findings] == ["policy"]
        assert said in findings[0].what


def test_a_policy_may_name_vendors_of_vllm_fl_and_a_misnamed_file_is_noted(package, tmp_path):
    module = package(POLICY)
    name = module.removeprefix("vllm_fl_")
    folder = tmp_path / f"vllm-plugin-{name}" / module / "policies"
    folder.mkdir()
    order = f"op_backends:\n  silu_and_mul: [vendor:{name}, vendor:cpu, flagos]\n"
    (folder / f"{name}.yaml").write_text(order)
    (folder / f"{name}_x2.yaml").write_text(order)
    assert check_vendor(module, conformance=False)[0] == []
    (folder / f"{name}s.yaml").write_text(order)
    for loaded in [m for m in sys.modules if m.partition(".")[0] == module]:
        del sys.modules[loaded]
    [note] = check_vendor(module, conformance=False)[0]
    assert note.note and note.item == "policy"
    assert note.what.startswith(f"{name}s.yaml is named as no vendor")


def test_the_example_of_an_own_op_has_every_item(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "add-an-operator.md").read_text()
    code = page.partition("```python\n")[2].partition("registry = OpRegistry()")[0]
    (tmp_path / "own_op_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    findings, _ = check_vendor("own_op_of_the_page")
    assert [(f.item, f.note) for f in findings] == [("conformance", True)]


def test_a_device_that_torch_does_not_know_is_wrong_usage(package):
    with pytest.raises(UsageError, match="unknown device 'nonsense'"):
        check_vendor(package(), device="nonsense")


def test_what_is_missing_is_printed_and_the_exit_code_is_one(package, capfd):
    module = package((BACKEND, 'impl_id = "vendor.', 'impl_id = "kernels.'))
    assert main(["check-vendor", module, "--no-conformance"]) == 1
    said = capfd.readouterr().out
    assert "MISSING   impl_id" in said
    assert f"{module}: 1 of {len(ITEMS) - 2} items are missing" in said
