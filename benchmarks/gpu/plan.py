# SPDX-License-Identifier: Apache-2.0
"""What `run.py` runs: for each step its jobs. Imports neither torch nor vLLM."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["STEPS", "Job", "Site", "jobs_of", "mirror_without_flaggems", "site_at"]

HERE = Path(__file__).resolve().parent
ATTENTION = "TRITON_ATTN"
SHAPES = ("q06", "q4")
MODES = ("eager", "decode-graph", "graph")
IMPLEMENTATIONS = ("vendor.cuda.fl", "vendor.cuda", "default.flaggems", "reference.torch")
PAGES = "reshape_and_cache_flash@eager=native"
SEPARATE = "fused_qk_norm_rope@eager=native"
REPEATS = (2, 3)
"""Under Inductor stock and the plugin are measured in two more processes, each of which compiles
anew: Inductor chooses among its kernels by timing them, and not always alike."""
DENSE = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
"""What a dense model of the shapes here calls."""

STEPS = {
    "doctor": "vllm-fl doctor, with FlagGems and without",
    "kernels": "GPU time of each kernel in a graph, beside vLLM's, FlagGems' and Inductor's",
    "conformance": "the conformance kit over each implementation; every batch from 1 to 512",
    "models": "stock, and the plugin with its shipped policy, with FlagGems and without",
    "flagos": "the plugin with VLLM_FL_PREFER=flagos",
    "vendors": "the plugin without the fusion of q/k norm and rope, and with vLLM's kernels only",
    "moe": "a small Qwen3-MoE: stock, shipped policy, VLLM_FL_PREFER=flagos and vendor",
    "empty": "vLLM without its extension, through PlatformFL, by both model runners",
    "host": "what calls of layers cost the CPU, stock and plugin in turns",
    "flaggems": "FlagGems' operators: right, host time with and without launch plans, GPU time",
    "memcheck": "compute-sanitizer's memcheck over our kernels",
}
"""Step to what it shows. `empty` runs where vLLM has no extension, the others where it has one,
and `doctor` everywhere."""

EVERYWHERE = ("doctor",)


@dataclass(frozen=True, slots=True)
class Site:
    """Where vLLM and vllm_fl are installed.

    Attributes:
        path: the folder of packages, or None: those of this Python.
        extension: whether vLLM has its compiled extension there.
        flaggems: whether FlagGems is there.
        mirror: a folder of links to all but FlagGems.
    """

    path: Path | None
    extension: bool
    flaggems: bool
    mirror: Path | None = None

    @property
    def kind(self) -> str:
        """stock or empty."""
        return "stock" if self.extension else "empty"

    @property
    def both(self) -> bool:
        """Whether things can be run with FlagGems and without."""
        return self.flaggems and self.mirror is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command.

    Attributes:
        name: of its result, <name>.json or <name>.txt.
        step: that it belongs to.
        command: behind the Python.
        result: the file that shows that it is done.
        env: variables beside those of every job.
        gems: False: in the site without FlagGems.
        seconds: that it may take.
        group: those of one group run at the same time; a job without one runs alone.
        whole: all of its group run at once, because they wait for each other.
        shape, mode: of the model.
    """

    name: str
    step: str
    command: tuple[str, ...]
    result: Path
    env: dict[str, str] = field(default_factory=dict)
    gems: bool = True
    seconds: int = 240
    group: str = ""
    whole: bool = False
    shape: str = ""
    mode: str = ""


def site_at(path: Path | None) -> Site:
    """What is installed in a folder.

    Raises:
        SystemExit: vLLM is not.
    """
    folders = [path] if path is not None else [Path(p) for p in sys.path if p]
    found = next((f for f in folders if (f / "vllm").is_dir()), None)
    if found is None:
        raise SystemExit(
            f"run.py: no vLLM in {path or 'the packages of this Python'}; install it there, or "
            "name its folder with --site"
        )
    mirror = None if path is None else path.with_name(f"{path.name}-no-flaggems")
    return Site(
        path,
        any((found / "vllm").glob("_C*.so")),
        any((folder / "flag_gems").is_dir() for folder in folders),
        mirror,
    )


def mirror_without_flaggems(site: Site) -> None:
    """Make, or make anew, the folder of links to all of a site but FlagGems."""
    assert site.path is not None and site.mirror is not None
    shutil.rmtree(site.mirror, ignore_errors=True)
    site.mirror.mkdir(parents=True)
    for entry in site.path.iterdir():
        name = entry.name.lower().replace("-", "_")
        if not name.startswith(("flag_gems", "flaggems")):
            (site.mirror / entry.name).symlink_to(entry)


def jobs_of(
    steps: tuple[str, ...],
    site: Site,
    results: Path,
    *,
    device: str = "cuda",
    memory: float = 0.14,
) -> Iterator[Job]:
    """The jobs of some steps that apply to a site, in the order in which they matter."""
    makers = {
        "doctor": _doctor,
        "kernels": _kernels,
        "conformance": _conformance,
        "models": _models,
        "flagos": _flagos,
        "vendors": _vendors,
        "moe": _moe,
        "empty": _empty,
        "host": _host,
        "flaggems": _flaggems,
        "memcheck": _memcheck,
    }
    assert tuple(makers) == tuple(STEPS)
    for step in steps:
        applies = step in EVERYWHERE or (step == "empty") is (site.kind == "empty")
        if applies:
            for job in makers[step](site, results, device, memory):
                if job.gems or site.both:
                    yield job


def _script(name: str) -> str:
    return str(HERE / f"{name}.py")


