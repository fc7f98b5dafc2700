# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/run.py: what it would run, how it runs it, and the tables of what it finds."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time

import pytest


def load(name):
    return importlib.import_module(name)


@pytest.fixture
def make_site(tmp_path):
    """A folder of packages as on a GPU machine: files of vLLM and FlagGems, empty."""

    def make(extension=True, flaggems=True):
        folder = tmp_path / f"site{extension}{flaggems}"
        for name in ("vllm", "vllm_fl", *(("flag_gems", "flag_gems-5.0.2.dist-info"),) * flaggems):
            for each in (name,) if isinstance(name, str) else name:
                (folder / each).mkdir(parents=True)
        if extension:
            (folder / "vllm" / "_C_stable_libtorch.abi3.so").touch()
        return folder

    return make


def jobs(site_folder, results, *more):
    run = load("run")
    arguments = run.parser().parse_args(["run", str(results), "--site", str(site_folder), *more])
    return run.wanted(arguments, load("plan").site_at(site_folder))


def test_every_command_parses(make_site, tmp_path):
    parsers = {n: load(n).parser() for n in ("kernels", "model", "conformance", "memcheck")}
    seen = set()
    for site in (make_site(), make_site(extension=False)):
        for job in jobs(site, tmp_path / "results"):
            seen.add(job.step)
            script = job.command[0]
            if script == "-c":
                compile(job.command[1], job.name, "exec")
                continue
            assert script.startswith(str(load("plan").HERE))
            name = script.rpartition("/")[2].removesuffix(".py")
            if name in parsers:
                parsed = vars(parsers[name].parse_args(job.command[1:]))
                out = str(parsed["out"])
                assert out.removesuffix(".json") == str(job.result).removesuffix(".json")
    assert seen == set(load("plan").STEPS)


def test_the_site_says_which_steps_apply(make_site, tmp_path):
    empty = {job.step for job in jobs(make_site(extension=False), tmp_path)}
    assert empty == {"doctor", "empty"}
    stock = {job.step for job in jobs(make_site(), tmp_path)}
    assert stock == set(load("plan").STEPS) - {"empty"}
    names = {job.name for job in jobs(make_site(flaggems=False), tmp_path)}
    assert not any("nogems" in name for name in names)


def test_models_run_in_both_shapes_in_all_modes_with_flaggems_and_without(make_site, tmp_path):
    names = {job.name for job in jobs(make_site(), tmp_path, "--steps", "models")}
    assert names == {
        f"{shape}-{mode}-{who}"
        for shape in ("q06", "q4")
        for mode in ("eager", "decode-graph", "graph")
        for who in ("stock", "plugin", "plugin-nogems")
    } | {"q06-eager-float32", "q06-graph-stock-runner1", "q4-graph-stock-runner1"} | {
        f"{shape}-graph-{who}-{repeat}"
        for shape in ("q06", "q4")
        for who in ("stock", "plugin", "plugin-nogems")
        for repeat in (2, 3)
    }
    empty = jobs(make_site(extension=False), tmp_path, "--steps", "empty")
    dense = [job for job in empty if job.shape != "moe"]
    assert {job.env["VLLM_USE_V2_MODEL_RUNNER"] for job in dense} == {"0", "1"}
    experts = {job.name for job in empty if job.shape == "moe"}
    assert experts == {f"moe-{mode}-empty" for mode in ("eager", "decode-graph", "graph")}


def test_a_dry_run_prints_commands_and_makes_nothing(make_site, tmp_path, capsys):
    site, results = make_site(), tmp_path / "results"
    command = ["run", str(results), "--site", str(site), "--dry-run", "--shapes", "q4"]
    assert load("run").main([*command, "--steps", "models,doctor", "--modes", "eager"]) == 0
    printed = capsys.readouterr().out
    assert "stock vLLM, FlagGems installed: 5 jobs" in printed
    assert f"PYTHONPATH={site}-no-flaggems python" in printed
    assert "model.py run q4" in printed and "q06" not in printed
    assert not results.exists()


