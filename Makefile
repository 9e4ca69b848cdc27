# Everything a contributor needs; each target sets up its own .venv first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
WILD   := .venv-wild
WHEEL  := .venv-wheel
STAMP  := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Set in many container images. Without bytecode every launch of a test compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: wheel compiled-tests test-python public-names test-beside test-clocks root-cause wild wild-sample bench-rpc fuzz-rpc fuzz-records parity parity-join parity-live help demo test test-deep test-long check docs pictures format bench bench-rendezvous bench-elastic bench-join bench-collectives soak soak-elastic soak-rpc memory-rpc clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# pip would compile 10,000 files, most of which nobody imports: three quarters of a minute.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch --requirement requirements-dev.txt \
	    --editable '.[examples,etcd,gpu,tls,traces]'
	touch $@

demo: $(STAMP)   ## train a model on two processes, with plots, in under a minute
	$(BIN)/rally run --nproc-per-node 2 examples/digits_ddp.py --output demo-output

AT_A_TIME = --dist loadfile --no-loadscope-reorder
test: test-beside test-clocks ## the whole test suite

# The import rules are part of `make check`.
test-beside: $(STAMP) ## its first part: five files in parallel
	$(BIN)/python -m pytest -q -n 5 $(AT_A_TIME) --ignore tests/test_architecture.py \
	    -m "not long and not alone and not wild and not wheel"

test-clocks: $(STAMP) ## its second part: timing-sensitive tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal --no-loadscope-reorder -m "not long and alone and not wild and not wheel" \
	    $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

# In a new clone, each of the processes that run tests in parallel would compile all files for itself.
compiled-tests: $(STAMP) ## compiles the tests, once for all processes that run them
	$(BIN)/python -m pytest -q --collect-only -m "not long" tests >$(VENV)/collected || { cat $(VENV)/collected; exit 1; }

# Another PYTHON than the tests' own; torch is not installed, and tests that need it are skipped (tests/conftest.py).
OTHER = .venv-$(notdir $(PYTHON))
test-python:     ## tests that need no torch, with another Python: make test-python PYTHON=python3.13
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --constraint constraints.txt --constraint requirements-dev.txt \
	    pytest pytest-timeout pytest-xdist hypothesis psutil cloudpickle cryptography etcd3gw \
	    numpy nvidia-ml-py prometheus_client
	$(OTHER)/bin/pip install --quiet --no-deps --editable .
	$(OTHER)/bin/python -m pytest -q -n 2 tests/unit tests/contract

test-deep: $(STAMP) ## every property with 20 times as many examples (long)
	$(BIN)/python -m pytest -q -n 2 --deep 20 -o faulthandler_timeout=0 -m "not long and not wild and not wheel"

test-long: $(STAMP) ## long tests: slow connections, long silences
	$(BIN)/python -m pytest -q -m long

