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

.PHONY: help demo demo-stop test test-long soak chaos bench bench-storage bench-recovery check format clean

help:
	@echo "make demo       set everything up and run the main job with two faults"
	@echo "make demo-stop  end the demo's Prefect server"
	@echo "make test       set everything up and pass the tests"
	@echo "make test-long  the longer ones"
	@echo "make soak       ten minutes without a false alarm, half an hour of kills"
	@echo "make chaos      break runs at random; SEEDS=\"1 2 3\""
	@echo "make bench      speed beside other programs, printed as ratios"
	@echo "make bench-storage  likewise of saves and restores; takes about five minutes a section"
	@echo "make bench-recovery  likewise of recovery and its cost; about twenty minutes a section"
	@echo "make check      format, lint, types, layers, spelling"

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

# Two at a time, a file's tests on one worker; tests that measure seconds have the machine for
# themselves. The slowest twenty of each part are listed.
TEST := $(BIN)/python -m pytest --durations 20
SIDE_BY_SIDE := --numprocesses 2 --dist loadgroup

test: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.prometheus $(VENV)/.ui-browser
	$(TEST) tests/unit --numprocesses 2 --dist loadfile
	$(TEST) tests/ui tests/process tests/s3 -m "not alone and not long" \
		$(SIDE_BY_SIDE) --no-loadscope-reorder  # the files of the longest first
	$(TEST) tests/process -m "alone and not long"

# The other real runs: variants of faults, kinds of parallelism, programs, outages.
test-long: $(VENV)/.installed $(VENV)/.s3-servers $(VENV)/.prometheus $(VENV)/.ui-browser \
		$(VENV)/.prefect-servers
	$(TEST) tests/process tests/ui -m "long and not alone" $(SIDE_BY_SIDE)
	$(TEST) tests/process -m "long and alone"

# More than ten minutes of a run that has nothing wrong, and half an hour in which flow, worker,
# server and node are killed in turn.
soak: $(VENV)/.installed
	PERDURE_HEALTHY_STEPS=7500 $(BIN)/python -m pytest tests/process/test_health.py \
		-k healthy --timeout 1800
	PERDURE_OPERATOR_S=1800 $(BIN)/python -m pytest tests/process/test_operator.py

# Each seed is a run that is broken fifty times, every other one with comm.link_retry; shrink one
# that fails with CHAOS_OPTIONS=--shrink.
SEEDS ?= 1 2 3
chaos: $(VENV)/.installed
	$(BIN)/python -m training.drill.chaos --seed $(SEEDS) $(CHAOS_OPTIONS)
	$(BIN)/python -m training.drill.chaos --seed $(SEEDS) --parallelism hsdp $(CHAOS_OPTIONS)
	$(BIN)/python -m training.drill.chaos --seed $(SEEDS) --parallelism fsdp2 $(CHAOS_OPTIONS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.diagnose
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

check: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .venv-bench .perdure .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