def test_a_step_that_does_not_exist_is_named(make_site, tmp_path, capsys):
    with pytest.raises(SystemExit):
        load("run").main(["run", str(tmp_path), "--steps", "kernel"])
    assert "no step 'kernel'; valid: doctor, kernels" in capsys.readouterr().err


def test_the_site_without_flaggems_is_links_to_the_rest(make_site):
    plan = load("plan")
    site = plan.site_at(make_site())
    for _ in range(2):  # made anew
        plan.mirror_without_flaggems(site)
    assert {path.name for path in site.mirror.iterdir()} == {"vllm", "vllm_fl"}
    assert (site.mirror / "vllm" / "_C_stable_libtorch.abi3.so").exists()


# --------------------------------------------------------------------------------- running of jobs


def job_of(tmp_path, name, code, **more):
    result = tmp_path / f"{name}.json"
    text = f"import json, os, sys, time; out = {str(result)!r}\n{code}"
    return load("plan").Job(name=name, step="models", command=("-c", text), result=result, **more)


def pool_of(tmp_path, seconds=60, together=2):
    site = load("plan").Site(None, True, False)
    return load("run").Pool(site, tmp_path, together, time.monotonic() + seconds)


WRITE = "open(out, 'w').write('{}')"


def test_jobs_of_a_group_run_side_by_side_and_others_alone(tmp_path):
    log = tmp_path / "log"
    code = f"""
open({str(log)!r}, 'a').write('+')
time.sleep(0.5)
open({str(log)!r}, 'a').write('-')
{WRITE}"""
    pool_of(tmp_path).run(
        [job_of(tmp_path, n, code, group="g") for n in "ab"] + [job_of(tmp_path, "c", code)]
    )
    assert log.read_text() == "++--+-"


def test_a_job_that_fails_or_hangs_is_reported_and_the_next_one_runs(tmp_path, capsys):
    pool = pool_of(tmp_path)
    pool.run(
        [
            job_of(tmp_path, "wrong", "print('what happened'); sys.exit(3)"),
            job_of(tmp_path, "slow", "time.sleep(60)", seconds=1),
            job_of(tmp_path, "right", WRITE),
        ]
    )
    assert [job.name for job in pool.failed] == ["wrong", "slow"]
    printed = capsys.readouterr().out
    assert "== wrong: rc 3" in printed and "what happened" in printed
    assert "== slow: ended: it ran for more than 1 s" in printed
    assert (tmp_path / "right.json").is_file()


def test_where_the_time_is_over_jobs_are_ended_and_named(tmp_path):
    pool = pool_of(tmp_path, seconds=16)
    start = time.monotonic()
    pool.until = start + 15.3  # two thirds of a second in which to begin, and no more
    pool.run([job_of(tmp_path, "first", f"{WRITE}; time.sleep(0.8)"), job_of(tmp_path, "b", WRITE)])
    assert [job.name for job in pool.skipped] == ["b"]
    assert (tmp_path / "first.json").is_file() and not pool.failed


def test_what_is_there_is_not_run_again_but_what_is_half_done_is(make_site, tmp_path):
    site, results = make_site(), tmp_path / "results"
    results.mkdir()
    (results / "kernels.json").write_text('{"done": false, "rows": []}')
    (results / "memcheck.json").write_text("{}")
    (results / "flaggems.json").write_text('{"half')
    steps = ("--steps", "kernels,memcheck,flaggems")
    assert [job.name for job in jobs(site, results, *steps)] == ["kernels", "flaggems"]
    again = jobs(site, results, *steps, "--again")
    assert [job.name for job in again] == ["kernels", "memcheck", "flaggems"]


def test_processes_that_take_turns_are_all_run_where_one_is_missing(make_site, tmp_path):
    (tmp_path / "host-stock.json").write_text("{}")
    found = jobs(make_site(), tmp_path, "--steps", "host")
    assert [job.name for job in found] == ["host-stock", "host-plugin", "host-plugin-nogems"]
    load("run")
    assert [len(batch) for batch in load("run").batches_of(found)] == [3]


