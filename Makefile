# Every target makes what it needs: the first run creates .venv with the versions pinned in .ci/constraints.txt.
# `make PYTHON=python3.12 test` uses another interpreter; `make demo ARGS=--help` hands arguments on.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDER := out/triton-3.6.0
SLOW := slow and not gpu and not gpu2
# On two workers of one thread each, which may keep what they compile: tests start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST)

.PHONY: demo test test-hf test-slow lint bench bench-gpu compile-quick compile-check release clean

# Train, decode and compare small language models.
# Threads that wait asleep: beside other work on the same cores, spinning made training six times slower.
demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/compose_lm.py $(ARGS)

# The default suite; the kernels, which Triton interprets in a process of its own; and models of transformers.
test: $(READY)
	$(PYTEST) --ignore=tests/integrations $(ARGS)
	$(INTERPRETED) tests/kernels $(ARGS)
	$(MAKE) test-hf

# Models of Hugging Face transformers on attnlib.
test-hf: $(READY)
	$(PYTEST) tests/integrations $(ARGS)

# What `make test` leaves out, as tests/README.md lists it: more examples of properties, and cases whose like it ran.
test-slow: $(READY)
	$(PYTEST) -m '$(SLOW)' $(ARGS)
	$(INTERPRETED) -m '$(SLOW)' tests/kernels $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(READY)
	$(BIN)/python -m attnlib bench $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m attnlib bench --gpu $(ARGS)

# Compile the launch tables' kernels for chips that need not be here, and hold them against docs/compiled.md.
compile-quick: $(READY)
	$(BIN)/python tests/compiled

# Compile more of them, with the Triton of torch 2.11 too, and write docs/compiled.md.
compile-check: $(READY) $(OLDER)/.ready
	code=0; for path in "" $(OLDER); do PYTHONPATH=$$path $(BIN)/python tests/compiled --write || code=1; done; \
	exit $$code

$(OLDER)/.ready: | $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) triton==3.6.0
	touch $@

# Build the sdist and the wheel into dist/, and check them in environments of their own; uploads nothing.
release:
	PYTHON=$(PYTHON) .ci/release

clean:
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis

# The environment variable, unlike pip's -c, also pins what builds the package.
$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=.ci/constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet -e '.[test,demo,dev]'
	touch $@
