# SPDX-License-Identifier: Apache-2.0
"""A child that crashes, hangs or talks is told as what it is."""

from __future__ import annotations

import sys

import pytest

from vllm_fl.cli import child
from vllm_fl.cli.child import Reply, ask, survey
from vllm_fl.cli.errors import CommandError, UsageError


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def imported(modules, text: str, **options) -> Reply:
    sys.path.insert(0, str(modules(vllm_fl_probed=text)))
    return ask("import", {"module": "vllm_fl_probed"}, quiet=True, **options)


def test_the_child_has_the_parents_path_and_answers(modules) -> None:
    reply = imported(modules, "__version__ = '7.1'")
    assert reply.answer == {"version": "7.1"}
    assert (reply.error, reply.ended) == (None, None)


def test_what_a_child_prints_is_kept_out_of_the_answer(modules, capfd) -> None:
    reply = imported(modules, "print('to stdout', flush=True)\n__version__ = '1'")
    assert reply.answer == {"version": "1"}
    assert reply.log == ("to stdout",)
    assert capfd.readouterr() == ("", "")


def test_an_exception_is_an_error_with_its_notes(modules) -> None:
    text = "error = OSError('no libacme')\nerror.add_note('look there')\nraise error"
    reply = imported(modules, text)
    assert reply.error == {"text": "OSError: no libacme (look there)", "usage": False}
    assert "OSError: no libacme" in reply.log


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os._exit(0)", "ended with exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os; os.abort()", "was killed by SIGABRT"),
    ],
)
def test_a_crash_is_told_with_how_it_ended(modules, text: str, ended: str) -> None:
    reply = imported(modules, text)
    assert (reply.answer, reply.error, reply.ended) == (None, None, ended)


def test_a_child_that_hangs_is_ended_with_what_it_started(modules) -> None:
    text = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)"
    reply = imported(modules, text, timeout=1.5)
    assert reply.ended == "gave no answer in 2 s"
    assert reply.seconds < 10


def test_a_process_that_the_child_leaves_behind_is_not_waited_for(modules) -> None:
    text = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n__version__ = '1'"
    reply = imported(modules, text)
    assert reply.answer == {"version": "1"}
    assert reply.seconds < 10


def replies(monkeypatch, *given: Reply) -> list[list]:
    """Let `survey` be answered so; returns what it asks to leave out each time."""
    asked, queue = [], list(given)

    def answered(question, arguments, *, quiet):
        asked.append(arguments["skip"])
        return queue.pop(0)

    monkeypatch.setattr(child, "ask", answered)
    return asked


def crashed(*doing: str) -> Reply:
    return Reply(None, None, "was killed by SIGSEGV", doing or None, ("last words",), 0.1)


def test_a_survey_asks_again_without_what_ended_the_child(monkeypatch) -> None:
    asked = replies(
        monkeypatch,
        crashed("plugin", "module", "acme"),
        crashed("probe", "scale", "vendor.b"),
        Reply({"ok": 1}, None, None, None, (), 0.1),
    )
    assert survey("registry") == {"ok": 1}
    how = "the process that tried it was killed by SIGSEGV"
    acme, probe = [["plugin", "module", "acme"], how], [["probe", "scale", "vendor.b"], how]
    assert asked == [[], [acme], [acme, probe]]


def test_a_survey_gives_up_where_leaving_out_does_not_help(monkeypatch) -> None:
    asked = replies(monkeypatch, crashed("manager"), crashed("manager"))
    with pytest.raises(CommandError) as caught:
        survey("registry")
    assert str(caught.value) == (
        "the process that was asked was killed by SIGSEGV (manager). Its last words:\nlast words"
    )
    assert len(asked) == 2


@pytest.mark.parametrize(("usage", "kind"), [(True, UsageError), (False, CommandError)])
def test_an_error_of_the_child_is_the_parents(monkeypatch, usage: bool, kind: type) -> None:
    replies(monkeypatch, Reply(None, {"text": "no such op", "usage": usage}, None, None, (), 0.1))
    with pytest.raises(CommandError, match=r"^no such op$") as caught:
        survey("explain")
    assert type(caught.value) is kind