def _doctor(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    for gems in (True, False):
        name = f"doctor-{site.kind}" + ("" if gems else "-nogems")
        code = "import sys; from vllm_fl.cli.main import main; sys.exit(main(['doctor']))"
        yield Job(
            name=name, step="doctor", command=("-c", code), result=results / f"{name}.txt",
            gems=gems, seconds=120, group="doctor", env={"COLUMNS": "160"},
        )  # fmt: skip


def _kernels(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    result = results / "kernels.json"
    command = (_script("kernels"), str(result.with_suffix("")), "--device", device)
    yield Job(name="kernels", step="kernels", command=command, result=result, seconds=150)


def _conformance(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    for check in ("cases", "batches"):
        for impl in IMPLEMENTATIONS if check == "cases" else IMPLEMENTATIONS[:2]:
            name = f"{check}-{impl}"
            result = results / f"{name}.json"
            more = ("--workers", "3") if check == "cases" else ()
            command = (_script("conformance"), check, str(result), impl, "--device", device, *more)
            yield Job(
                name=name, step="conformance", command=command, result=result, seconds=300,
                group="checks", env={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip


def _model(
    results: Path,
    memory: float,
    step: str,
    who: str,
    shape: str,
    mode: str,
    *,
    gems: bool = True,
    env: dict[str, str] | None = None,
    more: tuple[str, ...] = (),
    repeat: int = 1,
) -> Job:
    name = f"{shape}-{mode}-{who}" + (f"-{repeat}" if repeat > 1 else "")
    if repeat > 1:
        env = {**(env or {}), "VLLM_CACHE_ROOT": str(results / "caches" / name)}
    result = results / f"{name}.json"
    command = (
        _script("model"), "run", shape, str(result), "--mode", mode, "--attention", ATTENTION,
        "--memory", str(memory), "--lock", str(results / "gpu.lock"),
        *(("--stock",) if who in ("stock", "stock-runner1", "float32") else ()), *more,
    )  # fmt: skip
    return Job(
        name=name, step=step, command=command, result=result, env=env or {}, gems=gems,
        # Inductor chooses among its kernels by timing them: it has only its like for company.
        group="graphs" if mode == "graph" else "engines",
        seconds=300 if mode == "graph" else 200, shape=shape, mode=mode,
    )  # fmt: skip


def _models(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    exact = ("--dtype", "float32", "--repeat", "0")
    yield _model(results, memory, "models", "float32", "q06", "eager", more=exact)
    for everyone in (("stock", "plugin"), ("plugin-nogems",)):
        for mode in ("decode-graph", "eager", "graph"):
            for shape in SHAPES:
                for who in everyone:
                    gems = not who.endswith("nogems")
                    for repeat in (1, *REPEATS) if mode == "graph" else (1,):
                        yield _model(
                            results, memory, "models", who, shape, mode, gems=gems, repeat=repeat
                        )
    for shape in SHAPES:  # beside which `empty` is laid, with the same runner
        env = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        yield _model(results, memory, "models", "stock-runner1", shape, "graph", env=env)


def _flagos(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    for mode in ("eager", "decode-graph"):
        env = {"VLLM_FL_PREFER": "flagos"}
        yield _model(results, memory, "flagos", "flagos", "q06", mode, env=env)


def _vendors(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    vllm = ";".join([*(f"{op}@eager=impl:vendor.cuda" for op in DENSE), SEPARATE])
    for who, order in (("unfused", SEPARATE), ("vllm", vllm), ("pages", PAGES)):
        for shape in SHAPES:
            for mode in MODES if who == "pages" else ("decode-graph", "eager"):
                env = {"VLLM_FL_PER_OP": order}
                yield _model(results, memory, "vendors", who, shape, mode, env=env)


def _moe(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    for mode in ("eager", "decode-graph"):
        for who in ("stock", "plugin"):
            yield _model(results, memory, "moe", who, "moe", mode)
    for who in ("flagos", "vendor"):  # its router and its experts are dispatched
        for mode in ("eager", "decode-graph"):
            env = {"VLLM_FL_PREFER": who}
            yield _model(results, memory, "moe", who, "moe", mode, env=env)
    yield _model(results, memory, "moe", "stock", "moe", "graph")  # the noise between right answers


def _empty(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    for mode in ("graph", "decode-graph", "eager"):
        for shape in SHAPES:
            for who, runner in (("empty", "1"), ("empty-runner1", "0")):
                env = {"VLLM_USE_V2_MODEL_RUNNER": runner}
                yield _model(results, memory, "empty", who, shape, mode, env=env)
    for mode in ("graph", "decode-graph", "eager"):  # the runner that vLLM itself chooses
        yield _model(results, memory, "empty", "empty", "moe", mode)
    for mode in ("decode-graph", "eager"):
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        yield _model(results, memory, "empty", "empty-nogems", "q06", mode, gems=False, env=env)


def _host(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    everyone = ("stock", "plugin", *(("plugin-nogems",) if site.both else ()))
    for index, who in enumerate(everyone):
        name = f"host-{who}"
        result = results / f"{name}.json"
        command = (
            _script("model"), "host", "q06", str(result), str(results / "host-turns"), str(index),
            str(len(everyone)), "--attention", ATTENTION, "--memory", str(memory),
            *(("--stock",) if who == "stock" else ()),
        )  # fmt: skip
        yield Job(
            name=name, step="host", command=command, result=result, gems=who != "plugin-nogems",
            group="host", whole=True, seconds=240,
        )  # fmt: skip


def _flaggems(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    result = results / "flaggems.json"
    command = (_script("flaggems"), str(result.with_suffix("")), "--seconds", "200")
    yield Job(name="flaggems", step="flaggems", command=command, result=result, seconds=230)


def _memcheck(site: Site, results: Path, device: str, memory: float) -> Iterator[Job]:
    result = results / "memcheck.json"
    command = (_script("memcheck"), str(result), "--device", device)
    yield Job(name="memcheck", step="memcheck", command=command, result=result, seconds=300)
