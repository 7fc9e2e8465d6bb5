# The only commands to know. `make test` and `make demo` set up .venv themselves.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Without an NVIDIA GPU: the pinned builds that CI runs. With one, torch brings its own Triton.
CONSTRAINTS := $(if $(shell nvidia-smi -L 2>/dev/null),,-c constraints-cpu.txt)
INSTALLED := $(VENV)/.installed

.PHONY: install format lint types test test-installed test-gpu memcheck bench bench-paired bench-multi compile-all compile-hopper demo check docs

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.cfg constraints-cpu.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q $(CONSTRAINTS) -e ".[dev]"
	touch $@

format: install
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# mypy reads folders, not setuptools' map of them: check an installed copy
types: install
	rm -rf build
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation --target build/types .
	cd build/types && $(abspath $(PYTHON)) -m mypy --config-file ../../pyproject.toml

test: install
	$(PYTHON) -m pytest tests

# On a regular, not editable, installation, which stands before the editable one: tests that between them use every
# packaged folder, data file, command and compiled kernel.
INSTALLED_COPY := $(abspath build/installed)
INSTALLED_TESTS := $(patsubst %,tests/test_%.py,cli_plan compile gpus hopper launch ops pack pack_groups readme resume schema simulator_outputs train tune)
test-installed: install
	rm -rf build
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation --target $(INSTALLED_COPY) .
	cd / && PYTHONPATH=$(INSTALLED_COPY) $(abspath $(PYTHON)) -c \
		"import hexiseq_triton as hx; assert hx.__file__.startswith('$(INSTALLED_COPY)'), hx.__file__"
	PYTHONPATH=$(INSTALLED_COPY) $(PYTHON) -m pytest $(INSTALLED_TESTS)

test-gpu: install
	$(PYTHON) -m pytest tests -m "gpu or multigpu"

# on a GPU, with NVIDIA's compute-sanitizer: no kernel reads or writes out of bounds
SANITIZER ?= compute-sanitizer
memcheck: install
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 \
		$(PYTHON) bench/memcheck.py

# on a GPU: appends to bench/results and renews docs/benchmarks.md
bench: install
	$(PYTHON) -m pytest bench
	$(PYTHON) bench/report.py

# on a GPU, best with FlashAttention-4 installed: ours and the peers in turn, ratios with intervals
bench-paired: install
	$(PYTHON) bench/paired.py
	$(PYTHON) bench/report.py

# on a host of four GPUs: the runtime beside its peers, which goes on where a run of the same name was cut off; then fast and
# (emulated) slow ranks
RUN ?= $(shell date +%Y-%m-%d)
TORCHRUN := $(VENV)/bin/torchrun --nproc-per-node 4
SLOW := --emulate-sms 132,132,44,44
bench-multi: install
	$(TORCHRUN) bench/multi_attention.py --label $(RUN)
	mkdir -p build
	$(TORCHRUN) --no-python $(VENV)/bin/hexiseq profile $(SLOW) --out build/mixed.yaml
	$(TORCHRUN) bench/mixed_speed.py --cluster build/mixed.yaml $(SLOW) --name $(RUN)
	$(TORCHRUN) bench/memory_caps.py --cluster build/mixed.yaml --layout hexiseq --name $(RUN)
	-$(TORCHRUN) bench/memory_caps.py --cluster build/mixed.yaml --layout even --name $(RUN)  # runs out of memory
	$(PYTHON) bench/report.py

# every kernel of the launch tables for every card, without a GPU: registers and spills
compile-all: install
	$(PYTHON) bench/compile_all.py

# the Hopper kernels by another Triton than the installed one, without a GPU: make compile-hopper TRITON=3.8.0
TRITON ?= 3.8.0
OTHER_TRITON := $(abspath build/triton-$(TRITON))
compile-hopper: install
	$(PYTHON) -m pip install -q --no-deps --target $(OTHER_TRITON) triton==$(TRITON)
	PYTHONPATH=$(OTHER_TRITON) $(PYTHON) bench/compile_hopper.py

# the documentation as a site, in build/site; the API pages read an installed copy, as mypy does
docs: install
	rm -rf build
	$(PYTHON) -m pip install -q $(CONSTRAINTS) -e ".[docs]"
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation --target $(INSTALLED_COPY) .
	$(PYTHON) -m mkdocs build

demo: install
	$(VENV)/bin/hexiseq demo

check: lint types test
