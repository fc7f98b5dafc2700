# SPDX-License-Identifier: Apache-2.0
"""The doctor is readable on machines where half of it is broken."""

from __future__ import annotations

import json

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of, untold
from vllm_fl.cli import doctor
from vllm_fl.cli.child import Reply
from vllm_fl.cli.doctor import render
from vllm_fl.cli.errors import CommandError
from vllm_fl.cli.main import main

CODES = ("level", "code", "enabled", "vendor", "device_type", "problems", "notes")
"""Machine-readable words for what the text says in sentences."""


def test_the_text_tells_all_that_the_data_tell() -> None:
    assert untold(render, samples.sample_doctor(), (*CODES, "device")) == []
    assert text_of(render, samples.sample_doctor()).endswith("Verdict: 1 problem.\n")


def test_what_could_not_be_looked_at_is_told_and_the_verdict_is_last() -> None:
    data = doctor.diagnose(
        samples.VERSIONS, {"torch": "RuntimeError: x", "numpy": None},
        {"error": "the process was killed by SIGSEGV"}, {"error": "RuntimeError: y"},
        {**samples.NATIVE, "asked": "", "torch": None, "problem": "it was not built by setup.py"},
    )  # fmt: skip
    assert untold(render, data, CODES) == []
    assert text_of(render, data).splitlines()[-1] == "Verdict: 4 problems."


def findings(done) -> list[str]:
    return [f["text"] for f in json.loads(done.stdout)["findings"] if f["level"] == "problem"]


CRASHES = {
    "vllm_fl_exits": "import os\nprint('a plugin prints', flush=True)\nos._exit(3)",
    "vllm_fl_segfaults": "import ctypes\nctypes.string_at(0)",
    "vllm_fl_raises": "raise ImportError('libacme.so.1: cannot open shared object file')",
    "vllm_fl_works": "def register(registry): pass",
}


def test_plugins_that_crash_at_import_without_torch(modules, without) -> None:
    done = run(
        "doctor", "--json",
        path=[without("torch", "vllm"), modules(**CRASHES)],
        env={"VLLM_FL_PLUGIN_MODULES": ",".join(CRASHES)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    data = json.loads(done.stdout)
    errors = {p["name"]: p["error"] for p in data["plugins"] if p["name"] in CRASHES}
    assert errors == {
        "vllm_fl_exits": "PluginError: the process that tried it ended with exit code 3",
        "vllm_fl_segfaults": "PluginError: the process that tried it was killed by SIGSEGV",
        "vllm_fl_raises": "ImportError: libacme.so.1: cannot open shared object file",
        "vllm_fl_works": None,
    }
    assert "torch cannot be imported: ModuleNotFoundError: No module named 'torch'" in findings(
        done
    )


def test_a_broken_numpy(tmp_path, without) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise RuntimeError('numpy is broken')")
    done = run("doctor", path=[tmp_path, without("vllm")])
    assert (done.returncode, done.stderr) == (1, "")
    assert "RuntimeError: numpy is broken" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Verdict: ")


@pytest.fixture
def answers(monkeypatch):
    """answers(hooks=..., registry=...) is what the child processes answer."""

    def answers(**given):
        def ask(question, arguments, *, quiet):
            answer = given.get(question, {"version": "1"})
            if isinstance(answer, Reply):
                return answer
            return Reply(answer, None, None, None, (), 0.1)

        def survey(question, **arguments):
            if isinstance(given["registry"], Exception):
                raise given["registry"]
            return given["registry"]

        monkeypatch.setattr(doctor, "ask", ask)
        monkeypatch.setattr(doctor, "survey", survey)
        monkeypatch.setattr(doctor, "installed_versions", lambda: samples.VERSIONS)
        monkeypatch.setattr(doctor, "native_kernels", lambda: samples.NATIVE)

    return answers


def test_what_the_children_say_is_what_is_diagnosed(answers) -> None:
    hooks = {key: value for key, value in samples.HOOKS.items() if key != "error"}
    platform = samples.platform()
    hooks["platform"] = {name: platform.pop(name) for name in ("active", "shims")}
    answers(registry=samples.found(), hooks=hooks, platform=platform)
    assert doctor.examine() == samples.sample_doctor()


def test_children_that_crash_are_findings(answers) -> None:
    crashed = Reply(None, None, "was killed by SIGSEGV", None, (), 0.1)
    refused = CommandError("the process that was asked was killed by SIGBUS")
    answers(registry=refused, hooks=crashed, **{"import": crashed})
    texts = [f["text"] for f in doctor.examine()["findings"]]
    assert texts[:2] == [
        "torch cannot be imported: the process was killed by SIGSEGV",
        "numpy cannot be imported: the process was killed by SIGSEGV",
    ]
    assert "it could not be looked at: the process that was asked was killed by SIGBUS" in texts
    assert "registering the plugin as vLLM does: the process was killed by SIGSEGV" in texts


@pytest.mark.parametrize(("package", "code"), [("flag-gems", 0), ("sqlalchemy", 1)])
def test_the_exit_code_tells_whether_a_problem_was_found(
    answers, monkeypatch, capfd, package: str, code: int
) -> None:
    hooks = {key: value for key, value in samples.HOOKS.items() if key != "error"}
    answers(registry=samples.found(), hooks=hooks)
    versions = [entry for entry in samples.VERSIONS if entry["package"] != package]
    monkeypatch.setattr(doctor, "installed_versions", lambda: versions)
    assert main(["doctor"]) == code
    assert "Verdict: " in capfd.readouterr().out


@pytest.mark.extended
def test_on_this_machine_the_hooks_of_a_real_vllm_are_listed() -> None:
    done = run("doctor", "--json")
    data = json.loads(done.stdout)
    assert data["hooks"]["error"] is None
    assert "vllm.v1.worker.worker_base" in data["hooks"]["awaited"]
    assert done.returncode == (1 if data["verdict"]["problems"] else 0)
