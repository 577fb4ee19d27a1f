"""Waiting for room where a platform chooses nodes: one rule, one record, nothing given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import pytest

from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.engines.base import Placement
from perdure.training.errors import EngineError, ImageUnavailable, NoCapacity, StopRequested
from perdure.training.journal.records import (
    AttemptStarted,
    NodeReleased,
    PlacementCreated,
    RungFailed,
)
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.recovery.faults import POD_PREEMPTED, Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor import placing, room
from perdure.training.supervisor.room import RoomWait
from tests.unit.journal.histories import CRASH_BEGAN, LINK_BEGAN, LINK_RECOVERED
from tests.unit.supervisor.cluster import Cluster, FakeFleet, ScheduledRun
from tests.unit.supervisor.test_isolation import fail

FULL = NoCapacity("0/6 nodes are available: 6 Insufficient huawei.com/Ascend910")


@pytest.fixture
def run(job, tmp_path, monkeypatch) -> ScheduledRun:
    for module, name in ((placing, "SPARE_POLL_S"), (placing, "LONGEST_POLL_S")):
        monkeypatch.setattr(module, name, 0.0)
    restart = job.restart.model_copy(update={"spare_wait_s": None})
    run = ScheduledRun(job.model_copy(update={"restart": restart}), home=tmp_path / "home")
    run.cluster = Cluster(["done"])
    run.take()
    return run


@pytest.fixture
def calls(monkeypatch) -> Callable[..., list[tuple[str, frozenset[int]]]]:
    """Has calls of the fleet recorded, and its first ones fail."""

    def calls(error: EngineError, times: int) -> list[tuple[str, frozenset[int]]]:
        made: list[tuple[str, frozenset[int]]] = []
        replace, submit = FakeFleet.replace, FakeFleet.submit

        def note(name: str, members: Collection[int]) -> None:
            made.append((name, frozenset(members)))
            if len(made) <= times:
                raise error

        def replaced(fleet: FakeFleet, placement: Placement, members: Collection[int]) -> None:
            note("replace", members)
            replace(fleet, placement, members)

        def submitted(fleet: FakeFleet, placement: Placement) -> None:
            note("submit", [member.index for member in placement.members])
            submit(fleet, placement)

        monkeypatch.setattr(FakeFleet, "replace", replaced)
        monkeypatch.setattr(FakeFleet, "submit", submitted)
        return made

    return calls


def placed(run: ScheduledRun) -> list[tuple[int, bool]]:
    records = run.ledger._records
    return [(r.placement, r.waited_s > 0) for r in records if isinstance(r, PlacementCreated)]


@pytest.mark.parametrize("times", [0, 1, 40])
@pytest.mark.parametrize("lost", [0, 1])
def test_healthy_members_keep_their_containers_while_another_waits_for_room(
    run, calls, times, lost
):
    fail(run, Rung.JOB_RESCHEDULE)
    run.cluster.deleted.add(lost)
    stays = run.cluster.members[1 - lost]
    made = calls(FULL, times)
    recorded = len(placed(run))
    waits: list[Wait | None] = []

    def on_wait(wait: Wait | None) -> None:
        waits.append(wait)
        assert wait is None or run.cluster.members[1 - lost] == stays

    run.on_wait = on_wait
    run.place()
    one, other = frozenset({lost}), frozenset({1 - lost})
    assert made == [("replace", one)] * (times + 1) + [("replace", other)]
    assert [r for r in run.ledger._records if isinstance(r, RungFailed)] == []
    assert len(placed(run)) - recorded <= 2
    kinds = [wait.kind if wait else None for wait in waits]
    assert kinds == [WaitKind.NODE] * times + [None] * (times > 0)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_after_a_preemption_all_containers_are_given_back_and_all_wait(run, calls, times):
    fail(run, Rung.JOB_RESCHEDULE, fault_class=FaultClass.PREEMPTED, code=POD_PREEMPTED)
    run.cluster.deleted.add(1)
    made = calls(FULL, times)
    run.place()
    assert made == [("submit", frozenset({0, 1}))] * (times + 1)
    assert [r for r in run.ledger._records if isinstance(r, RungFailed)] == [], "no budget is used"


def test_containers_that_a_preempted_run_already_has_back_are_kept(run, calls, monkeypatch):
    fail(run, Rung.JOB_RESCHEDULE, fault_class=FaultClass.PREEMPTED, code=POD_PREEMPTED)
    submit = FakeFleet.submit

    def half(fleet: FakeFleet, placement: Placement) -> None:
        if len(made) > 1:
            pytest.fail("the container of member 0 was given back")
        submit(fleet, placement)
        del run.cluster.members[1]  # it has no node yet
        raise FULL

    monkeypatch.setattr(FakeFleet, "submit", half)
    made = calls(FULL, 0)
    run.place()
    assert made == [("submit", frozenset({0, 1})), ("replace", frozenset({1}))]


@pytest.mark.parametrize("code", [None, "SIGTERM", "TERMINATED"])
def test_an_end_by_a_signal_leaves_healthy_members_their_containers(run, calls, code):
    fail(run, Rung.JOB_RESCHEDULE, fault_class=FaultClass.PREEMPTED, code=code)
    run.cluster.deleted.add(1)
    made = calls(FULL, 1)
    run.place()
    assert made == [("replace", frozenset({1}))] * 2 + [("replace", frozenset({0}))]


def test_a_job_whose_members_are_all_there_or_all_gone_is_placed_at_once(run, calls):
    for gone in ((), (0, 1)):
        fail(run, Rung.JOB_RESCHEDULE)
        run.cluster.deleted.update(gone)
        made = calls(FULL, 0)
        run.place()
        assert made == [("submit", frozenset({0, 1}))]


@pytest.mark.parametrize("times", [1, 3])
def test_a_first_placement_waits_in_the_queue_as_well(run, calls, times):
    made = calls(FULL, times)
    run.place()
    assert len(made) == times + 1
    assert [number for number, _ in placed(run)] == [1, 1]


def test_a_first_placement_whose_image_is_wrong_is_told_at_once(run, calls):
    calls(ImageUnavailable("perdure:typo: not found"), 1)
    with pytest.raises(EngineError, match="typo"):
        run.place()


@pytest.mark.parametrize("times", [1, 5])
def test_an_image_that_cannot_be_pulled_any_more_is_waited_for(run, calls, times, monkeypatch):
    monkeypatch.setattr(placing, "LONGEST_PAUSE_S", 0.0)
    fail(run, Rung.JOB_RESCHEDULE)
    made = calls(ImageUnavailable("the registry does not answer"), times)
    waits: list[Wait | None] = []
    run.on_wait = waits.append
    run.place()
    assert len(made) == times + 1
    assert waits[0] is not None
    assert waits[0].kind is WaitKind.PLATFORM
    assert [r for r in run.ledger._records if isinstance(r, RungFailed)] == []


def test_the_next_supervisor_waits_on_and_healthy_members_keep_their_containers(run, calls):
    fail(run, Rung.JOB_RESCHEDULE)
    run.cluster.deleted.add(1)
    stays = run.cluster.members[0]
    made = calls(FULL, 3)
    run.on_wait = lambda wait: pytest.fail("lost") if wait and len(made) == 2 else None
    with pytest.raises(pytest.fail.Exception, match="lost"):
        run.place()
    run.leave()
    second = ScheduledRun(run.job, home=run.home)
    second.cluster = run.cluster
    second.take()
    second.on_wait = lambda wait: (
        pytest.fail("moved") if (wait and run.cluster.members[0] != stays) else None
    )
    second.place()
    one, other = frozenset({1}), frozenset({0})
    assert made == [("replace", one)] * 4 + [("replace", other)]
    assert [number for number, _ in placed(second)] == [1, 1, 2, 2]


def test_a_chosen_limit_ends_the_wait(run, calls):
    run.job = run.job.model_copy(
        update={"restart": run.job.restart.model_copy(update={"spare_wait_s": 0.0})}
    )
    fail(run, Rung.POD_RESCHEDULE)
    run.cluster.deleted.add(1)
    calls(FULL, 1)
    run.place()
    (failed,) = [r for r in run.ledger._records if isinstance(r, RungFailed)]
    assert failed.why == str(FULL)


@pytest.mark.parametrize(
    ("rung", "usable", "may", "limit_s"),
    [
        (Rung.JOB_RESCHEDULE_ISOLATED, None, True, None),
        (Rung.JOB_RESCHEDULE_ISOLATED, ["k0"], True, 60.0),
        (Rung.POD_RESCHEDULE, ["k0"], True, 60.0),
        (Rung.POD_RESCHEDULE, ["k0"], False, None),
        (Rung.POD_RESCHEDULE, ["k0", "k1", "k2"], True, None),
        (Rung.JOB_RESCHEDULE, ["k0"], True, None),
    ],
    ids=str,
)
def test_a_wait_has_no_limit_unless_the_job_may_go_back_to_isolated_nodes(
    run, rung, usable, may, limit_s
):
    run.job = run.job.model_copy(
        update={"restart": run.job.restart.model_copy(update={"allow_without_isolation": may})}
    )
    run.fleet.usable = frozenset(usable) if usable is not None else None
    assert run._placer._room_limit_s(rung) == limit_s


def test_a_node_that_is_released_ends_the_wait_of_pods_that_avoid_it(run, monkeypatch):
    monkeypatch.setattr(room, "LONGEST_POLL_S", 0.0)
    fail(run, Rung.JOB_RESCHEDULE_ISOLATED, isolate=run.place().members[0].node)
    submitted: list[tuple[str, ...]] = []

    def pending(_fleet: FakeFleet, placement: Placement, *_: object) -> None:
        submitted.append(placement.avoid)
        if placement.avoid:
            run.ledger.append(NodeReleased, node=placement.avoid[0])
            placement.on_pending("Pending", is_room=True)

    monkeypatch.setattr(FakeFleet, "submit", pending)
    monkeypatch.setattr(FakeFleet, "replace", pending)
    run.place()
    assert [bool(avoid) for avoid in submitted][:2] == [True, False]


def test_a_stop_ends_the_wait_of_pending_pods():
    waits: list[Wait | None] = []
    pending = RoomWait(lambda: None, on_wait=waits.append, stop_wanted=lambda: len(waits) > 1)
    pending.note_pending("full", is_room=True)
    pending.note_pending("full", is_room=False)
    with pytest.raises(StopRequested):
        pending.note_pending("full", is_room=True)
    assert [wait.kind for wait in waits if wait] == [WaitKind.NODE, WaitKind.PLATFORM]
    assert pending.waited_s > 0


@pytest.mark.parametrize(("is_room", "is_strict", "ends"), [
    (True, False, True), (True, True, True), (False, False, False), (False, True, True),
])  # fmt: skip
def test_a_limit_is_that_of_room_and_with_survivors_of_whatever_keeps_a_pod_from_starting(
    is_room, is_strict, ends
):
    wait = RoomWait(lambda: 0.0, is_strict=is_strict)
    time.sleep(0.001)
    if ends:
        with pytest.raises(NoCapacity, match="why"):
            wait.note("why", is_room=is_room)
    else:
        wait.note("why", is_room=is_room)
    assert wait.is_over is ends


def test_a_recovery_that_the_end_of_its_attempt_cuts_short_has_its_end_on_record(run):
    at = {"placement": run.place().number, "attempt": 1}
    run.ledger.append(AttemptStarted, **at, from_step=0)
    view = run.refresh().attempts[-1]
    run._writer.record_events(view, [LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN])
    lost = Fault(FaultClass.NODE_LOST, 5.0, "the agent of k1 is gone", node="k1")
    run._writer.end_attempt(view, "failed", to_step=4, diagnosis=Diagnosis(lost))
    link, crash = run.refresh().attempts[-1].recoveries
    assert (link.ended, crash.succeeded) == (LINK_RECOVERED, False)
    assert crash.ended is not None
    assert crash.ended.why == "the attempt ended before it: node_lost at k1"


def test_readers_elsewhere_learn_of_a_wait_from_the_lease(run):
    wait = Wait(kind=WaitKind.NODE, since_s=7.0, why="0/3 nodes are available")
    for shown in (wait, None):
        run.note_wait(shown)
        run.ledger.renew()
        lease = run.ledger.lease()
        assert lease is not None
        assert lease.wait == shown
    text = run.store.get(f"runs/{run.job.run_id}/supervisor.json").decode()
    assert "wait" not in text, "an older version knows no such field"
