# SPDX-License-Identifier: Apache-2.0
"""Compares the harness with torch_npu's own wheels, on a machine without an NPU or CANN.

    python -m tests.backends.vendor.ascend.wheel --wheels FOLDER

Fetches the wheels into the folder where they are not there yet. The newest is imported as it is,
with empty stand-ins for CANN's libraries: its dispatcher then prints every schema, and its Meta
kernels give the shapes and dtypes of results. An older one wants an older torch, so its schemas
are read from its library, which holds them as text. Needs gcc and nm on x86-64 Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.backends.vendor.ascend.harness import schemas

NEWEST, OLDER = "2.13.0", "2.10.0"
FROM_CANN = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl|_ZN3atb|_ZN2ge)")
"""Symbols that CANN and NNAL define."""
STAND_INS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "atb", "acl_tdt_channel")


def fetch(release: str, wheels: Path) -> Path:
    """The unpacked wheel of a release."""
    folder = wheels / f"torch_npu-{release}"
    if folder.is_dir():
        return folder
    found = sorted(wheels.glob(f"torch_npu-{release}-*.whl"))
    if not found:
        print(f"fetching torch_npu {release}", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        download = ["download", "-q", "--no-deps", "-d", str(wheels), f"torch_npu=={release}"]
        subprocess.run([*pip, *download], check=True)
        found = sorted(wheels.glob(f"torch_npu-{release}-*.whl"))
    with zipfile.ZipFile(found[0]) as archive:
        archive.extractall(folder)
    return folder


def symbols(library: Path, which: str) -> set[str]:
    """Names of a library's dynamic symbols, "--undefined-only" or "--defined-only"."""
    said = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in said.stdout.splitlines() if line.strip()}


def make_stand_ins(unpacked: Path, torch_lib: Path, out: Path) -> int:
    """Libraries in which each symbol that torch_npu wants of CANN returns zero; how many."""
    out.mkdir(exist_ok=True)
    package = unpacked / "torch_npu"
    own = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    wanted = set().union(*(symbols(library, "--undefined-only") for library in own))
    have = set().union(*(symbols(library, "--defined-only") for library in own))
    for name in ("libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libshm.so"):
        if (torch_lib / name).exists():
            have |= symbols(torch_lib / name, "--defined-only")
    missing = sorted(s for s in wanted - have if FROM_CANN.match(s))
    body = "".join(f".globl {s}\n.type {s},@function\n{s}: xorl %eax,%eax\nret\n" for s in missing)
    note = '.section .note.GNU-stack,"",@progbits\n'
    (out / "stub.s").write_text(f".text\n{body}{note}")
    link = ["gcc", "-shared", "-nostdlib"]
    first = [*link, "-o", "libascendcl.so", "-Wl,-soname,libascendcl.so", "stub.s"]
    subprocess.run(first, cwd=out, check=True)
    for name in STAND_INS:
        library = f"lib{name}.so"
        empty = ["-x", "c", "/dev/null", "-x", "none", "-L.", "-lascendcl"]
        named = ["-o", library, f"-Wl,-soname,{library}"]
        subprocess.run([*link, *named, *empty], cwd=out, check=True)
    return len(missing)


LIVE = """
import json, sys
import torch, torch_npu
wanted = set(json.loads(sys.argv[1]))
live = {}
for schema in torch._C._jit_get_all_schemas():
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    if name in wanted:
        live[name] = str(schema)
def meta(op, *args, **kwargs):
    with torch.device("meta"):
        args = [torch.empty(a[0], dtype=getattr(torch, a[1])) if isinstance(a, list) else a
                for a in args]
    out = getattr(torch.ops.npu, op)(*args, **kwargs)
    out = out if isinstance(out, (tuple, list)) else (out,)
    return [[list(o.shape), str(o.dtype)] for o in out]
shapes = {}
for op, args, kwargs in json.loads(sys.argv[2]):
    try:
        shapes[op] = meta(op, *args, **kwargs)
    except Exception as error:
        shapes[op] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
json.dump({"version": torch_npu.__version__, "schemas": live, "shapes": shapes}, sys.stdout)
"""

