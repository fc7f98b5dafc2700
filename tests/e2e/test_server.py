# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

START_SECONDS = 240
VALIDATE = "--fail-on-environ-validation"


def has_validation() -> bool:
    """Whether this release of vLLM has the option, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return VALIDATE in (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def post(url: str, data: dict[str, object]) -> dict[str, object]:
    body = json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture
def server(environment, demo_model, port, tmp_path):
    """The base URL of vLLM's OpenAI-compatible server, which checks its variables' names."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", demo_model]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", port]
    command += ["--enforce-eager", "--max-model-len", 256, "--gpu-memory-utilization", 0.3]
    command += [VALIDATE] if has_validation() else []
    log = tmp_path / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment({"VLLM_FL_PREFER": "vendor", "VLLM_FL_DENY_VENDORS": "ascend"}),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the server did not start (exit code {process.poll()}):\n{log.read_text()}")


def test_the_server_starts_with_validated_variables_and_answers(server) -> None:
    prompt = "The capital of France is"
    question = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = post(f"{server}/v1/completions", question)
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.skipif(not has_validation(), reason=f"this vLLM has no {VALIDATE}")
def test_without_the_plugin_the_same_variables_are_refused(run, demo_model) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", demo_model]
    changes = {"VLLM_PLUGINS": "", "VLLM_FL_PREFER": "vendor"}
    outcome = run([*command, VALIDATE], changes, fails=True)
    assert "Unknown vLLM environment variable detected: VLLM_FL_PREFER" in outcome.stderr
