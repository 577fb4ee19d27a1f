"""What every test may rely on: a Perdure home of its own, and no settings from outside."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

from perdure.storage.proxies import bypass_proxies
from perdure.training.recovery.invariants import CHECK_INVARIANTS_ENV
from tests.workplace import api, bench, broken, migrated, prefect_server, session_home

__all__ = ["api", "bench", "broken", "migrated", "prefect_server", "session_home"]

# A change is judged by the same examples wherever it is tested, however slow the machine; new
# ones are tried with HYPOTHESIS_PROFILE=random.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

os.environ.setdefault(CHECK_INVARIANTS_ENV, "1")  # in the coordinators of all runs
# Servers of tests listen on this machine, which the proxy of an office does not reach.
bypass_proxies(os.environ, ("http://127.0.0.1",))


@pytest.fixture(autouse=True)
def perdure_home(tmp_path, monkeypatch):
    """A home folder for this test alone."""
    home = tmp_path / "home"
    monkeypatch.setenv("PERDURE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def perdure_logger(monkeypatch):
    """For `caplog`, whatever a program that an earlier test ran in this process had set up."""
    logger = logging.getLogger("perdure")
    for name, value in (("handlers", []), ("level", logging.INFO), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Tests of a file stay on one worker, and files that look at the same run as well."""
    for item in items:
        shares_a_run = "broken" in item.fixturenames
        item.add_marker(pytest.mark.xdist_group("broken" if shares_a_run else item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where a run that failed a test has left its logs."""
    report = yield
    found = (getattr(value, "home", value) for value in item.funcargs.values())
    homes = {one for one in found if isinstance(one, Path) and (one / "runs").is_dir()}
    if report.failed and homes:
        lines = [
            f"{home}/{part}"
            for home in sorted(homes)
            for part in (
                "*.out",
                "runs/RUN/nodes/NODE/*/agent.log",
                "runs/RUN/nodes/*/*/attempts/*",
            )
        ]
        report.sections.append(("Logs of the runs", "\n".join(lines)))
    return report
