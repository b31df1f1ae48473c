# Every target makes .venv by itself. PYTHON=python3.12 chooses the Python that it is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.everstep-ready

.PHONY: help venv demo test check format docs soak cases bench clean

help:
	@echo "make demo    train a small GPT on four stand-in machines, break each part once"
	@echo "make test    check, then all tests"
	@echo "make check   formatter, linter, types, import contract"
	@echo "make soak    thousands of simulated seeds, SEEDS=5000; then kills, slow hangs and calm training"
	@echo "make cases   how well diagnosis answers the failure cases"
	@echo "make bench   restarts beside torchrun, checkpoints beside DCP and others, recovery, hangs, detection (as root)"
	@echo "make docs    write what is generated: docs/torchrun-flags.md, tables of docs/checks.md, frozen flags"

venv: $(READY)

$(READY): pyproject.toml scripts/venv.py
	@$(PYTHON) scripts/venv.py $(VENV)
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python examples/gpt/demo.py

# Four at a time, since most of what they wait for are other processes; tests of one file stay
# together, and files in their order: the longest are not the last.
# Each test starts many processes of ours, and each of the four imports all tests: compiled once, not
# by each where bytecode is not written. It is done beside the checks, of which one takes longest.
test: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -q -p no:cacheprovider >/dev/null & \
	$(BIN)/python scripts/check.py && $(BIN)/python -m compileall -q src/everstep; ended=$$?; wait; exit $$ended
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

check: $(READY)
	@$(BIN)/python scripts/check.py

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(READY)
	@$(BIN)/python scripts/docs.py

SEEDS ?= 5000
soak: $(READY)
	@$(BIN)/python -m everstep.sim --seeds $(SEEDS)
	@EVERSTEP_SOAK_SEEDS=20 $(BIN)/python -m pytest tests/checkpoint/test_kills.py tests/agent/transfer/test_transfer_kills.py
	@$(BIN)/python -m pytest tests/integration/soak_hangs.py

cases: $(READY)
	@$(BIN)/python scripts/cases.py

bench: $(READY)
	@$(BIN)/python bench/restart.py
	@$(BIN)/python bench/checkpoint.py
	@$(BIN)/python bench/diagnose.py
	@$(BIN)/python bench/aggregate.py
	@$(BIN)/python bench/recovery.py
	@$(BIN)/python bench/hang.py
	@$(BIN)/python bench/detection.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
