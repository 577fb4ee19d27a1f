"""Every second of a run's wall time has one owner, whatever the records contain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptEventRecorded,
    AttemptStarted,
    DecisionMade,
    FirstStep,
    Member,
    PlacementCreated,
    RunCreated,
    RunEnded,
    RungFailed,
    SupervisorAcquired,
)
from perdure.training.journal.time_account import (
    MEANING,
    RECOVERY,
    Account,
    Owner,
    SeenStep,
    account_time,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded
from perdure.training.recovery.rungs import Decision, Rung
from tests.unit.journal.records import record


def done(step: int, at_s: float, step_s: float = 1.0, key: tuple[int, int] = (1, 1)) -> StepRecord:
    return replace(record(step, attempt=key), at_s=at_s, step_s=step_s)


def fault(at_s: float, step: int | None = None) -> Fault:
    return Fault(fault_class=FaultClass.NATIVE_CRASH, at_s=at_s, evidence="x", step=step)


class Story:
    """Writes the records of a run that is created at 100 s."""

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.steps: list[StepRecord] = []
        self.key = (1, 0)
        self.took(100.0)
        self._write(RunCreated, 100.0, job={"run_id": "run"})
        self.placed(103.0)

    def _write(self, build: type[AnyRecord], at_s: float, **fields: Any) -> None:
        self.records.append(build(at_s=at_s, epoch=1, **fields))

    def _write_of_attempt(self, build: type[AnyRecord], at_s: float, **fields: Any) -> None:
        placement, attempt = self.key
        self._write(build, at_s, placement=placement, attempt=attempt, **fields)

    def took(self, at_s: float) -> None:
        self._write(SupervisorAcquired, at_s, supervisor="a", host="h", pid=1)

    def placed(self, at_s: float, *, placement: int = 1, waited_s: float = 0.0) -> None:
        members = (Member(index=0, node="node-0", schedule_cnt=1),)
        self._write(
            PlacementCreated,
            at_s,
            placement=placement,
            members=members,
            avoid=(),
            waited_s=waited_s,
        )
        self.key = (placement, 0)

    def started(self, at_s: float, from_step: int = 0) -> None:
        self.key = (self.key[0], self.key[1] + 1)
        self._write_of_attempt(AttemptStarted, at_s, from_step=from_step)

    def trained(self, *steps: tuple[int, float], step_s: float = 1.0) -> None:
        """Steps and when they were completed."""
        if not any((interval.placement, interval.attempt) == self.key for interval in self.steps):
            step, at_s = steps[0]
            self._write_of_attempt(FirstStep, at_s, step=step, stepped_s=at_s)
        self.steps += [done(step, at_s, step_s, self.key) for step, at_s in steps]

    def failed(
        self, at_s: float, *, fault_s: float, noticed_s: float | None = None,
        stepped_s: float | None = None, rung: Rung | None = Rung.IN_PLACE_RESTART,
        to_step: int | None = None,
    ) -> None:  # fmt: skip
        self._ended(at_s, "failed", fault(fault_s), noticed_s, stepped_s, to_step)
        if rung is not None:
            self._write_of_attempt(
                DecisionMade, at_s, decision=Decision(rung, None, "native_crash")
            )

    def stopped(self, at_s: float) -> None:
        self._ended(at_s, "stopped", None, None, None)

    def beaten(self, step: int, at_s: float) -> None:
        """The first step of a command's attempt, by its heartbeats."""
        self._write_of_attempt(FirstStep, at_s, step=step, stepped_s=at_s)

    def completed(self, at_s: float, *, lived_s: float | None) -> None:
        self._ended(at_s, "completed", None, None, None, lived_s=lived_s)

    def _ended(
        self, at_s, outcome, fault, noticed_s, stepped_s, to_step=None, lived_s=None
    ) -> None:
        self._write_of_attempt(
            AttemptEnded, at_s, outcome=outcome, to_step=to_step, proc_start_cnt={}, fault=fault,
            duration_s=1.0, noticed_s=noticed_s, stepped_s=stepped_s, lived_s=lived_s,
        )  # fmt: skip

    def seen(self, event) -> None:
        self._write_of_attempt(AttemptEventRecorded, event.at_s, event=event)

    def ended(self, at_s: float, outcome: str = "completed") -> None:
        self._write(RunEnded, at_s, outcome=outcome, message="")

    @property
    def history(self) -> RunHistory:
        return replay(self.records)

    def account(self, now_s: float = 1e4, newest: SeenStep | None = None) -> Account:
        return account_time(self.history, self.steps, now_s=now_s, newest=newest)


