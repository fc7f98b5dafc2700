# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of
from vllm_fl.cli import snapshot as command
from vllm_fl.cli.main import main
from vllm_fl.cli.snapshot import FORMAT, render


def test_a_snapshot_is_json_with_all_that_a_bug_report_needs() -> None:
    data = samples.sample_snapshot()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {
        "format", "machine", "versions", "enabled", "device", "config", "config_error", "policy",
        "fingerprint", "plugins", "vendors", "ops", "implementations", "ties", "behind",
    }  # fmt: skip
    assert data["format"] == FORMAT
    assert data["versions"]["torch"] == "2.13.0+cpu"
    assert data["config"]["strict"] == {"value": False, "source": "default"}


def test_the_text_is_an_outline_of_the_same_data() -> None:
    data = samples.sample_snapshot()
    data["config_error"] = "VLLM_FL_PREFER: no"
    data["plugins"][1]["error"] = "ImportError: no libacme"
    data["policy"] = {"prefer": {"value": "vendor", "source": "policy.yaml:2"}}
    data["device"]["name"] = "Acme X1"
    text = text_of(render, data)
    told = [
        data["machine"], "cpu (Acme X1)", data["fingerprint"], "2, 1 failed",
        "acme: ImportError: no libacme", "wrong configuration: VLLM_FL_PREFER: no",
        "prefer = vendor (from policy.yaml:2)", "vendor.acme, vendor.cpu, reference.torch",
        *(version for version in data["versions"].values() if version), *data["versions"],
    ]  # fmt: skip
    assert [part for part in told if part not in text] == []


def test_a_machine_without_a_policy_is_a_short_text() -> None:
    stream = io.StringIO()
    render(samples.sample_snapshot(), stream)
    assert "policy:" not in stream.getvalue()


@pytest.mark.parametrize(
    ("arguments", "change", "code"),
    [([], {}, 0), (["--json"], {}, 0), (["--text"], {}, 0), ([], {"config_error": "no"}, 1)],
)
def test_it_is_json_unless_text_is_asked_for(
    monkeypatch, capfd, arguments: list[str], change: dict, code: int
) -> None:
    found = samples.found() | change
    monkeypatch.setattr(command, "survey", lambda question, **options: found)
    assert main(["snapshot", *arguments]) == code
    out = capfd.readouterr().out
    if "--text" in arguments:
        assert "fingerprint:" in out
    else:
        assert json.loads(out)["implementations"] == found["implementations"]


def test_on_a_machine_without_torch(without) -> None:
    done = run("snapshot", path=[without("torch", "vllm")])
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["ops"] == {}
