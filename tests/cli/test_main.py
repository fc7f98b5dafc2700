# SPDX-License-Identifier: Apache-2.0
import argparse
import io
import re
import subprocess
import sys

import pytest

from vllm_fl import __version__
from vllm_fl.cli import main as main_module
from vllm_fl.cli.demo_model import DemoModelError
from vllm_fl.cli.main import COMMANDS, build_parser, main
from vllm_fl.dispatch.errors import ConfigError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """command(run) makes `run` the only command, called "try"."""

    def command(run) -> None:
        class Try:
            @staticmethod
            def add_parser(commands) -> None:
                commands.add_parser("try").set_defaults(run=run)

        monkeypatch.setattr(main_module, "COMMANDS", (Try,))

    return command


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_the_commands(command, code: int) -> None:
    command(lambda arguments: code)
    assert main(["try"]) == code


def test_the_command_gets_its_arguments(command) -> None:
    seen: list[argparse.Namespace] = []
    command(lambda arguments: seen.append(arguments) or 0)
    main(["try"])
    assert seen[0].command == "try"


@pytest.mark.parametrize("error", [ConfigError("a wrong setting"), DemoModelError("no model")])
def test_an_expected_error_is_one_line_on_stderr_and_exit_code_1(command, error, capsys) -> None:
    def run(arguments) -> int:
        raise error

    command(run)
    assert main(["try"]) == 1
    assert capsys.readouterr() == ("", f"vllm-fl try: {error}\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            NotADirectoryError(20, "Not a directory", "afile/acme"),
            "cannot use afile/acme: Not a directory; name another one, or mend it",
        ),
        (
            OSError(18, "Invalid cross-device link", b"a", None, b"\xff"),
            "cannot use a or \\udcff: Invalid cross-device link; name another one, or mend it",
        ),
        (
            OSError(36, "File name too long", "x" * 300),
            f"cannot use {'x' * 90}...{'x' * 90}: File name too long; name another one, or mend it",
        ),
        (
            OSError(28, "No space left on device"),
            "cannot go on: No space left on device; the answer is not complete",
        ),
        (
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
            "a text cannot be written or read: 'utf-8' codec can't encode character '\\udcff' in "
            "position 0: surrogates not allowed; give a name or file in UTF-8",
        ),
    ],
)
def test_what_the_system_refuses_is_one_sentence_and_exit_code_2(
    command, error, said: str, monkeypatch
) -> None:
    def run(arguments) -> int:
        raise error

    command(run)
    buffer = io.BytesIO()
    stderr = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace")  # Python's own
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["try"]) == 2
    assert buffer.getvalue().decode() == f"vllm-fl try: {said}\n"


def test_an_unexpected_error_shows_where_it_came_from(command) -> None:
    def run(arguments) -> int:
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_the_version_goes_to_stdout(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr() == (f"vllm-fl {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["dmeo"], "invalid choice: 'dmeo'"),
        ([], "the following arguments are required: COMMAND"),
        (["--nonsense"], "required: COMMAND"),
        (["demo", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(argv, text, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.startswith("usage: vllm-fl ")


def test_help_names_every_command(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    names = [module.__name__.rpartition(".")[2].replace("_", "-") for module in COMMANDS]
    assert [name for name in names if not re.search(rf"^    {name}\s", out, re.MULTILINE)] == []


def test_every_command_has_a_function_to_run() -> None:
    parser = build_parser()
    assert parser.parse_args(["demo"]).run is not None


def test_it_can_be_run_as_a_module_and_imports_neither_torch_nor_vllm_for_that() -> None:
    program = (
        "import sys\n"
        "from vllm_fl.cli.main import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'vllm', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"vllm-fl {__version__}\n\n"
    module = [sys.executable, "-m", "vllm_fl.cli.main", "--version"]
    done = subprocess.run(module, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"vllm-fl {__version__}\n"