def begun(*steps: tuple[int, float]) -> Story:
    """A run whose first attempt has started at 105 s and completed these steps."""
    story = Story()
    story.started(105.0)
    if steps:
        story.trained(*steps)
    return story


def spent(account: Account) -> dict[str, float]:
    return {owner: round(s, 6) for owner, s in account.seconds.items() if s}


def test_every_owner_is_explained_and_every_rung_has_one():
    assert set(MEANING) == {*Owner, *RECOVERY.values()}
    assert set(RECOVERY) == set(Rung)


def test_a_run_without_faults_is_start_up_steps_saves_and_ending():
    story = begun((1, 111.0), (2, 112.0), (3, 116.0), (4, 117.0))
    story.stopped(120.0)
    story.ended(121.0)
    accounted = story.account()
    assert spent(accounted) == {"productive_step": 4, "save_block": 3, "start_up": 10, "ending": 4}
    assert accounted.wall_s == 21
    assert accounted.ettr == pytest.approx(4 / 21)


def test_steps_without_a_record_are_those_that_were_lost():
    """Records are in the store up to step 2; the supervisor saw a step at 118 s."""
    story = begun((1, 111.0), (2, 112.0))
    story.failed(130.0, fault_s=118.5, noticed_s=120.0, stepped_s=118.0)
    story.started(132.0, from_step=2)
    story.trained((3, 141.0), (4, 142.0))
    story.stopped(142.0)
    story.ended(142.0)
    assert spent(story.account()) == {
        "start_up": 10,
        "productive_step": 4,
        "redone_step": 6 + 0.5,  # four steps and a bit, and one that the fault cut short
        "detection": 1.5,
        "recovery_in_place_restart": 20,
    }


def test_a_step_that_is_done_again_is_lost_the_first_time():
    story = begun((1, 111.0), (2, 112.0), (3, 113.0))
    story.failed(115.0, fault_s=114.0, noticed_s=114.0, stepped_s=113.0, rung=Rung.POD_RESCHEDULE)
    story.placed(120.0, placement=2, waited_s=4.0)
    story.started(121.0, from_step=1)
    story.trained((2, 125.0))
    story.stopped(125.0)
    story.ended(125.0)
    assert spent(story.account()) == {
        "start_up": 10,
        "productive_step": 2,
        "redone_step": 2,
        "detection": 1,
        "recovery_pod_reschedule": 6,
        "waiting_for_resources": 4,
    }


def test_a_hang_is_detection_from_the_last_step():
    story = begun((1, 111.0))
    story.failed(175.0, fault_s=171.0, noticed_s=171.0, stepped_s=111.0, rung=Rung.HANG_RESTART)
    accounted = story.account(now_s=180.0)
    assert spent(accounted)["detection"] == 60
    assert spent(accounted)["recovery_hang_restart"] == 9, "from the notice until now"


def replaced(number: int, noticed_s: float, over_s: float, *, step: int, lost: int = 0):
    began = RecoveryBegan(
        at_s=noticed_s, number=number, generation=number, fault=fault(noticed_s, step + lost),
        decision=Decision(Rung.PROCESS_REPLACE, None, "one died"),
    )  # fmt: skip
    ended = RecoveryEnded(
        at_s=over_s, number=number, generation=number + 1, succeeded=True, step=step,
        steps_lost=lost, duration_s=over_s - noticed_s,
    )  # fmt: skip
    return began, ended


def test_a_recovery_inside_the_processes_lies_between_two_steps():
    story = begun((1, 111.0))
    for event in replaced(1, 111.5, 114.0, step=1):
        story.seen(event)
    story.trained((2, 115.25))
    assert spent(story.account(now_s=116.0)) == {
        "start_up": 10, "productive_step": 2, "detection": 0.5, "recovery_process_replace": 2.75,
        "unknown": 0.75,
    }  # fmt: skip


def test_a_recovery_that_goes_back_loses_steps_with_and_without_records():
    story = begun((1, 111.0), (2, 112.0))
    for event in replaced(1, 114.5, 116.0, step=1, lost=3):
        story.seen(event)
    story.trained((2, 117.0))
    accounted = spent(story.account(now_s=117.0))
    assert accounted["productive_step"] == 2
    assert accounted["redone_step"] == 3, "one with a record, two without"
    assert accounted["detection"] == 0.5


