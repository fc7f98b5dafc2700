# SPDX-License-Identifier: Apache-2.0
"""examples/vendor_package gets into vLLM by three ways: installed, in the tree, by module name."""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

import vllm_fl
from tests.native import CPU_IMPL, NATIVE

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

EXAMPLE = Path(__file__).parents[2] / "examples" / "vendor_package"
CHOSEN = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:acme"}
SNAPSHOT = """
import json
from vllm_fl.dispatch import get_default_manager
manager = get_default_manager()
manager.ensure_initialized()
print(json.dumps(manager.registry.snapshot().to_dict()["ops"]["silu_and_mul"]["implementations"]))
"""


def registered(run, python, changes) -> dict[str, object]:
    """What the registry's snapshot says of vendor.acme."""
    implementations = json.loads(run([python, "-c", SNAPSHOT], changes).stdout)
    [found] = [entry for entry in implementations if entry["impl_id"] == "vendor.acme"]
    assert (found["kind"], found["vendor"], found["priority"]) == ("vendor", "acme", 100)
    return found


def check_that_it_ran(engine, reply) -> None:
    rows = {row["op"]: row for row in reply["routes"][0]["ops"]}
    assert rows["silu_and_mul"]["impl_id"] == "vendor.acme"
    assert rows["silu_and_mul"]["bound"] == 2
    assert rows["silu_and_mul"]["calls"] > 0
    assert rows["rms_norm"]["impl_id"] == CPU_IMPL
    assert "_C::silu_and_mul" not in reply["operators"]
    assert reply["tokens"] == engine.stock("tiny")["tokens"]


@pytest.fixture(scope="module")
def python(run, tmp_path_factory) -> Path:
    """The interpreter of a new environment: the test environment's packages and the example."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(EXAMPLE, folder / "source")  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    wheels = folder / "wheels"
    run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, source])
    [wheel] = wheels.iterdir()
    assert wheel.name == "vllm_plugin_acme-0.1.0-py3-none-any.whl"
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    python = folder / "venv" / "bin" / "python"
    print_purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(run([python, "-c", print_purelib]).stdout.strip())
    # addsitedir, because the packages there may themselves be installed through .pth files.
    below = sysconfig.get_path("purelib")
    (purelib / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    run([*pip, "--python", python, "install", *offline, wheel])
    return python


def test_an_installed_package_is_found_and_runs(engine, run, python) -> None:
    found = registered(run, python, {})
    assert found["origin"] == "entry point 'acme', vllm-plugin-acme 0.1.0"
    assert found["module"] == "vllm_fl_acme"
    check_that_it_ran(engine, engine("tiny", CHOSEN, python=python))


def test_without_an_order_the_device_s_own_vendor_goes_first(run, python) -> None:
    code = "from vllm_fl.dispatch import explain_op; print(explain_op('silu_and_mul'))"
    explained = run([python, "-c", code]).stdout
    assert f"silu_and_mul on cpu, eager: {CPU_IMPL}" in explained
    why = (
        f"priority 100 is below {CPU_IMPL}'s 110"
        if NATIVE
        else f"equal priority; {CPU_IMPL} is the device's own vendor's"
    )
    assert f"not vendor.acme: {why}" in explained


def test_the_same_code_runs_in_the_tree(engine, run, tmp_path) -> None:
    package = shutil.copytree(Path(vllm_fl.__file__).parent, tmp_path / "vllm_fl")
    vendor = package / "backends" / "vendor" / "acme"
    vendor.mkdir()
    (vendor / "__init__.py").touch()
    for source in (EXAMPLE / "vllm_fl_acme").glob("*.py"):
        code = source.read_text()
        for absolute, relative in (
            ("from vllm_fl.types import", "from ....types import"),
            ("from vllm_fl.backends import", "from ...base import"),
        ):
            assert absolute in code or source.name != "__init__.py"
            code = code.replace(absolute, relative)
        name = "register_ops.py" if source.name == "__init__.py" else source.name
        (vendor / name).write_text(code)
    builtin = package / "dispatch" / "builtin_ops.py"
    last = '    "vllm_fl.backends.vendor.cpu.register_ops",\n'
    assert last in builtin.read_text()
    added = '    "vllm_fl.backends.vendor.acme.register_ops",\n'
    builtin.write_text(builtin.read_text().replace(last, last + added))

    here = {"PYTHONPATH": str(tmp_path)}
    found = registered(run, sys.executable, here)
    module = "vllm_fl.backends.vendor.acme.register_ops"
    assert found["origin"] == f"builtin '{module}', vllm-fl {vllm_fl.__version__}"
    assert found["module"] == module
    check_that_it_ran(engine, engine("tiny", CHOSEN | here))


def test_a_module_that_is_named_runs(engine, run) -> None:
    named = {"VLLM_FL_PLUGIN_MODULES": "vllm_fl_acme", "PYTHONPATH": str(EXAMPLE)}
    found = registered(run, sys.executable, named)
    assert found["origin"] == "plugin module 'vllm_fl_acme'"
    check_that_it_ran(engine, engine("tiny", CHOSEN | named))


def test_its_triton_kernel_runs_in_real_vllm_where_triton_interprets(engine) -> None:
    named = {"VLLM_FL_PLUGIN_MODULES": "vllm_fl_acme", "PYTHONPATH": str(EXAMPLE)}
    order = {"VLLM_FL_PER_OP": "rms_norm=impl:vendor.acme.triton", "TRITON_INTERPRET": "1"}
    reply = engine("tiny", named | order)
    rows = [row for row in reply["routes"][0]["ops"] if row["op"] == "rms_norm"]
    calls = {row["impl_id"]: row["calls"] for row in rows}
    assert calls["vendor.acme.triton"] > 0, rows
    assert reply["tokens"] == engine.stock("tiny")["tokens"]
