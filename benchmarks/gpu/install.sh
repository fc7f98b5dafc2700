#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with a GPU, nvcc and torch, and no network: compile vllm_fl with its CUDA kernels,
# install it into $SITE (default: $HOME/site), and let doctor look at it.
#
#     benchmarks/gpu/install.sh             # then: export PYTHONPATH=$HOME/site
#     TORCH_CUDA_ARCH_LIST=9.0 VLLM_FL_TUNE=1 benchmarks/gpu/install.sh
#
# Ends with 0 only if the kernels for the CPU and for CUDA are there and load. PYTHON is the
# interpreter (default: python3). The tree is left as it is.
set -euo pipefail

cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=${SITE:-$HOME/site}
export VLLM_FL_DEVICE=${VLLM_FL_DEVICE:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== what there is"
"$python" - <<'END'
import os, shutil, sys, sysconfig
from importlib.metadata import PackageNotFoundError, version
def have(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
print(f"python {sys.version.split()[0]} at {sys.executable}, {os.cpu_count()} cores")
print({name: have(name) for name in ("torch", "pip", "setuptools", "wheel", "vllm", "rich", "PyYAML")})
print({name: shutil.which(name) for name in ("nvcc", "g++", "c++")}, os.environ.get("CUDA_HOME"))
print("Python.h:", os.path.exists(sysconfig.get_path("include") + "/Python.h"))
END
nvcc --version 2>/dev/null | tail -2 || true

echo "== build"
mkdir "$work/tree"
cp -r setup.py pyproject.toml MANIFEST.in README.md LICENSE csrc vllm_fl "$work/tree"
rm -f "$work"/tree/vllm_fl/*.so "$work"/tree/vllm_fl/_native.json
if ! "$python" -c 'import setuptools; raise SystemExit(int(setuptools.__version__.split(".")[0]) < 77)'; then
    echo "setuptools is older than 77 and does not read the license: written as it was before"
    sed -i -e 's/^license = .*/license = {text = "Apache-2.0"}/' -e '/^license-files/d' "$work/tree/pyproject.toml"
fi
start=$SECONDS
if ! (cd "$work/tree" && "$python" -m pip wheel -v --no-index --no-deps --no-build-isolation \
        --wheel-dir "$work/dist" .) >"$work/log" 2>&1; then
    cat "$work/log"
    exit 1
fi
grep -o 'vllm_fl: \(built\|compiled\|installing\).*' "$work/log" | sort -u
echo "built in $((SECONDS - start)) s"

echo "== install into $site"
mkdir -p "$site"
rm -rf "$site"/vllm_fl "$site"/vllm_fl-*.dist-info
"$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$work"/dist/*.whl
ls -l "$site"/vllm_fl/_C*.so

echo "== doctor"
cd "$work" # not the tree, whose vllm_fl would be imported
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
export VLLM_USE_FLASHINFER_SAMPLER=0
unset VLLM_FL_DEVICE VLLM_FL_TUNE
"$python" -m vllm_fl.cli.main doctor --json >doctor.json || true
"$python" - <<'END'
import json
data = json.load(open("doctor.json"))
for entry in data["native"]["devices"]:
    print(f"{entry['device']}: {entry['state']}; {entry['compiler']}; {' '.join(entry['architectures'])}")
for entry in data["findings"]:
    print(f"{entry['level']}: {entry['about']}: {entry['text']}")
for op in data["ops"]:
    print(f"{op['op']}: {op['winner']}: {op['why']}")
print(data["verdict"]["text"])
found = {entry["device"]: entry["code"] for entry in data["native"]["devices"]}
raise SystemExit(0 if found["cpu"] == found["cuda"] == "works" else 1)
END
