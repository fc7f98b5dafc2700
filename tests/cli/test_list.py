# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of, untold
from vllm_fl.cli import list as list_command
from vllm_fl.cli.errors import UsageError
from vllm_fl.cli.list import listing, render
from vllm_fl.cli.main import main


def test_the_text_tells_all_that_the_data_tell() -> None:
    data = samples.sample_list()
    data["failed"] = [{"plugin": "bad", "error": "ImportError: no libbad"}]
    data["config_error"] = "environment variable VLLM_FL_PREFER: no"
    data["unimplemented"] = ["moe_sum"]
    assert untold(render, data) == []
    assert "FAILED plugin bad: ImportError: no libbad" in text_of(render, data)


def test_availability_is_told_with_its_reason() -> None:
    rows = samples.sample_list()["implementations"]
    assert [(r["impl_id"], r["available"], r["reason"]) for r in rows[:2]] == [
        ("vendor.acme", False, "runs on acme, this device is cpu"),
        ("vendor.cpu", True, ""),
    ]
    text = text_of(render, samples.sample_list())
    assert text.count("no: runs on acme, this device is cpu") == 2


def test_being_switched_off_is_told() -> None:
    data = listing(samples.found() | {"enabled": False})
    assert text_of(render, data).endswith("vllm_fl is switched off: vLLM runs as without it\n")


def test_an_op_and_what_is_available_can_be_asked_for() -> None:
    data = listing(samples.found(), op="rms_norm", available=True)
    assert [(r["op"], r["impl_id"]) for r in data["implementations"]] == [
        ("rms_norm", "vendor.cpu"),
        ("rms_norm", "reference.torch"),
    ]


def test_a_declared_op_that_nobody_implements_is_named() -> None:
    manager = samples.manager()
    manager.registry.unregister("silu_and_mul", "vendor.acme")
    manager.registry.unregister("silu_and_mul", "vendor.cpu")
    manager.registry.unregister("silu_and_mul", "reference.torch")
    data = listing(samples.found(manager))
    assert data["unimplemented"] == ["silu_and_mul"]
    assert listing(samples.found(manager), op="rms_norm")["unimplemented"] == []


def test_an_unknown_op_is_wrong_usage_and_names_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        listing(samples.found(), op="rms_nrom")
    assert str(caught.value) == (
        "unknown op 'rms_nrom'; known: rms_norm, silu_and_mul. Did you mean \"rms_norm\"?"
    )


TALKATIVE = """
import os, subprocess, sys
print("a plugin prints")
os.write(1, b"to the file descriptor, too")
subprocess.run([sys.executable, "-c", "print('and its child')"])
raise ImportError("libacme.so")
"""


def test_stdout_carries_the_answer_alone_and_a_failed_plugin_is_exit_code_1(
    modules, without
) -> None:
    path = [without("torch", "vllm"), modules(talks=TALKATIVE)]
    done = run("list", "--json", path=path, env={"VLLM_FL_PLUGIN_MODULES": "talks"})
    data = json.loads(done.stdout)
    assert {"plugin": "talks", "error": "ImportError: libacme.so"} in data["failed"]
    assert "a plugin prints" in done.stderr
    assert done.returncode == 1


def test_on_this_machine_it_lists_what_ships() -> None:
    done = run("list", "--op", "silu_and_mul")
    assert done.returncode == 0, done.stderr
    assert "reference.torch" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--op", "rms_nrom"], 2), (["--op", "rms_norm", "--json"], 0)]
)
def test_the_exit_code_says_whether_the_question_was_right(
    monkeypatch, capfd, arguments: list[str], code: int
) -> None:
    monkeypatch.setattr(list_command, "survey", lambda question: samples.found())
    assert main(["list", *arguments]) == code
    out, err = capfd.readouterr()
    assert ("vllm-fl list: unknown op 'rms_nrom'" in err) is (code == 2)
    assert (out == "") is (code == 2)