def test_a_step_that_a_recovery_finishes_is_not_productive_all_the_while():
    story = begun((1, 111.0))
    for event in replaced(1, 117.0, 119.0, step=2):
        story.seen(event)
    story.steps.append(done(2, 120.0, step_s=9.0))
    accounted = spent(story.account(now_s=120.0))
    assert accounted["recovery_process_replace"] == 2
    assert accounted["detection"] == 1.0
    assert accounted["productive_step"] == 1 + 5 + 1


def test_a_pause_is_a_pause_and_lasts_until_now():
    story = begun((1, 111.0))
    story.seen(PauseBegan(at_s=112.0, number=1, step=1))
    assert spent(story.account(now_s=120.0))["paused"] == 8
    story.seen(PauseEnded(at_s=121.0, number=1, step=1))
    story.trained((2, 123.0))
    assert spent(story.account(now_s=123.0))["paused"] == 9


def test_the_time_after_the_end_of_a_run_that_is_taken_up_again_is_unsupervised():
    story = begun((1, 111.0))
    story.stopped(112.0)
    story.ended(113.0, "cancelled")
    story.took(500.0)
    story.started(502.0, from_step=1)
    story.trained((2, 510.0))
    assert spent(story.account(now_s=510.0)) == {
        "start_up": 10 + 9, "productive_step": 2, "ending": 2, "unsupervised": 387,
    }  # fmt: skip


def test_what_trained_on_without_a_supervisor_is_not_unsupervised():
    story = begun(*((step, 110.0 + step) for step in range(1, 31)))
    story.took(140.0)
    accounted = spent(story.account(now_s=140.0))
    assert "unsupervised" not in accounted
    story.took(180.0)
    story.trained((31, 181.0))
    assert story.account(now_s=181.0).seconds[Owner.UNSUPERVISED] == 0


def test_an_attempt_that_never_came_to_a_step_is_start_up_and_then_recovery():
    story = begun()
    story.failed(108.0, fault_s=106.0, noticed_s=107.0)
    story.started(109.0)
    story.trained((1, 116.0))
    assert spent(story.account(now_s=116.0)) == {
        "start_up": 6, "detection": 1, "recovery_in_place_restart": 8, "productive_step": 1,
    }  # fmt: skip


def test_a_command_is_not_counted_as_productive():
    story = Story()
    created = RunCreated(at_s=100.0, epoch=1, job={"worker": {"command": ["torchrun"]}})
    story.records[1] = created
    story.started(105.0)
    assert spent(story.account(now_s=120.0)) == {"start_up": 5, "command": 15}


def adopted_command() -> Story:
    """A command that started at 105 s, whose supervisor was last seen then, and at 150 s again."""
    story = Story()
    story.records[1] = RunCreated(at_s=100.0, epoch=1, job={"worker": {"command": ["torchrun"]}})
    story.started(105.0)
    story.took(150.0)
    return story


def test_a_command_that_ran_on_without_a_supervisor_is_not_unsupervised():
    story = adopted_command()
    assert spent(story.account(now_s=160.0)) == {"start_up": 5, "command": 55}
    story.completed(170.0, lived_s=169.0)
    assert spent(story.account(now_s=170.0)) == {"start_up": 5, "command": 65}


def test_a_command_that_ended_without_a_supervisor_is_unsupervised_since_then():
    story = adopted_command()
    story.completed(151.0, lived_s=130.0)
    assert spent(story.account(now_s=151.0)) == {"start_up": 5, "command": 26, "unsupervised": 20}
    lost = adopted_command()
    lost.failed(152.0, fault_s=151.0)
    assert spent(lost.account(now_s=152.0))["unsupervised"] == 45, "its end is not known"


def test_an_empty_ledger_has_no_wall_time():
    nothing = account_time(RunHistory(), [], now_s=5.0)
    assert (nothing.wall_s, nothing.ettr) == (0, 0)


TIMES = st.floats(min_value=50.0, max_value=400.0, allow_nan=False)


def note_something(draw, story: Story, at_s: float) -> None:
    number = len(story.records)
    if draw(st.booleans()):
        events = replaced(
            number, at_s, draw(TIMES), step=draw(st.integers(0, 30)), lost=draw(st.integers(0, 5))
        )
        for event in events[: draw(st.integers(1, 2))]:
            story.seen(event)
        return
    story.seen(PauseBegan(at_s=at_s, number=number, step=1))
    if draw(st.booleans()):
        story.seen(PauseEnded(at_s=draw(TIMES), number=number, step=1))


