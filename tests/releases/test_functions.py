# SPDX-License-Identifier: Apache-2.0
"""What is served is read from vllm_fl's own sources, and a release that differs is noticed."""

from vllm_fl.vllm_plugin.functions import FUNCTIONS

from .functions import ImportedByNameIn, TakesAmong, served_functions
from .source import Source

TEXTS = {
    "vllm/ops.py": "def act(x, y=1):\n    return x\n",
    "vllm/calls.py": "from vllm.ops import act\n\ndef call(x):\n    return act(x)\n",
    "vllm/late.py": "def call(x):\n    from vllm.ops import act\n    return act(x)\n",
    "vllm/other.py": "def act(x):\n    return x\n",
}


def finding(check, **changes: str):
    texts = {**TEXTS, **{f"vllm/{name}.py": text for name, text in changes.items()}}
    source = Source.of_texts("0.32.0", texts)
    found = source.find("vllm.ops:act")
    assert found is not None
    return check.look(source, found)


def test_what_is_read_is_what_is_served() -> None:
    read = {(f.op, f.path, f.callers) for f in served_functions()}
    assert read == {(spec.op, spec.path, spec.callers) for spec in FUNCTIONS}
    assert all(f.parameters for f in served_functions())


def test_a_parameter_that_is_not_known_is_a_change() -> None:
    assert finding(TakesAmong(("x", "y"))).status == "ok"
    assert finding(TakesAmong(("x", "y", "z"))).status == "ok"
    assert finding(TakesAmong(("x",))).status == "changed"
    assert finding(TakesAmong(("y", "x"))).status == "changed"
    assert finding(TakesAmong(("x",)), ops="act = 1\n").status == "changed"


def test_an_import_inside_a_function_is_nobodys_own_name() -> None:
    found = finding(ImportedByNameIn(("vllm.calls",)))
    assert (found.status, found.text) == ("ok", "imported by vllm.calls")


def test_a_module_that_newly_imports_it_by_name_is_a_change() -> None:
    found = finding(ImportedByNameIn(()))
    assert (found.status, found.text) == ("changed", "imported by vllm.calls")


def test_another_name_for_it_is_a_change() -> None:
    check = ImportedByNameIn(("vllm.calls",))
    found = finding(check, calls="from vllm.ops import act as do\n")
    assert (found.status, found.text) == ("changed", "imported by vllm.calls as do")


def test_a_function_of_the_same_name_from_elsewhere_is_none_of_ours() -> None:
    check = ImportedByNameIn(("vllm.calls",))
    assert finding(check, more="from vllm.other import act\n").status == "ok"
