"""What a coordinator noted reaches the ledger, the ladder, the next attempt and observers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.storage.local import LocalStore
from perdure.training.config.engine import WorkerSpec
from perdure.training.journal.attempt_view import CUT_OFF
from perdure.training.journal.events import LedgerEvent
from perdure.training.recovery.protocol import RecoveryEnded
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.starting import MAX_PAST
from perdure.training.wire.requests import read_control, write_control
from tests.unit.journal.histories import GOES_ON, LINK, STANDS, began, ended
from tests.unit.supervisor.cluster import Cluster, ClusterRun, supervise

BEGAN = began(1)
FAILED = ended(1, None, succeeded=False, why="no replica")


def lines(*events: LedgerEvent) -> str:
    return "".join(event.model_dump_json() + "\n" for event in events)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(["crash", "done"])


@pytest.fixture
def supervisor(job, tmp_path, cluster, without_waits):
    """Makes a supervisor of the same run."""

    def make() -> ClusterRun:
        run = ClusterRun(job, home=tmp_path)
        run.cluster = cluster
        return run

    return make


def begin(run: ClusterRun) -> None:
    """A supervisor that dies as soon as the first attempt's processes run."""
    run.take()

    def die(_progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.attempt(run.place(), data_manifest_key=None, stop_wanted=lambda: False, on_progress=die)
    run.ledger.release()


def kinds_on_record(run: ClusterRun) -> list[str]:
    """The kinds of the ledger's records, events by their own."""
    run.refresh()
    records = run.ledger._records
    return [record.event.kind if record.kind == "event" else record.kind for record in records]


def test_the_last_notes_are_on_record_before_the_ladder_is_asked(supervisor, cluster):
    cluster.live[1, 1] = lines(BEGAN, FAILED)
    run = supervisor()
    supervise(run)
    kinds = kinds_on_record(run)
    assert kinds.index("recovery_ended") < kinds.index("attempt_ended") < kinds.index("decided")
    first = run.history.attempts[0].recoveries[0]
    assert (first.began, first.ended) == (BEGAN, FAILED)


def test_a_supervisor_that_takes_over_records_what_it_reads_again_only_once(supervisor, cluster):
    begin(supervisor())
    cluster.live[1, 1] = lines(BEGAN, STANDS)
    begin(supervisor())
    cluster.live[1, 1] += lines(GOES_ON)
    run = supervisor()
    reported: list[LedgerEvent] = []
    supervise(run, lambda progress: reported.extend(progress.events))
    *events, end = run.history.attempts[0].events
    assert events == [BEGAN, STANDS, GOES_ON]
    assert isinstance(end, RecoveryEnded), "of the recovery that the attempt's end has cut off"
    assert end.why.startswith(CUT_OFF)
    assert reported == [GOES_ON], "and gets only what is new"


def test_the_same_numbers_in_a_later_attempt_are_other_notes(supervisor, cluster):
    cluster.live[1, 1] = cluster.live[1, 2] = lines(STANDS, GOES_ON)
    run = supervisor()
    supervise(run)
    assert [len(view.pauses) for view in run.history.attempts] == [1, 1]


def test_a_line_that_cannot_be_read_ends_no_supervision(supervisor, cluster):
    cluster.live[1, 1] = '{"kind": "step", "lo\n\x00\n{"kind": "news"}\n' + lines(STANDS)
    run = supervisor()
    supervise(run)
    assert run.refresh().ended_well
    assert list(run.history.attempts[0].events) == [STANDS]


def test_the_next_attempt_receives_the_recoveries_before_it(supervisor, cluster):
    cluster.live[1, 1] = lines(BEGAN, FAILED)
    supervise(supervisor())
    reported = [
        [(record.rung.value, record.failed) for record in order.past] for order in cluster.orders
    ]
    assert reported == [[], [("step_retry", True), ("in_place_restart", False)]]


def test_of_many_recoveries_the_next_attempt_gets_the_newest_oldest_first(supervisor, cluster):
    began = [
        BEGAN.model_copy(update={"number": at, "fault": replace(LINK, at_s=float(at))})
        for at in range(1, MAX_PAST + 10)
    ]
    pairs = [(record, FAILED.model_copy(update={"number": record.number})) for record in began]
    cluster.live[1, 1] = lines(*(event for pair in pairs for event in pair))
    supervise(supervisor())
    *links, restart = cluster.orders[1].past
    assert [record.fault.at_s for record in links] == [float(at) for at in range(11, MAX_PAST + 10)]
    assert restart.rung is Rung.IN_PLACE_RESTART


def test_the_end_of_a_run_withdraws_a_pause_request(supervisor, job, tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "store")
    write_control(store, job.run_id, pause=True)
    run = supervisor()
    requested_while_alive: list[bool] = []
    run.take()
    monkeypatch.setattr(
        run.fleet,
        "cancel",
        lambda _grace_s: requested_while_alive.append(read_control(store, job.run_id).pause),
    )
    run.end("cancelled", "test")
    assert requested_while_alive == [True], "or its processes would train on for a moment"
    assert not read_control(store, job.run_id).pause


def test_an_observer_sees_a_pause_that_is_not_on_record_yet(supervisor, cluster):
    begin(supervisor())
    run = supervisor()
    observer, view = run.observer(), run.history.open_attempt
    cluster.written.add((1, 1))
    assert observer.pause(view) is None
    cluster.live[1, 1] = lines(STANDS)
    assert observer.pause(view).began == STANDS
    cluster.live[1, 1] += lines(GOES_ON)
    assert observer.pause(view) is None


def test_an_observer_believes_the_ledger_where_the_live_file_is_out_of_reach(supervisor, cluster):
    begin(supervisor())
    cluster.written.add((1, 1))
    cluster.live[1, 1] = lines(STANDS)
    begin(supervisor())
    run = supervisor()
    observer = run.observer()
    cluster.lost.update({"node-0", "node-1"})
    assert observer.pause(run.history.open_attempt).began == STANDS


def test_an_observer_neither_takes_nor_records_anything(supervisor, cluster):
    begin(supervisor())
    recorded = kinds_on_record(supervisor())
    cluster.live[1, 1] = lines(STANDS)
    run = supervisor()
    run.observer().pause(run.history.open_attempt)
    assert kinds_on_record(supervisor()) == recorded


def test_there_is_nothing_to_look_at_where_no_attempt_lives(supervisor, cluster):
    assert supervisor().observer() is None
    run = supervisor()
    supervise(run)
    assert run.observer() is None


def test_workers_receive_the_failure_rate_that_the_run_has_shown(
    job, tmp_path, cluster, without_waits
):
    expecting = job.checkpoint.model_copy(update={"mtbf_s": 1000.0})
    cluster.live[1, 1] = lines(BEGAN, FAILED)
    run = ClusterRun(job.model_copy(update={"checkpoint": expecting}), home=tmp_path)
    run.cluster = cluster
    supervise(run)
    reported = [order.job.checkpoint.mtbf_s for order in cluster.orders]
    assert reported[0] == 1000.0
    assert reported[1] == pytest.approx(500.0, abs=100.0), "one failure in no time at all"
    assert run.history.job is not None
    assert run.history.job["checkpoint"]["mtbf_s"] == 1000.0, "the job stays what it was"


RACKS = {"node-0": "r1", "node-1": "r2"}


@pytest.mark.parametrize(
    ("section", "racks", "expected"),
    [
        ({"partner_copies": 1}, RACKS, RACKS),
        ({"partner_copies": 1, "failure_domains": {"node-0": "a"}}, RACKS, {"node-0": "a"}),
        ({"partner_copies": 0}, RACKS, {}),
        # No node would have a partner.
        ({"partner_copies": 1}, {"node-0": "r1", "node-1": "r1"}, {}),
        ({"partner_copies": 1}, {"node-0": "r1", "node-1": "r1", "node-2": "r2"}, {}),
        ({"partner_copies": 1}, {"node-0": "r1"}, {"node-0": "r1"}),
        ({"partner_copies": 1}, {}, {}),
    ],
)
def test_workers_receive_the_failure_domains_that_the_platform_shows(
    job, tmp_path, cluster, without_waits, section, racks, expected
):
    cluster.domains = racks
    copying = job.checkpoint.model_copy(update=section)
    session = {"worker": WorkerSpec(recipe="a:b"), "checkpoint": copying}
    run = ClusterRun(job.model_copy(update=session), home=tmp_path)
    run.cluster = cluster
    supervise(run)
    assert cluster.orders[0].job.checkpoint.failure_domains == expected