HALF = "bfloat16"
CALLS: tuple[tuple[str, list[object], dict[str, object]], ...] = (
    ("npu_rms_norm", [[[5, 64], HALF], [[64], HALF]], {}),
    ("npu_add_rms_norm", [[[5, 64], HALF], [[5, 64], HALF], [[64], HALF]], {}),
    ("npu_swiglu", [[[5, 64], HALF]], {}),
    ("npu_clipped_swiglu", [[[5, 64], HALF]], {}),
    ("npu_silu", [[[5, 64], HALF]], {}),
    ("npu_gelu", [[[5, 64], HALF]], {"approximate": "tanh"}),
    ("npu_fast_gelu", [[[5, 64], HALF]], {}),
    (
        "npu_mrope",
        [[[5], "int64"], [[5, 192], HALF], [[5, 128], HALF], [[40, 64], HALF], 64],
        {"mrope_section": [0, 0, 0]},
    ),
    ("npu_moe_gating_top_k_softmax", [[[5, 8], HALF]], {"k": 2}),
    ("npu_moe_gating_top_k", [[[5, 16], "float32"], 2], {"k_group": 2, "group_count": 4}),
    (
        "npu_moe_init_routing_v2",
        [[[5, 32], HALF], [[5, 2], "int32"]],
        {
            "expert_num": 4,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [0, 4],
        },
    ),
    ("npu_moe_token_unpermute", [[[10, 32], HALF], [[10], "int32"], [[5, 2], HALF]], {}),
    ("npu_dynamic_quant", [[[5, 64], HALF]], {}),
    ("npu_top_k_top_p", [[[5, 64], HALF], [[5], HALF], [[5], "int32"]], {}),
)
"""Operator, arguments ([shape, dtype] for a tensor), keywords."""


def live(unpacked: Path, stand_ins: Path) -> dict[str, object]:
    """What the wheel says of itself, from a process that imported it."""
    wanted = json.dumps(sorted(schemas(NEWEST)))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(stand_ins),
        "PYTHONPATH": str(unpacked),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-c", LIVE, wanted, json.dumps(CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise SystemExit(f"torch_npu cannot be imported:\n{done.stderr}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert isinstance(found, dict)
    return found


def emulated() -> dict[str, object]:
    """Shapes and dtypes of the harness's results for the same calls."""
    program = (
        "import json, torch\n"
        "from tests.backends.vendor.ascend import harness, wheel\n"
        "harness.install(device='cpu')\n"
        "def tensor(shape, dtype):\n"
        "    fill = torch.arange(torch.Size(shape).numel()).view(shape)\n"
        "    return (fill % 3 + 1 if dtype.startswith('int') else fill / 100)"
        ".to(getattr(torch, dtype))\n"
        "shapes = {}\n"
        "for op, args, kwargs in wheel.CALLS:\n"
        "    args = [tensor(*a) if isinstance(a, list) else a for a in args]\n"
        "    out = getattr(torch.ops.npu, op)(*args, **kwargs)\n"
        "    out = out if isinstance(out, (tuple, list)) else (out,)\n"
        "    shapes[op] = [[list(o.shape), str(o.dtype)] for o in out]\n"
        "print(json.dumps(shapes))\n"
    )
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def literals(unpacked: Path) -> set[str]:
    """The schemas of namespace npu that the library holds as text, as torch prints them."""
    import torch

    data = (unpacked / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
    found = set()
    for match in re.finditer(rb"(npu_\w+\([^\x00]*\) -> [^\x00]+)\x00", data):
        try:
            found.add(str(torch._C.parse_schema(f"npu::{match[1].decode()}")))
        except (RuntimeError, UnicodeDecodeError):
            continue
    return found


def compare(wheels: Path) -> int:
    """Print one line for each operator; the number of differences."""
    import torch

    differences = 0

    def tell(release: str, name: str, problem: str) -> None:
        nonlocal differences
        differences += bool(problem)
        print(f"{release}  {name:38} {problem or 'equal'}", flush=True)

    newest = fetch(NEWEST, wheels)
    stand_ins = wheels / "cann"
    count = make_stand_ins(newest, Path(torch.__file__).parent / "lib", stand_ins)
    print(f"{count} symbols of CANN stand empty", flush=True)
    found = live(newest, stand_ins)
    print(f"torch_npu {found['version']} is imported", flush=True)
    own, theirs = schemas(NEWEST), found["schemas"]
    for name, schema in own.items():
        there = theirs.get(name)  # type: ignore[union-attr]
        tell(NEWEST, name, "" if there == schema else f"harness {schema}\n  wheel {there}")
    ours = emulated()
    for name, shapes in found["shapes"].items():  # type: ignore[union-attr]
        if isinstance(shapes, str):
            print(f"{NEWEST}  {name:38} has no Meta kernel for this call ({shapes})")
            continue
        tell(NEWEST, f"{name} (shapes)", "" if shapes == ours[name] else f"{shapes} {ours[name]}")
    older = literals(fetch(OLDER, wheels))
    for name, schema in schemas(OLDER).items():
        if name.startswith("npu::"):  # the library that has the others holds them in pieces
            close = [s for s in older if s.startswith(f"{name}(")]
            tell(OLDER, name, "" if schema in older else f"harness {schema}\n  wheel {close}")
    return differences


def main() -> int:
    """0 if all is equal, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, default=Path(".cache/torch_npu"))
    wheels = parser.parse_args().wheels.resolve()
    if platform.machine() not in ("x86_64", "AMD64"):
        print("the stand-ins for CANN are made for x86-64 alone", file=sys.stderr)
        return 1
    wheels.mkdir(parents=True, exist_ok=True)
    differences = compare(wheels)
    print(f"{differences} differences" if differences else "all equal")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
