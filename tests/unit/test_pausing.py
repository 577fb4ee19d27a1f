"""`perdure pause`, `resume` and what `status` says of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from perdure import pausing
from perdure.cli import app, main
from perdure.pausing import Pausing
from storage.local import LocalStore
from tests.unit.histories import BEGINNING, GOES_ON, LINK_BEGAN, LINK_MENDED, NOW, STANDS, seen
from training.errors import InputError, PerdureError
from training.job import parse_job
from training.journal.records import RECORD, RunEnded
from training.supervisor.job_registry import remember_job
from training.supervisor.run import Run
from training.wire.requests import control_key, read_control, write_control


@pytest.fixture
def document(tmp_path):
    return {
        "run_id": "small",
        "storage": {"address": f"file://{tmp_path}/store"},
        "data": {"sources": ["/corpus"]},
    }


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def run(document, perdure_home):
    """A run that was started on this machine and is training."""
    job = parse_job(document)
    remember_job(perdure_home, job)
    made = Run(job, home=perdure_home)
    append(made, *BEGINNING)
    return made


def append(run, *records) -> None:
    """Put records into a run's ledger, as its supervisor would."""
    taken = len(list(run.store.list(f"runs/{run.job.run_id}/ledger/")))
    for number, record in enumerate(records, taken):
        key = f"runs/{run.job.run_id}/ledger/{number:08d}.json"
        run.store.put(key, RECORD.dump_json(record))


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
def said():
    return []


@pytest.fixture
def asking(run, said):
    """Somebody who asks the run to pause or resume while things happen to it."""

    def make(*then, wait_s: float = 60.0) -> Pausing:
        ranks = Ranks(run, *then)
        return Pausing(run, wait_s=wait_s, say=said.append, clock=ranks.clock, sleep=ranks.sleep)

    return make


def test_a_pause_is_a_wish_in_the_store_and_over_when_the_ranks_stand(asking, store, said):
    asking(*seen(STANDS)).pause()
    assert read_control(store, "small").pause
    assert said == [
        "small: waiting until every rank stands at a step boundary",
        "small: paused; `perdure resume small` has it go on",
    ]


def test_a_pause_that_nobody_confirms_is_a_failure_and_the_wish_remains(asking, store):
    with pytest.raises(PerdureError, match=r"not seen to pause within 60 s.*perdure resume small"):
        asking().pause()
    assert read_control(store, "small").pause


def test_a_run_that_is_paused_already_stays_so(asking, run, said):
    append(run, *seen(STANDS))
    asking().pause()
    assert said[-1].startswith("small: paused")


class Eyes:
    """An observer that sees one thing after the other."""

    def __init__(self, *sights) -> None:
        self.sights = list(sights)

    def pause(self, view):
        return self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]


def test_a_pause_that_is_over_and_was_never_recorded_as_such_confirms_nothing(
    asking, run, monkeypatch
):
    append(run, *seen(STANDS))  # its end came when nobody supervised
    monkeypatch.setattr(run, "observer", lambda: Eyes(None))
    with pytest.raises(PerdureError, match="not seen to pause"):
        asking().pause()


def test_a_pause_that_was_never_recorded_is_not_taken_for_over(asking, run, store, monkeypatch):
    write_control(store, "small", pause=True)
    monkeypatch.setattr(run, "observer", lambda: Eyes("stands", "stands", None))
    asking().resume()
    monkeypatch.setattr(run, "observer", lambda: Eyes("stands"))
    write_control(store, "small", pause=True)
    with pytest.raises(PerdureError, match="not seen to go on"):
        asking().resume()


def test_resuming_takes_the_wish_back_and_is_over_when_the_ranks_go_on(asking, run, store, said):
    write_control(store, "small", pause=True)
    append(run, *seen(STANDS))
    asking(*seen(GOES_ON)).resume()
    assert not read_control(store, "small").pause
    assert said == ["small: waiting until the ranks go on", "small: goes on"]


def test_a_wish_that_the_ranks_have_not_heeded_yet_can_be_taken_back(asking, store, said):
    write_control(store, "small", pause=True)
    asking().resume()
    assert not read_control(store, "small").pause
    assert said[-1] == "small: goes on"


def test_a_run_that_is_not_paused_is_not_resumed(asking, store, said):
    asking().resume()
    assert said == ["small: is not paused"]
    assert list(store.list(control_key("small"))) == []


def test_ranks_that_do_not_go_on_are_a_failure(asking, run, store):
    write_control(store, "small", pause=True)
    append(run, *seen(STANDS))
    with pytest.raises(PerdureError, match="not seen to go on within 5 s"):
        asking(wait_s=5.0).resume()


def test_without_a_supervisor_the_attempts_own_file_confirms(asking, run, monkeypatch):
    monkeypatch.setattr(run, "observer", lambda: Eyes("stands"))
    asking().pause()


def test_a_run_that_ends_while_it_is_waited_for_is_not_waited_for_any_longer(asking):
    with pytest.raises(InputError, match="is not running: completed"):
        asking(ENDED).pause()


@pytest.fixture
def failing(capsys):
    def fail(*arguments: str, code: int) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err.strip()

    return fail


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_what_does_not_run_is_neither_paused_nor_resumed(command, run, failing):
    append(run, ENDED)
    line = failing(command, "small", code=2)
    assert line == "perdure: run_id: 'small': is not running: completed"
    assert "no such run" in failing(command, "other", code=2)


def test_a_command_cannot_be_paused(document, perdure_home, failing):
    job = parse_job({**document, "worker": {"command": ["true"]}})
    remember_job(perdure_home, job)
    append(Run(job, home=perdure_home), *BEGINNING)
    assert "only a session can be paused" in failing("pause", "small", code=2)


def test_the_commands_wait_as_long_as_they_are_told(run, store, failing, monkeypatch):
    monkeypatch.setattr(pausing, "POLL_S", 0.0)
    assert "within 0 s" in failing("pause", "small", "--wait-s", "0", code=1)
    append(run, *seen(STANDS))
    assert "within 0 s" in failing("resume", "small", "--wait-s", "0", code=1)
    append(run, *seen(GOES_ON))
    done = CliRunner().invoke(app, ["resume", "small"])
    assert (done.exit_code, done.stdout) == (0, "small: is not paused\n")


def status(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["status", "small", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_status_says_that_a_run_is_paused_and_how_it_goes_on(run, store):
    assert json.loads(status("--json"))["state"] == "running"
    write_control(store, "small", pause=True)
    assert "asked to pause; `perdure resume small` has it go on" in status()
    append(run, *seen(STANDS))
    told = json.loads(status("--json"))
    assert (told["state"], told["pause_wanted"]) == ("paused", True)
    assert told["pause"] == {"at_s": 20.0, "step": 20}
    assert "state: paused" in status()
    assert "paused at step 20; `perdure resume small` has it go on" in status()


def test_status_counts_recoveries_inside_the_processes_and_shows_the_last(run):
    assert "inside the processes" not in status()
    append(run, *seen(LINK_BEGAN, LINK_MENDED))
    line = "recoveries inside the processes: 1, the last: link_down -> step_retry: mended"
    assert line in status()
    told = json.loads(status("--json"))
    assert [one["rung"] for one in told["recoveries"]] == ["step_retry"]
    assert len(told["attempts"]) == 1, "an attempt is an attempt"
