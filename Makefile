# make demo: train the example on 2 ranks.  make bench: docs/performance.md's table.
# make docs: the site, in build/site.
# make unit: the tests that start no process.  make test: those, and each subject on every engine; builds Horovod once.
# make test-all: everything that CI runs.
# make coverage: the lines of the package that make test executes with Ray and Spark, the least covered files first.
# make faults N=200 SEED=1: kills, stops and breaks ranks, and counts what became of the others (tests/faults). CASE=17
# runs that case of the seed alone. What its ranks print is shown where something is wrong.
# make elastic-events N=500: workers that are lost, leave and come in one elastic job on three hosts. As root.
# make mishaps N=300: kills, full disks, damaged and hostile files, hostile bytes on ports; counts what was lost or ran.
# make mutants N=20: changes one place of the package at a time, and counts the changes that no test notices.
# make test-torch TORCH=2.15.0: what another PyTorch may break, in an environment of its own, which takes some gigabytes.
# make test-interop: scripts of more libraries than `make test` installs, in an environment of its own.
VENV ?= .venv
# What pip is held to.
PINS ?= -c constraints.txt
PYTHON ?= python3
BIN := $(VENV)/bin
APT_PACKAGES := g++ cmake make openmpi-bin libopenmpi-dev mpich slurm-wlm munge openssh-server openssh-client iproute2 \
	default-jre-headless python3-dev
PROGRAMS := sshd ip java g++ cmake mpicxx.openmpi mpirun.openmpi mpiexec.mpich srun slurmctld slurmd munged
# Engines, their process groups, the drop-in, weights, data, checkpoints, comparisons: all that calls PyTorch's own parts.
TORCH_TESTS := tests/contract $(patsubst %,tests/test_%.py,contract mpi c10d hvd parity data checkpoint checkpoint_files \
	compare compare_worlds launch)

# pip beside apt, lint beside the unit tests, and then Horovod's build.
MAKEFLAGS += -j2

.PHONY: demo docs unit test test-all coverage faults elastic-events mishaps mutants test-hosts test-torch test-interop test-gpu bench lint system clean

demo: $(VENV)/demo.stamp
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/digits.py

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "the site is build/site/index.html"

unit: $(VENV)/pip.stamp
	$(BIN)/pytest -m unit -n 2 --dist worksteal

test: TESTS := not unit and not variant
test: lint unit $(VENV)/test.stamp
	$(BIN)/pytest -m "$(TESTS)" -n 3 --dist loadfile --no-loadscope-reorder --durations=20

# Nothing is installed while tests run, but for Horovod.
test-all: $(VENV)/clusters.stamp system
	$(MAKE) test TESTS="not unit"

# Of `make test` with Ray and Spark, in all processes that it starts, also those without its variables.
SETTINGS = COVERAGE_PROCESS_START='$(CURDIR)/setup.cfg', COVERAGE_FILE='$(CURDIR)/.coverage'
coverage: $(VENV)/test.stamp $(VENV)/clusters.stamp
	$(BIN)/coverage erase
	-startup=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/unidist_coverage.pth; \
		trap "rm -f $$startup" EXIT INT TERM; \
		echo "import coverage, os; os.environ.update($(SETTINGS)); coverage.process_startup()" > $$startup; \
		$(BIN)/pytest
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --sort=cover --skip-covered

N ?= 30
faults: $(VENV)/test.stamp
	$(BIN)/python -m tests.faults.campaign -n $(N) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

elastic-events: $(VENV)/test.stamp
	$(BIN)/python -m tests.faults.elastic_events -n $(N) $(if $(SEED),--seed $(SEED))

mishaps: $(VENV)/pip.stamp
	$(BIN)/python -W ignore -m tests.faults.mishaps -n $(N) $(if $(SEED),--seed $(SEED))

mutants: $(VENV)/test.stamp
	$(BIN)/python -W ignore -m tests.mutants -n $(N) $(if $(SEED),--seed $(SEED))

# Hosts as network namespaces: what `make test-all` has of them, and what takes longer. As root.
test-hosts: $(VENV)/test.stamp
	UNIDIST_TEST_HOSTS=all $(BIN)/pytest tests/test_hosts.py tests/test_leaders.py tests/test_addresses.py \
		tests/test_elastic.py::test_a_host_that_is_cut_off_and_comes_back

test-torch: TORCH_VENV = .venv-torch-$(TORCH)
test-torch:
	@[ -n "$(TORCH)" ] || { echo "Which PyTorch? make test-torch TORCH=2.15.0" >&2; exit 1; }
	$(MAKE) VENV=$(TORCH_VENV) PINS=torch==$(TORCH) $(TORCH_VENV)/test.stamp
	$(TORCH_VENV)/bin/pytest $(TORCH_TESTS)

INTEROP_VENV := .venv-interop
test-interop:
	$(MAKE) VENV=$(INTEROP_VENV) $(INTEROP_VENV)/test.stamp $(INTEROP_VENV)/clusters.stamp
	$(INTEROP_VENV)/bin/pip install -q --disable-pip-version-check $(PINS) transformers deepspeed
	$(INTEROP_VENV)/bin/pytest tests/test_interop.py

# On a machine with a GPU. GPU_PYTHON=python3 takes that environment as it is, and installs nothing.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/pip.stamp)
	@$(GPU_PYTHON) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else f'torch {torch.__version__} sees no GPU')"
	$(GPU_PYTHON) -m pytest tests/test_gpu.py -rs --durations=10

bench: $(VENV)/test.stamp
	$(BIN)/unidist bench all --quick --json bench.json --plot bench.png

lint: $(VENV)/pip.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg
	$(BIN)/actionlint

clean:
	rm -rf $(VENV) .venv-torch-* .venv-interop build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { echo "No venv module: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/demo.stamp: $(BIN)/python setup.cfg constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e ".[examples]"
	touch $@

$(VENV)/docs.stamp: $(BIN)/python setup.cfg constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e ".[docs]"
	touch $@

$(VENV)/pip.stamp: $(BIN)/python setup.cfg constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e ".[bench,cli,docs,horovod,examples,test]" "mpi4py>=4.1"
	touch $@

# Horovod's wheel is cached outside the checkout (UNIDIST_CACHE, default ~/.cache/unidist).
$(VENV)/test.stamp: $(VENV)/pip.stamp | system
	$(BIN)/unidist build-horovod --install
	touch $@

$(VENV)/clusters.stamp: $(VENV)/pip.stamp
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e ".[ray,spark]" "ray[train]" pandas pyarrow
	touch $@

# Debian and Ubuntu: what the launchers' tests need, if it is missing.
system:
	@missing=; for program in $(PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	include=$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_path('include'))"); \
	[ -e $$include/Python.h ] || missing="$$missing Python.h"; \
	[ -z "$$missing" ] && exit 0; echo "installing what provides:$$missing"; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	$$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $(APT_PACKAGES)