# A virtual environment of its own that sees what is in .venv: torch is not installed twice.
$(WILD)/bin/python: $(STAMP)
	$(PYTHON) -m venv --without-pip $(WILD)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    > $$($(WILD)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth

wild: $(WILD)/bin/python ## frameworks (Trainer, accelerate, Lightning, ignite, Hydra …) on tiny models, compared with torchrun
	$(WILD)/bin/python -m pip install --quiet --constraint constraints.txt --requirement requirements-wild.txt
	$(WILD)/bin/python -m pytest -q -o faulthandler_timeout=0 -m wild tests/wild

wild-sample: $(WILD)/bin/python ## two of the frameworks, in half a minute
	$(WILD)/bin/python -m pip install --quiet --constraint constraints.txt --constraint requirements-wild.txt \
	    hydra-core accelerate
	$(WILD)/bin/python -m pytest -q -o faulthandler_timeout=0 -m sample tests/wild

# A line in a .pth file shows it the packages of .venv, torch among them, but not this working tree.
wheel: $(STAMP)  ## build the wheel, and test it in an environment of its own
	rm -rf $(WHEEL) dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv --without-pip $(WHEEL)
	$(BIN)/python -m pip --python $(WHEEL)/bin/python install --quiet basedpyright==1.40.2
	$(BIN)/python -m pip --python $(WHEEL)/bin/python install --quiet --no-deps dist/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(WHEEL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(BIN)/python -m pytest -q -m wheel tests/wheel

public-names: $(STAMP) ## write tests/public_names.txt: every public name with its signature
	PYTHONPATH=tests $(BIN)/python tests/test_public_names.py

check: $(STAMP)  ## ruff, mypy (strict) and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: $(STAMP)   ## build the site, with the API reference, in docs/_build; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

pictures: $(STAMP) ## run a small job and draw what it prints; writes docs/terminal.svg
	$(BIN)/python docs/pictures.py

format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## launch speed and memory, compared with torchrun; writes bench/results/launch.json
	$(BIN)/python bench/launch.py --output bench/results/launch.json

bench-rendezvous: $(STAMP) ## a rendezvous of 16 to 4096 nodes, compared with torch's; writes bench/results/rendezvous.json
	$(BIN)/python bench/rendezvous.py --output bench/results/rendezvous.json --plot bench/results/rendezvous.png

bench-elastic: $(STAMP) ## an elastic job of four hosts that loses workers, supervisors and hosts (root); writes bench/results/elastic.json
	$(BIN)/python bench/elastic.py --output bench/results/elastic.json

bench-join: $(STAMP) ## the cost of Join per step, compared with torch's; writes bench/results/join.json
	$(BIN)/python bench/join.py --output bench/results/join.json

bench-collectives: $(STAMP) ## differentiable collectives, compared with torch's and bare ones; writes bench/results/collectives.json
	$(BIN)/python bench/collectives.py --output bench/results/collectives.json

bench-rpc: $(STAMP) ## calls between processes, compared with TensorPipe; writes bench/results/rpc.json
	$(BIN)/python bench/rpc.py --output bench/results/rpc.json --plot bench/results/rpc.png

fuzz-rpc: $(STAMP) ## a million invalid frames for an agent and its parser; writes bench/results/fuzz_rpc.json
	$(BIN)/python bench/fuzz_rpc.py --frames 1000000 --output bench/results/fuzz_rpc.json

fuzz-records: $(STAMP) ## a million forged and malformed records of a rendezvous and of rpc groups; writes bench/results/fuzz_records.json
	$(BIN)/python bench/fuzz_records.py --records 1000000 --output bench/results/fuzz_records.json

parity: $(STAMP) ## torch's own RPC tests, from the wheel, on rallypoint.rpc; writes docs/rpc_parity.md
	$(BIN)/python tests/parity/rpc_suite.py --against rallypoint --output bench/results/rpc_parity.json --markdown docs/rpc_parity.md

parity-live: $(STAMP) ## torchrun and rally run, case by case; writes tests/parity/recorded
	PARITY_LIVE=1 $(BIN)/python -m pytest -q tests/parity/test_torchrun.py

parity-join: $(STAMP) ## torch's own tests of uneven inputs, from the wheel, on our Join; writes docs/join_parity.md
	$(BIN)/python tests/parity/join_suite.py --output bench/results/join_parity.json --markdown docs/join_parity.md

soak: $(STAMP)   ## 50 random kills and 20 restarts: no process may be left; writes bench/results/soak.json
	$(BIN)/python bench/soak.py --output bench/results/soak.json

root-cause: $(STAMP) ## 100 random faults: the report must name the worker and its error; writes bench/results/root_cause.json
	$(BIN)/python bench/root_cause.py --faults 100 --output bench/results/root_cause.json

soak-elastic: $(STAMP) ## 200 random faults on one elastic job of four hosts (root); writes bench/results/soak_elastic.json
	$(BIN)/python bench/soak_elastic.py --faults 200 --output bench/results/soak_elastic.json

soak-rpc: $(STAMP) ## 10,000 random faults on eight processes that call each other; writes bench/results/soak_rpc.json
	$(BIN)/python bench/soak_rpc.py --faults 10000 --output bench/results/soak_rpc.json

memory-rpc: $(STAMP) ## five million calls and 20,000 tensors: memory must not grow; writes bench/results/memory_rpc.json
	$(BIN)/python bench/memory_rpc.py --output bench/results/memory_rpc.json

clean:           ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV)-* dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output
