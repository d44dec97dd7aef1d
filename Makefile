# make demo   environment, quickstart on two CPU engines (or your GPUs), result in build/
# make test   environment, linters, types, tests
# make lab    JupyterLab on the quickstart; LAB_ARGS="--no-browser --allow-root" for its options
# make bench  the benchmarks, one JSON line each; run them on an idle machine
# make nightly  what takes too long for every commit: 1,000 cases of chaos, whole products
# make picture  the README's picture, from the quickstart in JupyterLab; needs Chromium
# make compatibility  a short notebook under other versions of IPython and ipykernel

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-engines test-beside lab bench nightly picture compatibility clean
.DEFAULT_GOAL := demo

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--config-settings editable_mode=compat --editable '.[test]'
	touch $@

demo: $(INSTALLED)
	mkdir -p build
	$(BIN)/jupyter nbconvert --to notebook --execute notebooks/quickstart.ipynb \
		--output-dir build --output quickstart.ipynb --ExecutePreprocessor.timeout=600
	$(BIN)/jupyter nbconvert --to html build/quickstart.ipynb --output-dir build
	@echo "Look at build/quickstart.html; the executed notebook is build/quickstart.ipynb"

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory --jobs 2 --keep-going test-engines test-beside

# engines wait for each other often, and leave half of two cores to the others
BESIDE := tests/unit tests/notebooks tests/chaos tests/browser \
	$(wildcard tests/engines/test_tun*.py) tests/engines/test_fork_server.py

test-engines: $(INSTALLED)
	$(BIN)/python -m pytest $(addprefix --ignore ,$(BESIDE))

test-beside: $(INSTALLED)
	mkdir -p build
	($(BIN)/mypy && $(BIN)/python -m pytest -p no:cacheprovider $(BESIDE)) \
		>build/beside.txt 2>&1; status=$$?; cat build/beside.txt; exit $$status

lab: $(INSTALLED)
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks/quickstart.ipynb

bench: $(INSTALLED)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/cell_latency.py
	$(BIN)/python benchmarks/panels.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/strategies.py
	$(BIN)/python benchmarks/memory_limit.py

nightly: $(INSTALLED)
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python tests/chaos/run.py --cases 1000 --result benchmarks/results/chaos.json $(CHAOS_ARGS)

picture: $(INSTALLED)
	$(BIN)/python tests/browser/picture.py notebooks/quickstart.png

compatibility: $(INSTALLED)
	$(BIN)/python tests/compatibility/run.py

clean:
	rm -rf build $(VENV)
