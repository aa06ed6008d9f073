# A bare `make` prints the menu.
# Everything is installed into .venv; nothing is installed outside this folder.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)
JOBS   ?= 2
ifneq ($(UV),)
ENVIRONMENT := $(UV) venv --quiet --python $(PYTHON) $(VENV)
INSTALL     := $(UV) pip install --quiet --python $(BIN)/python
else
ENVIRONMENT := $(PYTHON) -m venv $(VENV)
INSTALL     := $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif
# The tests that must reach every branch of the mathematics and of the ledger.
COVERING := $(addprefix tests/,core golden ledger library)

.PHONY: menu demo quick test test-all coverage mutants check format figures docs table bench clean

menu:
	@echo "make demo      an adaptive private analysis, killed in the middle and resumed"
	@echo "make quick     run the fast tests, in this process and on SQLite (after every change; 90 seconds)"
	@echo "make test      run the test suite (long simulations reduced)"
	@echo "make test-all  run the test suite in full"
	@echo "make coverage  see that tests reach every branch of the mathematics and of the ledger"
	@echo "make mutants   break what must not be wrong, one line at a time, and see a test go red (a quarter of an hour)"
	@echo "make check     formatting, lint, types, architecture"
	@echo "make format    rewrite files in the project's format"
	@echo "make figures   draw the paper's figures and ours into figures/, and the paper's into docs/images/paper/"
	@echo "make docs      build the documentation as a site into build/docs"
	@echo "make bench     measure costs side by side with peers and the floor"
	@echo "make table     recompute the shipped table of exact budgets (a quarter of an hour)"
	@echo "make clean     remove the virtual environment and caches"

# A stamp is newer than pyproject.toml exactly when the environment is up to date. The demo needs a part of it.
$(VENV)/demo: pyproject.toml
	@echo "setting up $(VENV) for the demo (once, about a minute)"
	@test -d $(VENV) || $(ENVIRONMENT)
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/stamp: pyproject.toml
	@echo "setting up $(VENV) (once, some minutes)"
	@test -d $(VENV) || $(ENVIRONMENT)
	@$(INSTALL) -e '.[all,dev]'
	@touch $@ $(VENV)/demo

# Opacus needs torch. Where that would bring several GB of CUDA packages, its tests are skipped, and say so.
TORCH := torch==2.13.0
$(VENV)/training: $(VENV)/stamp
ifneq ($(UV),)
	@$(INSTALL) --torch-backend cpu $(TORCH)
	@$(INSTALL) -e '.[all,dev,training]'
else
	@if $(BIN)/python -m pip install --quiet --dry-run --report /dev/stdout $(TORCH) 2>/dev/null | grep -q '"nvidia'; then \
	  echo "torch would bring CUDA with it: install a CPU build into $(VENV), then Opacus, to run their tests"; \
	else \
	  $(INSTALL) $(TORCH) && $(INSTALL) -e '.[all,dev,training]'; \
	fi
endif
	@touch $@

# What is measured beside Odograph and nothing else needs; a peer that cannot be installed is marked as not measured.
$(VENV)/peers: $(VENV)/training
	@$(INSTALL) -e '.[peers]' || echo "some peers cannot be installed"
	@touch $@

# Browser tests drive Debian's Chromium, and the service's benchmark asks with wrk. Where they cannot be installed, the
# tests are skipped, and say so.
$(VENV)/programs: $(VENV)/stamp
	@for program in chromium wrk; do \
	  command -v $$program >/dev/null && continue; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends $$program >/dev/null; \
	  else \
	    echo "there is no $$program here: install it to run what needs it"; \
	  fi; \
	done
	@touch $@

# The servers that the examples of deploy/ are tested with are unpacked and not installed: nothing is started.
$(VENV)/servers: $(VENV)/stamp
	@mkdir -p $@.new && cd $@.new && { \
	  for package in caddy nginx prometheus; do \
	    apt-get download -qq $$package 2>/dev/null && dpkg-deb --extract $${package}_*.deb . && rm $${package}_*.deb \
	    || echo "Debian's $$package cannot be unpacked here: tests that need it are skipped, and say so"; \
	  done; }
	@rm -rf $@ && mv $@.new $@

# Tumult pins NumPy 1 and pandas 1, so its tests have an environment of their own.
TUMULT := $(VENV)-tumult
$(TUMULT)/stamp: pyproject.toml
	@echo "setting up $(TUMULT) (once)"
	@test -d $(TUMULT) || $(PYTHON) -m venv $(TUMULT)
	@$(TUMULT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[postgres,tumult]' pytest hypothesis
	@touch $@

demo: $(VENV)/demo
	@$(BIN)/odograph demo

quick: $(VENV)/stamp
	@$(BIN)/python -m pytest -q -m quick -n $(JOBS) --dist worksteal

test: $(VENV)/training $(VENV)/programs $(VENV)/servers
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: $(VENV)/training $(VENV)/programs $(VENV)/servers $(TUMULT)/stamp
	@ODOGRAPH_FULL=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	@$(TUMULT)/bin/python -m pytest tests/integrations/test_tumult.py

coverage: $(VENV)/stamp
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --cov --cov-report=term $(COVERING)

mutants: $(VENV)/stamp
	@$(BIN)/python tools/mutation.py --jobs $(JOBS)

check: $(VENV)/training
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/architecture

format: $(VENV)/stamp
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

figures: $(VENV)/stamp
	@$(BIN)/odograph figures --out figures
	@cp figures/fig*.svg docs/images/paper/

docs: $(VENV)/stamp
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "built: open build/docs/index.html"

bench: $(VENV)/peers $(VENV)/programs $(TUMULT)/stamp
	@$(BIN)/python benchmarks/run.py

table: $(VENV)/stamp
	@$(BIN)/python tools/build_table.py

clean:
	rm -rf $(VENV) $(TUMULT) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
