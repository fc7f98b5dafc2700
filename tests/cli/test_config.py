# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of, untold
from vllm_fl.cli.config import effective, render
from vllm_fl.cli.errors import CommandError


def test_the_text_tells_all_that_the_data_tell() -> None:
    assert untold(render, samples.sample_config()) == []


def test_each_order_has_a_line_with_its_own_place() -> None:
    lines = [
        " ".join(line.split()) for line in text_of(render, samples.sample_config()).split("\n")
    ]
    assert "op_backends.rms_norm vendor:cpu, reference policy.yaml:5" in lines
    assert "op_backends.silu_and_mul@compiled native policy.yaml:6" in lines
    assert "strict true environment variable VLLM_FL_STRICT" in lines
    assert "log_level INFO default" in lines
    assert "allow_vendors - default" in lines


def test_nobody_is_another_value_than_none() -> None:
    data = {"allow_vendors": {"value": [], "source": "policy.yaml:1"}}
    assert "nobody" in text_of(render, data)


def test_a_wrong_configuration_is_an_error() -> None:
    with pytest.raises(CommandError, match="unknown kind"):
        effective({"config": {}, "config_error": 'VLLM_FL_PREFER="cuda": unknown kind "cuda"'})


def test_the_effective_configuration_of_this_machine(tmp_path: Path, without) -> None:
    """Without torch, too: a configuration needs none."""
    file = tmp_path / "policy.yaml"
    file.write_text("strict: true\nprefer: reference\n")
    env = {"VLLM_FL_CONFIG": str(file), "VLLM_FL_PREFER": "vendor"}
    hidden = without("torch", "vllm")
    done = run("config", "--json", path=[hidden], env=env)
    data = json.loads(done.stdout)
    assert data["strict"] == {"value": True, "source": f"{file}:1"}
    assert data["prefer"] == {"value": "vendor", "source": "environment variable VLLM_FL_PREFER"}
    assert done.returncode == 0
    file.write_text("strict: perhaps\n")
    done = run("config", path=[hidden], env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"vllm-fl config: {file}:1: strict: must be")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"VLLM_FL_DEVICE": "tpu"},
            'environment variable VLLM_FL_DEVICE="tpu": unknown device "tpu"; valid: auto, cpu, '
            "cuda, hip, none.",
        ),
        (
            {"VLLM_FL_OOT_BLACKLIST": "rms_norn"},
            'environment variable VLLM_FL_OOT_BLACKLIST: unknown layer "rms_norn"; valid: ',
        ),
        ({"VLLM_FL_OOT_WHITELIST": "silu"}, "environment variable VLLM_FL_OOT_WHITELIST: unknown "),
        ({"VLLM_FL_PER_OP": "nope=reference"}, "environment variable VLLM_FL_PER_OP: unknown op"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_names_that_nobody_knows_are_wrong(env, said: str) -> None:
    done = run("config", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"vllm-fl config: {said}")


def test_a_layer_that_there_is_not_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("strict: false\noot_blacklist: [rms_norm, nope]\n")
    done = run("config", env={"VLLM_FL_CONFIG": str(file)})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f'vllm-fl config: {file}:2: unknown layer "nope"; valid: ')
    done = run("config", env={"VLLM_FL_CONFIG": str(file), "VLLM_FL_ENABLED": "0"})
    assert done.returncode == 0  # off means off: the file is not even read