def find_no_node(draw, story: Story, at_s: float) -> None:
    placement, attempt = story.key
    story.records.append(
        RungFailed(
            at_s=at_s, epoch=1, placement=placement, attempt=attempt, rung=Rung.POD_RESCHEDULE,
            why="none free", waited_s=draw(st.floats(0, 60)),
        )
    )  # fmt: skip
    story.placed(at_s, placement=placement + 1, waited_s=draw(st.floats(0, 60)))


def train(draw, story: Story) -> None:
    steps = draw(st.lists(st.tuples(st.integers(1, 30), TIMES), min_size=1, max_size=6))
    story.trained(*steps, step_s=draw(st.floats(0.0, 50.0)))


def fail(draw, story: Story, at_s: float) -> None:
    story.failed(
        at_s, fault_s=draw(TIMES), noticed_s=draw(st.none() | TIMES),
        stepped_s=draw(st.none() | TIMES), rung=draw(st.none() | st.sampled_from(Rung)),
    )  # fmt: skip


@st.composite
def stories(draw) -> Story:
    """Any records, in any order of times: clocks differ, events come late, files are lost."""
    story = Story()
    for move in draw(st.lists(st.integers(0, 7), max_size=40)):
        at_s = draw(TIMES)
        if move == 0 or story.key[1] == 0:
            story.started(at_s, from_step=draw(st.integers(0, 20)))
        elif move in {1, 2, 3}:
            train(draw, story)
        elif move == 4:
            fail(draw, story, at_s)
        elif move == 5:
            note_something(draw, story, at_s)
        elif move == 6:
            story.took(at_s)
        else:
            find_no_node(draw, story, at_s)
    if draw(st.booleans()):
        story.ended(draw(TIMES), draw(st.sampled_from(["completed", "failed", "cancelled"])))
    return story


@given(story=stories(), now_s=TIMES)
def test_the_owners_add_up_to_the_wall_time(story, now_s):
    accounted = story.account(now_s=now_s)
    history = story.history
    to_s = history.ended.at_s if history.ended is not None else now_s
    wall_s = max(0.0, to_s - history.created_s)
    seconds = accounted.seconds
    assert all(s >= 0 for s in seconds.values())
    assert math.fsum(seconds.values()) == pytest.approx(wall_s, abs=1e-6)
    assert accounted.wall_s == pytest.approx(wall_s, abs=1e-9)
    assert all(interval.from_s < interval.to_s for interval in accounted.intervals)
    assert all(interval.to_s == other.from_s for interval, other in pairwise(accounted.intervals))
    if wall_s > 0:
        assert accounted.ettr == pytest.approx(seconds[Owner.PRODUCTIVE] / wall_s)
        assert 0.0 <= accounted.ettr <= 1.0


def of_command() -> Story:
    """A command whose heartbeats show that it came to step 20, and went on from step 10."""
    story = Story()
    story.records[1] = RunCreated(at_s=100.0, epoch=1, job={"worker": {"command": ["true"]}})
    story.started(105.0)
    story.beaten(1, 110.0)
    story.failed(131.0, fault_s=130.0, stepped_s=129.0, to_step=20)
    story.started(132.0)
    story.beaten(11, 140.0)
    return story


def test_the_steps_of_a_command_that_were_kept_are_productive_where_heartbeats_show_them():
    newest = SeenStep(21, 150.0)
    account = of_command().account(now_s=152.0, newest=newest)
    kept_s = 9.0  # to step 10: 9 of the 19 steps from 110 s to 129 s
    assert spent(account)[Owner.PRODUCTIVE] == pytest.approx(kept_s + 10.0)
    assert spent(account)[Owner.REDONE] == pytest.approx(19.0 - kept_s)
    assert spent(account)[Owner.COMMAND] == pytest.approx(2.0), "since the newest step"
    assert account.known_ettr == pytest.approx(19.0 / 52.0)


def test_records_of_a_command_show_its_newest_step_and_no_time_of_single_steps():
    story = of_command()
    story.steps = [done(step, 120.0 + step, 0.1, story.key) for step in (11, 21, 30)]
    account = story.account(now_s=152.0)
    assert spent(account)[Owner.PRODUCTIVE] == pytest.approx(9.0 + 10.0)
    assert spent(account)[Owner.COMMAND] == pytest.approx(2.0), "since the newest step"


def test_without_any_step_the_ettr_of_a_command_is_not_known_and_that_of_a_session_is_zero():
    story = of_command()
    story.records = story.records[:4]
    assert story.account(now_s=150.0).known_ettr is None
    assert begun().account(now_s=150.0).known_ettr == 0.0
