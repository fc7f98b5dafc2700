# SPDX-License-Identifier: Apache-2.0
"""All GPU benchmarks by one command: runs what is missing, then prints the tables.

    python benchmarks/gpu/run.py run RESULTS [--site $HOME/site] [--steps kernels,models]
    python benchmarks/gpu/run.py tables RESULTS

Every job leaves one file in RESULTS. One whose file is there is not run again (unless --again), so
an ended command goes on where it was. Which steps apply is seen from the site: `empty` where vLLM
has no extension, the others where it has one. Jobs that can, get ready side by side and are
measured one at a time (--together). --dry-run prints the commands and runs nothing.

The steps:
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plan import MODES, SHAPES, STEPS, Job, Site, jobs_of, mirror_without_flaggems, site_at
from report import load, text_of

LOOK_SECONDS = 0.2
SHOWN = 8
"""Lines of the output of a job that are printed."""
TOLD = re.compile(
    r"RESULT|HOST|CONFORMANCE|BATCHES|MEMCHECK|FAIL|DIFFER|Error|error:|Traceback|"
    r"No problem|problem found|problems found"
)


@dataclass(slots=True, eq=False)
class Running:
    """A job and its process."""

    job: Job
    process: subprocess.Popen[bytes]
    started: float
    log: Path


def environment(job: Job, site: Site) -> dict[str, str]:
    """The variables of a job. What a caller has set for vllm_fl does not count here."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    folder = site.path if job.gems else site.mirror
    return {
        **kept,
        **({"PYTHONPATH": str(folder)} if folder is not None else {}),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **job.env,
    }


def shown(job: Job, site: Site) -> str:
    """The command, as one would type it."""
    folder = site.path if job.gems else site.mirror
    places = {"PYTHONPATH": str(folder)} if folder is not None else {}
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in {**places, **job.env}.items())
    return f"{variables} python {shlex.join(job.command)}".strip()


class Pool:
    """Runs jobs: those of a group some at a time, or all at once where they have to be; else one.

    Args:
        together: how many of a group.
        until: when no job may run any more, by time.monotonic().
    """

    def __init__(self, site: Site, results: Path, together: int, until: float) -> None:
        self.site, self.results, self.together, self.until = site, results, together, until
        self.running: list[Running] = []
        self.skipped: list[Job] = []
        self.failed: list[Job] = []

    def run(self, jobs: list[Job]) -> None:
        """Run them all, or until the time is over."""
        try:
            for batch in batches_of(jobs):
                self._batch(batch)
        finally:
            for running in list(self.running):
                self._end(running, "ended: the time is over")

    def _batch(self, batch: list[Job]) -> None:
        limit = len(batch) if batch[0].whole else self.together
        waiting = list(batch)
        while waiting or self.running:
            while waiting and len(self.running) < limit:
                job = waiting.pop(0)
                if time.monotonic() + 15 > self.until:
                    self.skipped.append(job)
                else:
                    self._start(job)
            for running in list(self.running):
                self._look(running)
            time.sleep(LOOK_SECONDS)

    def _start(self, job: Job) -> None:
        log = self.results / "logs" / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        job.result.unlink(missing_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *job.command],
                env=environment(job, self.site), cwd=log.parent, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running.append(Running(job, process, time.monotonic(), log))

    def _look(self, running: Running) -> None:
        if running.process.poll() is not None:
            self._done(running, f"rc {running.process.returncode}")
        elif time.monotonic() - running.started > running.job.seconds:
            self._end(running, f"ended: it ran for more than {running.job.seconds} s")
        elif time.monotonic() > self.until:
            self._end(running, "ended: the time is over")

    def _end(self, running: Running, why: str) -> None:
        # Its own session, so that what it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
        self._done(running, why)

    def _done(self, running: Running, how: str) -> None:
        self.running.remove(running)
        job, text = running.job, running.log.read_text(errors="replace")
        if job.result.suffix == ".txt" and how in ("rc 0", "rc 1"):
            job.result.write_text(text)
        if not job.result.is_file():
            self.failed.append(job)
        seconds = time.monotonic() - running.started
        print(f"== {job.name}: {how}, {seconds:.0f} s", flush=True)
        lines = text.splitlines()
        told = [line for line in lines if TOLD.match(line)]
        if not job.result.is_file():
            told = lines[-SHOWN:]
        for line in told[:SHOWN]:
            print(f"   {line[:220]}", flush=True)


def batches_of(jobs: list[Job]) -> Iterator[list[Job]]:
    """Those of one group together, where the first of them stands; a job without a group alone."""
    batches: dict[str, list[Job]] = {}
    for job in jobs:
        batches.setdefault(job.group or f"alone: {job.name}", []).append(job)
    yield from batches.values()


