# One virtual environment, three rings of packages: what the demo needs, the test tools, the style tools.
# PIP_ARGS reaches pip, for instance PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu".
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
PINS := pyproject.toml constraints.txt

.PHONY: demo test check style test-gpu sanitize-gpu bench peers check-vllm clean

demo: $(VENV)/.demo
	$(BIN)/specdec demo

test: $(VENV)/.test
	$(BIN)/specdec pull smollm2-135m
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p specdec
	$(BIN)/codespell

style: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# on a machine with a card, in the environment that is active there: its torch is not replaced
test-gpu:
	python -m pytest -m gpu

# the same kernels under compute-sanitizer (CUDA toolkit): memory of each tensor by itself, so that a row beyond its end
# is seen, then reads of shared memory before their writes are done; minutes to an hour
SANITIZE := compute-sanitizer --error-exitcode 1 --target-processes all
sanitize-gpu:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) --tool memcheck python -m pytest -m gpu tests/kernels
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) --tool racecheck python -m pytest -m gpu tests/kernels

bench: $(VENV)/.demo
	$(BIN)/specdec pull smollm2-135m
	$(BIN)/specdec bench smollm2-135m --micro
	$(BIN)/specdec bench smollm2-135m --data mt_bench --draft smollm2-135m --draft ngram --draft ngram+smollm2-135m

# environments of the engines that specdec compare starts
peers:
	sh cli/peer_scripts/make_environments.sh .peers $(PYTHON)

# whether vLLM drafts with the exported head what we draft with it; after make peers
check-vllm: $(VENV)/.demo
	$(BIN)/specdec pull smollm2-135m
	$(BIN)/python -m specdec.cli.check_vllm $(CHECK_VLLM_ARGS)

clean:
	rm -rf $(VENV) .peers build *.egg-info

$(VENV)/.base: $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable ".[test]"
	touch $@

$(VENV)/.check: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable ".[check,test]"
	touch $@