def test_jobs_of_one_group_run_together_wherever_they_stand(tmp_path):
    jobs = [
        job_of(tmp_path, name, WRITE, group=group)
        for name, group in (("a", "x"), ("b", ""), ("c", "y"), ("d", "x"), ("e", ""), ("f", "y"))
    ]
    batches = ["".join(job.name for job in batch) for batch in load("run").batches_of(jobs)]
    assert batches == ["ad", "b", "cf", "e"]


# ------------------------------------------------------------------------------------------- turns


def test_who_holds_the_lock_alone_waits_for_all_that_get_ready(tmp_path):
    lock, order = load("turns").Lock(tmp_path / "lock"), []

    def ready():
        with lock.shared():
            order.append("ready")
            time.sleep(0.2)
            order.append("done")

    threads = [threading.Thread(target=ready) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    with lock.alone():
        order.append("alone")
    for thread in threads:
        thread.join()
    assert order == ["ready", "ready", "done", "done", "alone"]


def test_turns_go_round_in_order(tmp_path):
    order = []

    def process(index):
        turns = load("turns").Turns(tmp_path / "turns", index, 3, patience=20)
        turns.ready()
        for round_ in range(2):
            with turns.turn(round_):
                order.append((round_, index))

    threads = [threading.Thread(target=process, args=(i,)) for i in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == sorted(order) and len(order) == 6


def test_a_turn_that_does_not_come_is_an_error_that_names_it(tmp_path):
    turns = load("turns").Turns(tmp_path, 0, 2, patience=0.1)
    with pytest.raises(TimeoutError, match=r"process 0 of 2 waited 0.1 s for ready.1"):
        turns.ready()


# ------------------------------------------------------------------------------------------ tables


def engine(us=1000.0, logprob=-1.0, tokens=(1, 2), routes=()):
    return {
        "about": {"date": "2026-12-01", "device": "a GPU", "python": "3.12", "versions": {}},
        "prompt_logprobs": [[logprob, -2.0]], "tokens": [list(tokens)],
        "batch_1": {"us_per_step": us, "kernels_per_step": 10, "tok_per_s": 5},
        "batch_32": {"us_per_step": us, "kernels_per_step": 10, "tok_per_s": 5},
        "routes": [{"ops": list(routes)}],
    }  # fmt: skip


def write(folder, **results):
    for name, data in results.items():
        (folder / f"{name.replace('__', '-')}.json").write_text(json.dumps(data))


ROUTE = {
    "op": "rms_norm", "impl_id": "vendor.cuda.fl", "mode": "eager", "bound": 3, "calls": 9,
    "reason": "the shipped policy says so",
}  # fmt: skip


def test_models_are_compared_with_stock_in_the_same_mode(tmp_path):
    write(
        tmp_path,
        **{
            "q06-graph-stock": engine(900.0),
            "q06-decode-graph-stock": engine(1000.0, logprob=-1.2),
            "q06-decode-graph-plugin": engine(930.0, logprob=-1.3, tokens=(1, 3), routes=[ROUTE]),
        },
    )
    text = load("report").text_of(tmp_path, full=True)
    row = next(line for line in text.splitlines() if "plugin, shipped policy |" in line)
    assert "| vendor.cuda.fl (1) | 930 / 930 | 0.930 / 0.930 | 10 / 10 |" in row
    assert row.endswith("| 0.0500 | 0/1 | 0.1500 |")  # the last: to stock with Inductor
    assert "| q06 | decode-graph | stock vLLM | - | 1000 / 1000 | - |" in text
    assert "| rms_norm | vendor.cuda.fl | eager | 3 | 9 | the shipped policy says so |" in text


@pytest.mark.parametrize(("us", "verdict"), [(930.0, "met"), (950.0, "MISSED")])
def test_the_goals_of_models_name_the_worst(tmp_path, us, verdict):
    write(
        tmp_path,
        **{"q4-eager-stock": engine(), "q4-eager-plugin": engine(us)},
        **{"q4-decode-graph-stock": engine(), "q4-decode-graph-plugin": engine(900.0)},
    )
    report = load("report")
    goals = {row[0]: row for row in report.model_goals(report.engines(tmp_path))}
    found = goals["plugin without Inductor: 6 % below stock"]
    assert found[2:] == [f"{us / 1000:.4f}", "q4 eager plugin", "4", verdict]
    assert goals["`empty` in the decode graph: GPU time"][-1] == "not measured"


def test_a_repeated_engine_has_the_median_of_its_processes(tmp_path):
    stock = {"q06-graph-stock": engine(1000.0), "q06-graph-plugin": engine(1020.0)}
    again = {"q06-graph-plugin-2": engine(1004.0), "q06-graph-plugin-3": engine(999.0)}
    write(tmp_path, **stock, **again)
    report = load("report")
    found = report.engines(tmp_path)
    assert set(found) == {("q06", "graph", "stock"), ("q06", "graph", "plugin")}
    goals = {row[0]: row for row in report.model_goals(found)}
    assert goals["plugin beside stock: GPU time"][2:] == ["1.0040", "q06 graph plugin", "2", "met"]


def test_an_empty_build_under_inductor_has_to_be_identical(tmp_path):
    write(tmp_path, **{"q06-graph-stock": engine(), "q06-graph-empty-runner1": engine()})
    report = load("report")
    goals = {row[0]: row for row in report.model_goals(report.engines(tmp_path))}
    assert goals["`empty` under Inductor: distance to stock"][-1] == "met"
    write(tmp_path, **{"q06-graph-empty": engine(logprob=-1.0001)})
    goals = {row[0]: row for row in report.model_goals(report.engines(tmp_path))}
    assert goals["`empty` under Inductor: distance to stock"][-1] == "MISSED"


def test_conformance_shows_failures_and_what_an_ended_run_left(tmp_path):
    row = {"op": "rms_norm", "dtype": "float16", "case": "odd", "status": "passed"}
    row |= {"reason": None, "problems": [], "seconds": 0.1}
    failed = {**row, "status": "failed", "problems": [["values", "at [0]\nfound 1"]]}
    refused = {**row, "status": "skipped", "reason": "63 is odd"}
    left = [{"op": "moe_sum", "reason": "no symbol"}]
    write(tmp_path, **{"cases-vendor.cuda": {"results": [row, failed, refused], "left_out": left}})
    lines = [json.dumps(row), json.dumps(row), '{"op": "half']
    (tmp_path / "cases-vendor.cuda.fl.lines").write_text("\n".join(lines))
    text = load("report").text_of(tmp_path, full=True)
    assert "| vendor.cuda | float16 | 1 | 1 | 1 | 1 ops, not available 1 |" in text
    assert "| vendor.cuda.fl (ended early) | float16 | 2 | 0 | 0 | 1 ops |" in text
    assert "- vendor.cuda: rms_norm float16 'odd': values: at [0] found 1" in text
    assert "| vendor.cuda | rms_norm: 63 is odd | 1 |" in text
    assert "63 is odd" not in load("report").text_of(tmp_path)


def test_batches_hosts_and_doctors_have_their_tables(tmp_path):
    batches = [
        {"op": "rms_norm", "dtype": "float16", "size": 1024, "batches": 512, "differ": [3]},
        {"op": "rms_norm", "dtype": "float32", "size": 1024, "batches": 512, "differ": []},
    ]
    write(
        tmp_path,
        **{
            "batches-vendor.cuda.fl": {"impl": "vendor.cuda.fl", "rows": batches},
            "host-stock": {"host_us": {"RMSNorm": [10.0, 11.0, 30.0]}},
            "host-plugin": {"host_us": {"RMSNorm": [5.5, 5.5, 5.5]}},
        },
    )
    (tmp_path / "doctor-stock.txt").write_text("Notes\nVerdict: fine, no problem found.\n\n")
    text = load("report").text_of(tmp_path)
    assert "| vendor.cuda.fl | rms_norm | 2 | 1024 | float16 1024: [3] |" in text
    assert "| RMSNorm | 11.0 | 5.5 (0.50) |" in text
    assert "- stock: Verdict: fine, no problem found." in text


def test_neither_plan_nor_tables_import_torch_or_vllm(scripts):
    code = "import sys, run, plan, report; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=scripts, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
