# SPDX-License-Identifier: Apache-2.0
"""What an import of FlagGems may change: shown with packages that do worse, and with FlagGems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.backends.flaggems import versions
from vllm_fl.native import native_refusal

SET_BY_FLAGGEMS = ("FLAGGEMS_SOURCE_DIR", "GEMS_VENDOR", "TRITON_INTERPRET")
"""The last one by `make test-flaggems`."""

LOAD = """
import json, multiprocessing, os, sys
import torch
from vllm_fl.backends.flaggems import loading
{before}
try:
    modules = loading.import_flaggems("nvidia")
    error = None
except Exception as raised:
    modules, error = (), f"{{type(raised).__name__}}: {{raised}}"
multiprocessing.set_start_method("spawn")  # raises where it is fixed already
print(json.dumps({{
    "error": error,
    "modules": [m.__name__ for m in modules],
    "vendor": os.environ.get("GEMS_VENDOR"),
    "vllm": "vllm" in sys.modules,
    {more}
}}))
"""


def load(before: str = "", more: str = "", path: Path | None = None, **environment: str) -> Any:
    """What a fresh process says after importing FlagGems; the only line it may print."""
    here = {k: v for k, v in os.environ.items() if k not in SET_BY_FLAGGEMS}
    if path is not None:
        here["PYTHONPATH"] = f"{path}{os.pathsep}{here.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD.format(before=before, more=more)],
        capture_output=True, text=True, timeout=120, env=here | environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def package(folder: Path, text: str, name: str = "flag_gems") -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    return folder


def test_nothing_is_printed_warned_of_or_fixed_and_vllms_patches_are_kept_out(
    tmp_path: Path,
) -> None:
    here = package(
        package(tmp_path, "", "flaggems_vllm"),
        "import multiprocessing, warnings\n"
        "from flag_gems.patches import *\n"
        "print('hello')\n"
        "warnings.warn('old', UserWarning)\n"
        "lock = multiprocessing.Lock()\n",
    )
    (here / "flag_gems" / "patches.py").write_text("import vllm\n")
    found = load(path=here)
    assert (found["error"], found["vllm"], found["vendor"]) == (None, False, "nvidia")
    # The order in which a symbol is looked for.
    assert found["modules"] == ["flaggems_vllm", "flag_gems"]


def test_what_the_user_chose_stays_the_vendor_and_the_start_method(tmp_path: Path) -> None:
    here = package(tmp_path, "import multiprocessing\nlock = multiprocessing.Lock()\n")
    found = load(
        before="multiprocessing.set_start_method('forkserver')\n"
        "multiprocessing.set_start_method = lambda method: None\n",
        more="'method': multiprocessing.get_start_method(),",
        path=here,
        GEMS_VENDOR="metax",
    )
    assert (found["vendor"], found["method"]) == ("metax", "forkserver")


def test_operators_in_vllms_namespaces_are_an_error_that_names_them(tmp_path: Path) -> None:
    here = package(
        tmp_path,
        "import torch\n"
        "kept = torch.library.Library('_moe_C', 'FRAGMENT')\n"
        "kept.define('topk_softmax(Tensor x) -> ()')\n",
    )
    assert load(path=here)["error"] == (
        "RuntimeError: importing flag_gems defined operators of vLLM: ['_moe_C::topk_softmax']"
    )


BIND = """
import json, sys, torch
from vllm_fl.backends.flaggems import versions
from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend, backend
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import DeviceFacts
FlagGemsBackend.requires = ("torch",)
FlagGemsBackend.is_available = lambda self: True
FlagGemsBackend.device_vendor = lambda self: "cuda"
versions.defines = lambda symbol: True
versions.triton_version = lambda: None
manager = OpManager(config=Config(), device=DeviceFacts("cuda", "cuda"))
for op in ("rms_norm", "silu_and_mul", "rms_norm"):
    manager.bind(op)
print(json.dumps({
    "reasons": [l.reason for l in manager.decide("rms_norm").losers
                if l.impl_id == "default.flaggems"],
    "winner": manager.decide("silu_and_mul").winner_id,
}))
"""


def test_an_import_that_fails_becomes_the_reason_and_is_tried_once(tmp_path: Path) -> None:
    here = package(
        tmp_path,
        "open('tried', 'a').write('x')\nraise RuntimeError('No device were detected')\n",
    )
    done = subprocess.run(
        [sys.executable, "-c", BIND],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])  # older vLLM logs there too
    assert found["reasons"] == ["loading it raised RuntimeError: No device were detected"]
    ours = native_refusal("cuda") is None  # kernels for CUDA, which then come next
    assert found["winner"] == ("vendor.cuda.fl" if ours else "reference.torch")
    assert (tmp_path / "tried").read_text() == "x"
    assert done.stderr.count("No device were detected") == 1


# ----------------------------------------------------------------------- FlagGems itself

REAL = """
import logging, numpy
from tests.backends.flaggems import interpreter
interpreter.pretend_cuda()
environment, root = dict(os.environ), logging.getLogger()
kept = (numpy.geterr(), numpy.get_printoptions(), root.level, list(root.handlers),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())
operators = set(torch._C._dispatch_get_all_op_names())
"""
SAYS = """
    "same": kept == (numpy.geterr(), numpy.get_printoptions(), root.level, list(root.handlers),
                     torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
    "environment": sorted(k for k, v in os.environ.items() if environment.get(k) != v),
    "operators": sorted(set(torch._C._dispatch_get_all_op_names()) - operators),
    "overrides": modules[-1].current_work_registrar is not None,
    "top": sorted({n for n in sys.modules if n in ("_nvidia", "hopper", "backend_utils")}),
"""


@pytest.fixture(scope="module")
def real() -> Any:
    refusal = versions.reason(versions.flaggems_version(), versions.triton_version())
    if refusal is not None:
        pytest.skip(f"{refusal}; `make test-flaggems` has an environment of its own")
    return load(REAL, SAYS)


def test_flaggems_defines_no_operator_and_imports_no_vllm(real: Any) -> None:
    assert (real["error"], real["vllm"], real["operators"]) == (None, False, [])


def test_flaggems_changes_nothing_of_the_process_but_what_loading_names(real: Any) -> None:
    assert real["same"]
    assert real["environment"] == ["FLAGGEMS_SOURCE_DIR", "GEMS_VENDOR"]
    assert real["top"] == ["_nvidia", "backend_utils", "hopper"]


def test_flaggems_overrides_no_operator_of_pytorch(real: Any) -> None:
    assert not real["overrides"]
