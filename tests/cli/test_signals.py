# SPDX-License-Identifier: Apache-2.0
"""A command that is told to end leaves no process behind, and nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT
from vllm_fl.cli import main as main_module
from vllm_fl.cli.child import ask, questions
from vllm_fl.cli.main import main
from vllm_fl.cli.signals import Ended, raised_as_exceptions

HANGS = """
import os, pathlib, subprocess, time
started = subprocess.Popen(["sleep", "60"])
file = pathlib.Path(os.environ["PIDS"])
file.with_suffix(".new").write_text(f"{os.getpid()} {started.pid}")
file.with_suffix(".new").rename(file)
time.sleep(60)
"""


def runs(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def heed() -> None:
    """A test run in a background or under nohup ignores these, and so does what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for(what, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(what())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    ("command", "signum", "code"),
    [
        ("list", signal.SIGTERM, 143),
        ("list", signal.SIGKILL, -9),
        ("explain rms_norm", signal.SIGHUP, 129),
        ("doctor", signal.SIGTERM, 143),
        ("doctor", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_child_that_was_asked_and_what_it_started(
    command: str, signum: signal.Signals, code: int, without, modules, tmp_path
) -> None:
    pids = tmp_path / "pids"
    paths = [without("torch", "vllm"), modules(vllm_fl_hangs=HANGS), ROOT]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_fl.cli.main", *command.split()],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "VLLM_FL_PLUGIN_MODULES": "vllm_fl_hangs",
            "PIDS": str(pids),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,
    )
    try:
        assert wait_for(pids.exists)
        ours = [int(pid) for pid in pids.read_text().split()]
        assert all(map(runs, ours))
        process.send_signal(signum)
        said = process.communicate(timeout=20)[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == code
    assert wait_for(lambda: not any(map(runs, ours)), 5.0)
    assert "Traceback" not in said


def test_what_a_command_was_writing_is_cleared_away(monkeypatch) -> None:
    cleared = []

    class Try:
        @staticmethod
        def add_parser(commands) -> None:
            commands.add_parser("try").set_defaults(run=run)

    def run(arguments) -> int:
        # By default it would end the whole test run.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleared.append(True)
        return 0

    monkeypatch.setattr(main_module, "COMMANDS", (Try,))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["try"]) == 143
    assert cleared == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raised_as_exceptions():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_fork_inside_the_block_ends_as_any_process_does() -> None:
    with raised_as_exceptions():
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_beside_the_main_thread_nothing_is_changed() -> None:
    def look() -> None:
        with raised_as_exceptions():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_questions_of_other_threads_end_with_the_block(modules, monkeypatch) -> None:
    folder = modules(vllm_fl_slow="import time\ntime.sleep(60)", vllm_fl_quick="")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    started = time.monotonic()
    with pytest.raises(Ended), questions(at_once=1) as pool:
        asked = [pool.submit(ask, "import", {"module": "vllm_fl_slow"}) for _ in range(2)]
        time.sleep(0.5)
        raise Ended(signal.SIGTERM)
    assert time.monotonic() - started < 10
    assert all(future.done() for future in asked)
    assert asked[1].cancelled()
    assert ask("import", {"module": "vllm_fl_quick"}).answer is not None  # the next one is answered
