"""A store that is away while a run goes on, and one that is gone when a run is started again."""

from __future__ import annotations

import logging
import shutil

import pytest

from perdure.storage.address import has_store
from perdure.storage.errors import StorageError, StoreMissing
from perdure.training.config.job import Job
from perdure.training.errors import InputError, RunConflict
from perdure.training.journal.ledger import Identity
from perdure.training.supervisor.run_identity import begin_store
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.store_outage import StoreOutage, read_outage
from tests.jobs import small_job


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def job(tmp_path) -> Job:
    return small_job(tmp_path, worker={"command": ["true"]})


@pytest.fixture
def folder(job):
    return job.storage.folder


def started(job: Job, home) -> RunSupervisor:
    """A run that its supervisor has taken, and left."""
    run = RunSupervisor(job, home=home)
    run.take()
    run.ledger.release()
    return run


def test_the_first_run_makes_the_store(job, home, folder):
    shutil.rmtree(folder)
    started(job, home)
    assert has_store(job.storage)


@pytest.mark.parametrize("is_empty_folder", [True, False])
def test_a_run_that_is_known_begins_in_no_empty_folder(job, home, folder, is_empty_folder):
    started(job, home)
    folder.rename(folder.with_name("away"))
    if is_empty_folder:
        folder.mkdir()
    with pytest.raises(InputError, match="no store is in this folder, where this machine keeps ru"):
        RunSupervisor(job, home=home).take()
    assert not has_store(job.storage)
    assert folder.exists() is is_empty_folder


def test_another_run_makes_no_store_where_one_is_known_to_be(job, home, folder):
    started(job, home)
    folder.rename(folder.with_name("away"))
    other = job.model_copy(update={"run_id": "other"})
    with pytest.raises(InputError, match="where this machine keeps run; mount or move it back"):
        begin_store(other, home)


def test_a_run_that_is_known_begins_in_no_store_without_its_ledger(job, home, folder):
    started(job, home)
    shutil.rmtree(folder / "runs")
    with pytest.raises(RunConflict, match="holds nothing of run run, which was started there"):
        RunSupervisor(job, home=home).take()
    assert not (folder / "runs").exists()


def test_the_store_of_a_version_without_markers_gets_one(job, home, folder):
    started(job, home)
    (folder / ".perdure-store").unlink()
    assert started(job, home).ledger.epoch == 2
    assert has_store(job.storage)


def test_a_supervisor_waits_for_its_store_and_notes_since_when(
    job, home, folder, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    outages = []
    now_s = iter([1_000.0, 1_060.0])
    outage = StoreOutage(home, job.run_id, logging.getLogger("test"), clock=lambda: next(now_s))
    away = folder.with_name("away")

    def back(_seconds: float) -> bool:
        outages.append(read_outage(home, job.run_id))
        away.rename(folder)
        return False

    monkeypatch.setattr(outage._gives_up, "wait", back)
    run = RunSupervisor(job, home=home, outage=outage)
    run.take()
    folder.rename(away)
    run.ledger.renew()
    (noted,) = outages
    assert noted is not None
    assert noted.since_s == pytest.approx(1_000.0, abs=5.0), "of the request, not of its failure"
    assert "no store is in this folder" in noted.why
    assert read_outage(home, job.run_id) is None
    assert "the run's store cannot be used, waiting for it: file://" in caplog.text
    assert "the run's store can be used again, after 60 s" in caplog.text


def test_a_supervisor_that_ends_waits_no_more_and_leaves_its_note(job, home, folder):
    outage = StoreOutage(home, job.run_id, logging.getLogger("test"))
    run = RunSupervisor(job, home=home, outage=outage)
    run.take()
    away = folder.with_name("away")
    folder.rename(away)
    outage.give_up()
    with pytest.raises(StoreMissing):
        run.ledger.renew()
    assert read_outage(home, job.run_id) is not None
    away.rename(folder)
    (folder / "runs" / "run" / "supervisor.json").unlink()
    next_supervisor = RunSupervisor(job, home=home)
    next_supervisor._identity = Identity.of_this_process()
    next_supervisor.take()
    assert read_outage(home, job.run_id) is None


def test_an_outage_is_one_line_however_often_it_fails(job, home, caplog):
    caplog.set_level(logging.INFO)
    home.joinpath("runs", job.run_id).mkdir(parents=True)
    outage = StoreOutage(home, job.run_id, logging.getLogger("test"))
    for number in range(3):
        outage.failed(StorageError(f"no {number}"))
    assert caplog.text.count("cannot be used") == 1
    noted = read_outage(home, job.run_id)
    assert noted is not None
    assert noted.why == "no 2"
    outage.passed()
    outage.passed()
    assert caplog.text.count("can be used again") == 1