def finished(job: Job) -> bool:
    """Whether its result is there, all of it."""
    if job.result.suffix == ".json":
        found = load(job.result)
        return found is not None and bool(found.get("done", True))
    return job.result.is_file()


def wanted(arguments: argparse.Namespace, site: Site) -> list[Job]:
    """The jobs that the command asks for, those that are done aside."""
    memory = round(min(0.4, 0.85 / arguments.together), 3)
    jobs = list(
        jobs_of(arguments.steps, site, arguments.results, device=arguments.device, memory=memory)
    )
    chosen = [
        job
        for job in jobs
        if (arguments.again or not finished(job))
        and (not arguments.only or any(re.search(p, job.name) for p in arguments.only))
        and (not arguments.shapes or job.shape in ("", *arguments.shapes))
        and (not arguments.modes or job.mode in ("", *arguments.modes))
    ]
    whole = {job.group for job in chosen if job.whole}
    return [job for job in jobs if job in chosen or (job.whole and job.group in whole)]


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, and print the tables. 1 where a job left no result."""
    start = time.monotonic()
    arguments.results = arguments.results.resolve()
    site = site_at(arguments.site.resolve() if arguments.site else None)
    jobs = wanted(arguments, site)
    if any(not job.gems for job in jobs) and site.mirror is None:
        print("without --site nothing can be run without FlagGems: those jobs are left out")
        jobs = [job for job in jobs if job.gems]
    print(
        f"{site.kind} vLLM, FlagGems {'' if site.flaggems else 'not '}installed: {len(jobs)} jobs"
    )
    if arguments.dry_run:
        for job in jobs:
            print(f"{job.name} ({job.step}, {job.seconds} s at most): {shown(job, site)}")
        return 0
    arguments.results.mkdir(parents=True, exist_ok=True)
    if any(not job.gems for job in jobs):
        mirror_without_flaggems(site)
    for used in (arguments.results / "host-turns").glob("*"):
        used.unlink()
    if arguments.again:
        for job in jobs:
            job.result.with_suffix(".lines").unlink(missing_ok=True)
    pool = Pool(site, arguments.results, arguments.together, start + arguments.seconds)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        pool.run(jobs)
    finally:
        signal.signal(signal.SIGTERM, previous)
        text = text_of(arguments.results)
        (arguments.results / "tables.md").write_text(text_of(arguments.results, full=True))
        print(text if not arguments.quiet else "", flush=True)
        for title, left in (("no result", pool.failed), ("no time for", pool.skipped)):
            if left:
                print(f"{title}: {', '.join(job.name for job in left)}", flush=True)
        print(f"{time.monotonic() - start:.0f} s in all", flush=True)
    return 1 if pool.failed else 0


def tables(arguments: argparse.Namespace) -> int:
    """Print the tables of what there is."""
    print(text_of(arguments.results, full=arguments.full))
    return 0


def _steps(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in STEPS:
            raise argparse.ArgumentTypeError(f"no step {name!r}; valid: {', '.join(STEPS)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    steps = "\n".join(f"  {name:12} {what}" for name, what in STEPS.items())
    found = argparse.ArgumentParser(
        description=(__doc__ or "") + steps, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = found.add_subparsers(required=True)
    one, two = commands.add_parser("run"), commands.add_parser("tables")
    for command in (one, two):
        command.add_argument("results", type=Path, help="the folder of results")
    one.add_argument("--site", type=Path, help="where vLLM and vllm_fl are (default: this Python)")
    one.add_argument("--steps", type=_steps, default=tuple(STEPS), help="by comma; default: all")
    one.add_argument("--only", nargs="*", help="jobs whose names match one of these expressions")
    one.add_argument("--shapes", nargs="*", choices=SHAPES, help="of the models of two shapes")
    one.add_argument("--modes", nargs="*", choices=MODES)
    one.add_argument("--again", action="store_true", help="what is there already, too")
    one.add_argument("--seconds", type=float, default=570, help="in all")
    one.add_argument("--together", type=int, default=6, help="engines that get ready at a time")
    one.add_argument("--device", default="cuda", help="cpu: to try the scripts")
    one.add_argument("--dry-run", action="store_true", help="print the commands")
    one.add_argument("--quiet", action="store_true", help="write tables.md, and do not print it")
    one.set_defaults(call=run)
    two.add_argument("--full", action="store_true", help="with every row of the kernels")
    two.set_defaults(call=tables)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run, or print."""
    arguments = parser().parse_args(argv)
    return int(arguments.call(arguments))


if __name__ == "__main__":
    sys.exit(main())
