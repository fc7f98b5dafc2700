# SPDX-License-Identifier: Apache-2.0
"""Real vLLM, one engine at a time, each in a process and an environment of its own.

The engine's core runs in that same process (VLLM_ENABLE_V1_MULTIPROCESSING=0), which halves the
time to load; the tests of the demo, the server and tensor parallelism start vLLM's processes as
users do. Equal requests are run once in a pytest session.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import demo_model as demo_model_module

HERE = Path(__file__).parent

TEXTS = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Water boils at a lower temperature on a mountain than at the sea, because the air presses "
    "less on its surface there. A cook who wants to boil eggs on a mountain therefore has to",
    "Once upon a time there was a small lighthouse on a rock in the sea. Every evening its keeper "
    "climbed the hundred and twelve steps to light the lamp. One evening in November, when",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    "
    "return a\n\n\ndef factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n",
    "The three states of matter that we meet every day are solid, liquid and gas. In a solid the "
    "particles keep their places; in a liquid they move past each other; in a gas they",
    "Dear Sir or Madam, I am writing to apply for the position of junior gardener that was "
    "advertised in Saturday's newspaper. For the last two years I have worked in",
    "Monday: rain, 12 degrees. Tuesday: rain, 13 degrees. Wednesday: clouds, 15 degrees. "
    "Thursday: sun, 18 degrees. Friday: sun, 20 degrees. Saturday:",
    "Question: A train leaves at nine o'clock and travels 180 kilometres in two hours. What is "
    "its average speed, and when does it arrive at a town 270 kilometres away? Answer:",
)
IDS = [random.Random(seed).choices(range(1024), k=64) for seed in range(8)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process printed."""

    stdout: str
    stderr: str


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting of vLLM or vllm_fl, then the changes. A
    PYTHONPATH among them goes before the one that is there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    paths = [changes.get("PYTHONPATH"), kept.get("PYTHONPATH")]
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **changes,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def run_process(
    command: Sequence[str | Path],
    changes: Mapping[str, str] | None = None,
    *,
    fails: bool = False,
    timeout: int = 300,
) -> Outcome:
    """Run a command to its end; the test fails, with all that it printed, if it ends otherwise
    than expected.

    Args:
        changes: of the environment, see `environment`.
        fails: an exit code other than 0 is expected.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment(changes or {}),
        cwd="/",  # `python -c` and `python -m` look for modules there first
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ended = ""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        ended = f" (killed after {timeout} s)"
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
    finally:
        if process.returncode is None:  # the test was interrupted, or out of time itself
            os.killpg(process.pid, signal.SIGKILL)
    if ended or fails != (process.returncode != 0):
        pytest.fail(f"{command} ended with {process.returncode}{ended}:\n{stdout}\n{stderr}")
    return Outcome(stdout, stderr)


class Engines:
    """Runs engines, and remembers their replies."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._replies: dict[str, dict[str, Any]] = {}

    def __call__(
        self,
        model: str,
        changes: Mapping[str, str] | None = None,
        *,
        python: Path | str = sys.executable,
        prompts: Sequence[Any] | None = None,
        max_tokens: int = 64,
        logprobs: bool = True,
        sampling: Mapping[str, Any] | None = None,
        each: Sequence[Mapping[str, Any]] = (),
        fails: bool = False,
        **llm: Any,
    ) -> dict[str, Any]:
        """Load a model, let it answer prompts greedily, and return engine.py's reply and the
        "log".

        Args:
            model: "demo", or one without a tokenizer: "tiny" (a Qwen3), "tiny_moe",
                "tiny_llama" or "tiny_gemma".
            changes: of the environment, see `environment`.
            prompts: None takes 8 texts for "demo", 8 lists of token ids for the others.
            logprobs: of the prompts, too.
            sampling: more arguments of SamplingParams.
            each: more of them for each prompt; the short generation then has all prompts too.
            fails: it is expected to fail; then the log is all there is.
            **llm: arguments of vllm.LLM beside the usual ones.
        """
        changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(changes or {})}
        loaded = "fl" in changes.get("VLLM_PLUGINS", "fl").split(",")
        has_plugin = loaded and changes.get("VLLM_FL_ENABLED") != "0"
        request = {
            "llm": {
                "model": str(self._request.getfixturevalue(f"{model}_model")),
                "skip_tokenizer_init": model != "demo",
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 8,
                "gpu_memory_utilization": 0.3,
                "disable_log_stats": True,
                **llm,
            },
            "prompts": prompts or (TEXTS if model == "demo" else IDS),
            "sampling": {
                "temperature": 0.0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "prompt_logprobs": 0 if logprobs else None,
                **(sampling or {}),
            },
            "each": list(each),
            "routes": has_plugin,
        }
        key = json.dumps([request, changes, str(python)], sort_keys=True)
        if key not in self._replies:
            self._replies[key] = self._run(request, changes, python, fails)
        return self._replies[key]

    def stock(self, model: str, **llm: Any) -> dict[str, Any]:
        """The same without any plugin."""
        return self(model, {"VLLM_PLUGINS": ""}, **llm)

    def _run(
        self, request: dict[str, Any], changes: Mapping[str, str], python: Path | str, fails: bool
    ) -> dict[str, Any]:
        question = self._folder / f"{len(self._replies)}.request.json"
        answer = self._folder / f"{len(self._replies)}.reply.json"
        question.write_text(json.dumps(request))
        command = [python, HERE / "engine.py", question, answer]
        outcome = run_process(command, changes, fails=fails)
        return {"log": outcome.stdout + outcome.stderr} | (
            {} if fails else json.loads(answer.read_text())
        )


@pytest.fixture(scope="session", name="environment")
def environment_() -> Callable[[Mapping[str, str]], dict[str, str]]:
    """`environment`."""
    return environment


@pytest.fixture(scope="session")
def run() -> Callable[..., Outcome]:
    """`run_process`."""
    return run_process


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(request, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's real model."""
    return demo_model_module.prepare()


def write_tiny(folder: Path, family: str) -> Path:
    code = "import pathlib, sys, models; models.tiny(pathlib.Path(sys.argv[1]), sys.argv[2])"
    run_process([sys.executable, "-c", code, folder, family], {"PYTHONPATH": str(HERE)})
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with random weights: norms over heads, which are slices."""
    return write_tiny(tmp_path_factory.mktemp("tiny_qwen3"), "qwen3")


@pytest.fixture(scope="session")
def tiny_llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights."""
    return write_tiny(tmp_path_factory.mktemp("tiny_llama"), "llama")


@pytest.fixture(scope="session")
def tiny_gemma_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma of two layers with random weights: norms that add 1 to their weight, and gelu."""
    return write_tiny(tmp_path_factory.mktemp("tiny_gemma"), "gemma")


@pytest.fixture(scope="session")
def tiny_gemma3_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of two layers with random weights: one local, one global."""
    return write_tiny(tmp_path_factory.mktemp("tiny_gemma3"), "gemma3")


@pytest.fixture(scope="session")
def tiny_moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers with random weights."""
    return write_tiny(tmp_path_factory.mktemp("tiny_moe"), "qwen3_moe")
