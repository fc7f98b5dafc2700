# SPDX-License-Identifier: Apache-2.0
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import demo, demo_model
from vllm_fl.cli.demo_model import DemoModelError
from vllm_fl.cli.main import main
from vllm_fl.dispatch import reset_default_manager

ROW = {
    "op": "rms_norm",
    "impl_id": "vendor.cpu",
    "kind": "vendor",
    "mode": "eager",
    "bound": 61,
    "calls": 0,
    "reason": "highest priority available (100)",
    "rejected": [],
}


class Engine:
    """Stands in for vllm.LLM with two workers."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.requests: list[str] = []
        self.running = True
        self.rows = [ROW]
        self.llm_engine = types.SimpleNamespace(
            engine_core=types.SimpleNamespace(shutdown=self._shutdown)
        )

    def _shutdown(self) -> None:
        self.running = False

    def collective_rpc(self, name: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        assert name == "vllm_fl_dispatch"
        self.requests += args
        calls = 0 if args == ("count",) else 10
        return [{"ops": [row | {"calls": calls} for row in self.rows]} for _ in range(2)]

    def chat(self, messages: list[dict[str, str]], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.requests.append("chat")
        self.messages, self.sampling = messages, sampling
        os.write(1, b"noise of the engine\n")
        answer = types.SimpleNamespace(text=" Paris. ")
        return [types.SimpleNamespace(outputs=[answer])]


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch):
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_FL_LOG_LEVEL", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "")  # so that the demo's defaults are forgotten afterwards
        monkeypatch.delenv(name)
    reset_default_manager()
    yield
    reset_default_manager()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Engine]:
    """The engines that the demo started, with a model that needs no preparation."""
    started: list[Engine] = []

    def start(**arguments: Any) -> Engine:
        started.append(Engine(**arguments))
        return started[-1]

    monkeypatch.setattr(demo_model, "prepare", lambda: tmp_path)
    fake = types.ModuleType("vllm")
    fake.LLM = start  # type: ignore[attr-defined]
    fake.SamplingParams = lambda **arguments: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return started


@pytest.fixture
def no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> Path:
        pytest.fail("the model is prepared")

    monkeypatch.setattr(demo_model, "prepare", prepare)


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("text", ["0", "-1", "abc", "1.5", ""])
@pytest.mark.usefixtures("no_preparation")
def test_a_length_that_is_no_positive_whole_number_is_wrong_usage(text, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", f"--max-tokens={text}"])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "vllm-fl demo: error: argument --max-tokens: must be a whole number of at least 1, "
        f'found "{text}"'
    )


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("VLLM_FL_PREFER", "vender", 'unknown kind "vender"'),
        ("VLLM_FL_PERFER", "vendor", 'Did you mean "VLLM_FL_PREFER"?'),
        ("VLLM_FL_CONFIG", "/nowhere.yaml", "cannot read the file"),
        ("VLLM_FL_PER_OP", "rms_nrom=native", 'unknown op "rms_nrom"'),
        ("VLLM_FL_PER_OP", "rms_norm=impl:vendor.cpux", "unknown implementation of rms_norm"),
        ("VLLM_FL_DENY_VENDORS", "cpux", 'unknown vendor "cpux"'),
        ("VLLM_FL_OOT_BLACKLIST", "rmsnorm", 'unknown layer "rmsnorm"'),
        ("VLLM_FL_PLATFORM", "cpux", 'unknown vendor "cpux"'),
    ],
)
@pytest.mark.usefixtures("no_preparation")
def test_a_wrong_setting_ends_it_before_the_model_is_prepared(
    monkeypatch, capfd, variable, value, text
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["demo"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("vllm-fl demo: ")
    assert variable in err
    assert text in err
    assert "Traceback" not in err


def test_a_model_that_cannot_be_prepared_is_an_error_in_words(monkeypatch, capfd) -> None:
    def prepare() -> Path:
        raise DemoModelError("demo model: no network")

    monkeypatch.setattr(demo_model, "prepare", prepare)
    assert main(["demo", "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "vllm-fl demo: preparing the model",
        "vllm-fl demo: demo model: no network",
    ]


# ----------------------------------------------------------------------------------- the answer


def test_json_is_all_there_is_on_stdout(engines, capfd) -> None:
    assert main(["demo", "--json"]) == 0
    out, err = capfd.readouterr()
    row = {name: value for name, value in ROW.items() if name != "mode"}
    assert json.loads(out) == {
        "answer": "Paris.",
        "mode": "eager",
        "ops": [row | {"bound": 122, "calls": 20}],  # of both workers
    }
    assert out.count("\n") == 1
    assert "vllm-fl demo: preparing the model\n" in err


def test_the_text_has_question_answer_and_table(engines, capfd) -> None:
    assert main(["demo", "--prompt", "Where?"]) == 0
    lines = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    assert lines == [
        "",
        "user:      Where?",
        "assistant: Paris.",
        "",
        "What ran in the workers (eager):",
        "",
        " operator   implementation   kind     layers   calls   why",
        " " + "─" * 86,
        " rms_norm   vendor.cpu       vendor      122      20   highest priority available (100)",
        "",
        "Nothing was rejected.",
    ]


def test_what_was_rejected_is_told_with_its_reason(engines, monkeypatch, capfd) -> None:
    rejected = [{"impl_id": "vendor.cpu", "reason": "hidden_size 20"}]
    monkeypatch.setitem(ROW, "rejected", rejected)
    assert main(["demo"]) == 0
    out = capfd.readouterr().out
    assert "What was rejected, and why:" in out
    assert " rms_norm   vendor.cpu       hidden_size 20" in out


def test_it_asks_counting_first_and_ends_the_engine(engines) -> None:
    main(["demo", "--max-tokens", "7", "--prompt", "Where?"])
    (engine,) = engines
    assert engine.requests == ["count", "chat", "uncount"]
    assert engine.messages == [{"role": "user", "content": "Where?"}]
    assert engine.sampling == {"temperature": 0.0, "max_tokens": 7}
    assert engine.arguments["enforce_eager"] is True
    assert not engine.running


def test_compiled_is_vllms_default_mode(engines, capfd) -> None:
    assert main(["demo", "--compiled", "--json"]) == 0
    assert engines[0].arguments["enforce_eager"] is False
    assert json.loads(capfd.readouterr().out)["mode"] == "compiled"


def test_switched_off_it_says_so_and_asks_the_workers_nothing(engines, monkeypatch, capfd) -> None:
    monkeypatch.setenv("VLLM_FL_ENABLED", "0")
    assert main(["demo"]) == 0
    assert engines[0].requests == ["chat"]
    assert capfd.readouterr().out.splitlines()[-1] == (
        "vllm_fl is switched off (VLLM_FL_ENABLED=0): stock vLLM answered."
    )


def test_the_engine_ends_when_a_worker_cannot_answer(engines, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        Engine, "collective_rpc", lambda self, name, args: [{"error": "KeyError: 'x'"}]
    )
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.endswith("demo: a worker could not answer: KeyError: 'x'\n")
    assert not engines[0].running


def test_vllms_log_is_quiet_unless_asked_for_or_set(engines, monkeypatch) -> None:
    main(["demo", "--verbose"])
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    main(["demo"])
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_FL_LOG_LEVEL"] == "WARNING"


def test_the_result_is_json_ready() -> None:
    result = demo.DemoResult("Where?", "Paris.", "eager", [dict(ROW)], enabled=True)
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
