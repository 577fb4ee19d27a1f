"""`perdure pause`, `resume`, and how `status` shows a pause."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from perdure import pausing
from perdure.cli import app
from perdure.pausing import Pausing
from perdure.storage.local import LocalStore
from perdure.training.config.job import parse_job
from perdure.training.errors import InputError, PerdureError
from perdure.training.journal.records import RunEnded
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.requests import control_key, read_control, write_control
from tests.jobs import job_document
from tests.unit.journal.histories import (
    BEGINNING,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    NOW,
    STANDS,
    seen,
)
from tests.unit.perdure.commands import append, error_line, perdure


@pytest.fixture
def document(tmp_path):
    return job_document(tmp_path, run_id="small")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def run(document, perdure_home):
    """A run that was started on this machine and is training."""
    job = parse_job(document)
    remember_job(perdure_home, job)
    made = RunHandle(job, home=perdure_home)
    append(made, *BEGINNING)
    return made


ENDED = RunEnded(**NOW, outcome="completed", message="step 60 reached")


class Ranks:
    """The passing of time, in which a supervisor records what the ranks do."""

    def __init__(self, run, *then) -> None:
        self.run, self.then, self.now_s = run, list(then), 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.then:
            append(self.run, self.then.pop(0))


@pytest.fixture
def printed(capsys):
    def printed() -> list[str]:
        return capsys.readouterr().out.splitlines()

    return printed


@pytest.fixture
def pausing_of(run):
    """Pauses or resumes the run while records are appended."""

    def make(*then, wait_s: float = 60.0) -> Pausing:
        ranks = Ranks(run, *then)
        return Pausing(run, wait_s=wait_s, clock=ranks.clock, sleep=ranks.sleep)

    return make


def test_a_pause_is_a_request_in_the_store_and_confirmed_when_the_ranks_pause(
    pausing_of, store, printed
):
    pausing_of(*seen(STANDS)).pause()
    assert read_control(store, "small").pause
    assert printed() == [
        "small: waiting until every rank pauses at a step boundary",
        "small: paused; 'perdure resume small' continues it",
    ]


def test_a_pause_without_confirmation_is_a_failure_and_the_request_remains(pausing_of, store):
    with pytest.raises(
        PerdureError, match=r"no pause was confirmed within 60 s.*perdure resume small"
    ):
        pausing_of().pause()
    assert read_control(store, "small").pause


def test_a_run_that_is_paused_already_stays_so(pausing_of, run, printed):
    append(run, *seen(STANDS))
    pausing_of().pause()
    assert printed()[-1].startswith("small: paused")


class Observer:
    """Observes one pause after the other."""

    def __init__(self, *pauses) -> None:
        self.pauses = list(pauses)

    def pause(self, view):
        return self.pauses.pop(0) if len(self.pauses) > 1 else self.pauses[0]


def test_a_pause_whose_end_was_not_recorded_confirms_nothing(pausing_of, run, monkeypatch):
    append(run, *seen(STANDS))  # its end came without a supervisor
    monkeypatch.setattr(run, "observer", lambda: Observer(None))
    with pytest.raises(PerdureError, match="no pause was confirmed"):
        pausing_of().pause()


def test_a_pause_that_was_never_recorded_is_not_taken_for_over(pausing_of, run, store, monkeypatch):
    write_control(store, "small", pause=True)
    monkeypatch.setattr(run, "observer", lambda: Observer("stands", "stands", None))
    pausing_of().resume()
    monkeypatch.setattr(run, "observer", lambda: Observer("stands"))
    write_control(store, "small", pause=True)
    with pytest.raises(PerdureError, match="still paused after"):
        pausing_of().resume()


def test_resuming_withdraws_the_request_and_ends_when_the_ranks_continue(
    pausing_of, run, store, printed
):
    write_control(store, "small", pause=True)
    append(run, *seen(STANDS))
    pausing_of(*seen(GOES_ON)).resume()
    assert not read_control(store, "small").pause
    assert printed() == ["small: waiting until the ranks continue", "small: training continues"]


def test_a_request_that_the_ranks_have_not_followed_yet_can_be_withdrawn(
    pausing_of, store, printed
):
    write_control(store, "small", pause=True)
    pausing_of().resume()
    assert not read_control(store, "small").pause
    assert printed()[-1] == "small: training continues"


def test_a_run_that_is_not_paused_is_not_resumed(pausing_of, store, printed):
    pausing_of().resume()
    assert printed() == ["small: the run is not paused"]
    assert list(store.list(control_key("small"))) == []


def test_ranks_that_do_not_continue_are_a_failure(pausing_of, run, store):
    write_control(store, "small", pause=True)
    append(run, *seen(STANDS))
    with pytest.raises(PerdureError, match="still paused after 5 s"):
        pausing_of(wait_s=5.0).resume()


def test_without_a_supervisor_the_attempts_own_log_confirms(pausing_of, run, monkeypatch):
    monkeypatch.setattr(run, "observer", lambda: Observer("stands"))
    pausing_of().pause()


def test_a_run_that_ends_while_it_is_waited_for_is_not_waited_for_any_longer(pausing_of):
    with pytest.raises(InputError, match="is not running: completed"):
        pausing_of(ENDED).pause()


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_what_does_not_run_is_neither_paused_nor_resumed(command, run, capsys):
    append(run, ENDED)
    line = error_line(capsys, command, "small", code=2)
    assert line == "perdure: run_id: 'small' is not running: completed"
    assert "no such run" in error_line(capsys, command, "other", code=2)


def test_a_command_cannot_be_paused(document, perdure_home, capsys):
    job = parse_job({**document, "worker": {"command": ["true"]}})
    remember_job(perdure_home, job)
    append(RunHandle(job, home=perdure_home), *BEGINNING)
    assert "only a session can be paused" in error_line(capsys, "pause", "small", code=2)


def test_the_commands_wait_as_long_as_requested(run, store, capsys, monkeypatch):
    monkeypatch.setattr(pausing, "POLL_S", 0.0)
    assert "0 s" in error_line(capsys, "pause", "small", "--wait-s", "0", code=1, prints=True)
    append(run, *seen(STANDS))
    assert "0 s" in error_line(capsys, "resume", "small", "--wait-s", "0", code=1, prints=True)
    append(run, *seen(GOES_ON))
    done = CliRunner().invoke(app, ["resume", "small"])
    assert (done.exit_code, done.stdout) == (0, "small: the run is not paused\n")


def status(*arguments: str) -> str:
    return perdure("status", "small", *arguments)


def test_status_shows_that_a_run_is_paused_and_how_to_resume_it(run, store):
    assert json.loads(status("--json"))["state"] == "running"
    write_control(store, "small", pause=True)
    assert "a pause is requested; 'perdure resume small' continues it" in status()
    append(run, *seen(STANDS))
    reported = json.loads(status("--json"))
    assert (reported["state"], reported["pause_wanted"]) == ("paused", True)
    assert reported["pause"] == {"at_s": 20.0, "step": 20}
    assert "state: paused" in status()
    assert "paused at step 20; 'perdure resume small' continues it" in status()


def test_status_counts_recoveries_inside_the_processes_and_shows_the_last(run):
    assert "inside the processes" not in status()
    append(run, *seen(LINK_BEGAN, LINK_RECOVERED))
    line = "recoveries inside the processes: 1, the last: link_down -> step_retry: recovered"
    assert line in status()
    reported = json.loads(status("--json"))
    assert [one["rung"] for one in reported["recoveries"]] == ["step_retry"]
    assert len(reported["attempts"]) == 1, "an attempt is an attempt"
