"""A lost node costs the step in flight: the processes of the other nodes live on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.job import drill_job, write_corpus
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import assert_as_undisturbed, faulty_job
from tests.waiting import wait_for

DDP, HSDP, FSDP2 = ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2
STEPS = 40
AT_STEP = 12
PACE_S = 0.1
LIMIT_S = 240.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@dataclass
class Loss:
    """Nodes that lose their power, one after the other, each when its time has come.

    Attributes:
        local: processes of the run.
        nodes: with what has to be seen before, of the run's looks at it.
        hit: pids that were hit, by node.
    """

    local: LocalRun
    nodes: list[tuple[str, Callable[[Progress], bool]]]
    hit: dict[str, list[int]] = field(default_factory=dict)

    def look(self, _run: RunSupervisor, progress: Progress) -> None:
        for node, is_time in self.nodes:
            if node not in self.hit and is_time(progress) and self.local.processes(node):
                self.hit[node] = self.local.kill_node(node)


def at_step(progress: Progress) -> bool:
    return progress.last is not None and progress.last.step >= AT_STEP


def while_another_is_replaced(progress: Progress) -> bool:
    return bool(progress.open_recoveries)


@dataclass
class Course:
    """A job of two nodes with two ranks each, below one folder."""

    home: Path
    kind: ParallelKind
    sections: dict[str, dict[str, Any]]

    def job(self, name: str, home: Path, *, pace_s: float = PACE_S) -> Any:
        write_corpus(home)
        # Never between two saves: nothing but replicas has the steps after the first one.
        changes = {"checkpoint": {"every_steps": 1000}, **self.sections}
        return drill_job(home, name, kind=self.kind, steps=STEPS, pace_s=pace_s, changes=changes)

    def run(self, *nodes: tuple[str, Callable[[Progress], bool]]) -> RunOutcome:
        """The run while these nodes are lost."""
        job = self.job("lossy", self.home)
        loss = Loss(LocalRun(self.home, job.run_id), list(nodes))
        played = RunDriver(self.home, limit_s=LIMIT_S).run(job, hook=loss.look)
        assert all(loss.hit.get(node) for node, _ in nodes), "every loss really happened"
        return played

    def undisturbed(self) -> RunOutcome:
        home = self.home / "undisturbed"
        job = self.job("whole", home, pace_s=0.0)
        return RunDriver(home).run(job)


def answers(played: RunOutcome) -> list[tuple[Rung, bool]]:
    """The rungs inside the processes, and whether they succeeded."""
    return [
        (one.began.decision.rung, one.succeeded)
        for view in played.history.attempts
        for one in view.recoveries
    ]


def counts(played: RunOutcome) -> list[tuple[str, int, int]]:
    """Node, MA_SCHEDULE_CNT and MA_PROC_START_CNT of each member at the end."""
    view = played.history.attempts[-1]
    assert view.ended is not None
    started = view.ended.proc_start_cnt
    return [(m.node, m.schedule_cnt, started.get(m.node, 0)) for m in view.members]


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (DDP, "node-1"),
        pytest.param(DDP, "node-0", marks=pytest.mark.long, id="ddp, the first node"),
        pytest.param(HSDP, "node-0", marks=pytest.mark.long),
    ],
)
def test_a_lost_node_costs_no_step_and_no_process_of_another_node(tmp_path, kind, lost):
    course = Course(tmp_path, kind, {})
    played = course.run((lost, at_step))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert answers(played) == [(Rung.NODE_REPLACE, True)]
    (view,) = played.history.attempts
    (recovery,) = view.recoveries
    assert recovery.ended is not None
    assert recovery.ended.steps_lost == 0
    assert (recovery.began.fault.fault_class, recovery.began.fault.node) == ("node_lost", lost)
    assert played.history.isolated == (lost,)
    stays = "node-1" if lost == "node-0" else "node-0"
    assert sorted(counts(played)) == [(stays, 1, 1), ("node-2", 2, 1)]
    assert len(played.history.placements) == 1


@pytest.mark.long
@pytest.mark.parametrize(("rank", "left"), [(2, "node-1"), (1, "node-0")])
def test_a_node_whose_device_is_lost_is_left_though_its_other_ranks_live(tmp_path, rank, left):
    write_corpus(tmp_path)
    steps = 30
    whole = RunDriver(tmp_path).run(faulty_job(tmp_path, "whole", steps=steps, pace_s=0))
    fault = f"device_lost:{rank}:{AT_STEP}"
    job = faulty_job(tmp_path, "lost-device", steps=steps, faults=fault)
    played = RunDriver(tmp_path, limit_s=LIMIT_S).run(job)
    assert_as_undisturbed(played, whole, steps=steps)
    assert answers(played) == [(Rung.NODE_REPLACE, True)]
    (recovery,) = played.history.attempts[0].recoveries
    assert (recovery.began.fault.fault_class, recovery.began.fault.rank) == ("device_lost", rank)
    assert recovery.ended is not None
    assert (recovery.ended.steps_lost, played.history.isolated) == (0, (left,))
    assert len(played.history.attempts) == 1


@pytest.mark.long
@pytest.mark.parametrize("lost", [("node-1", "node-2"), ("node-0", "node-1")])
def test_two_nodes_at_once_are_replaced_together(tmp_path, lost):
    engine = {"nodes": 3, "slots_per_node": 1, "spares": 2}
    course = Course(tmp_path, DDP, {"engine": engine})
    played = course.run(*((node, at_step) for node in lost))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert {rung for rung, _ in answers(played)} == {Rung.NODE_REPLACE}
    assert len(played.history.attempts) == 1
    assert set(played.history.isolated) == set(lost)
    assert {node for node, *_ in counts(played)}.isdisjoint(lost)


@pytest.mark.long
def test_a_spare_that_dies_while_it_joins_is_followed_by_another_one(tmp_path):
    course = Course(tmp_path, DDP, {"engine": {"spares": 2}})
    played = course.run(("node-1", at_step), ("node-2", while_another_is_replaced))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert answers(played) == [(Rung.NODE_REPLACE, True)]
    assert sorted(counts(played)) == [("node-0", 1, 1), ("node-3", 3, 1)]


@pytest.mark.long
def test_without_a_spare_the_survivors_save_and_the_job_is_placed_anew(tmp_path):
    sections = {"engine": {"spares": 0}, "restart": {"spare_wait_s": 1}}
    course = Course(tmp_path, DDP, sections)
    played = course.run(("node-1", at_step))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert answers(played) == [(Rung.NODE_REPLACE, False)]
    first, last = played.history.attempts[0], played.history.attempts[-1]
    assert first.last_save is not None
    assert first.last_save.step == last.from_step, "no completed step is done again"


@pytest.mark.long
def test_a_node_whose_state_no_other_has_is_not_replaced_and_the_reason_says_so(tmp_path):
    course = Course(tmp_path, FSDP2, {"checkpoint": {"every_steps": 5}})
    played = course.run(("node-1", at_step))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert answers(played) == []
    given_up = [
        event.why for event in played.history.attempts[0].events if event.kind == "given_up"
    ]
    assert any("node_replace: no replica" in why for why in given_up), given_up


@pytest.mark.parametrize("lost", ["node-1", "node-0"])
@pytest.mark.long
def test_the_next_supervisor_goes_on_with_a_replacement(bench, undisturbed, lost):
    job = bench.job(f"taken-up-{lost}", restart={"spare_wait_s": 300}, checkpoint={"every_s": 900})
    first = bench.start(job)
    first.reach(AT_STEP)
    assert first.local.kill_node(lost)

    def has_begun() -> bool:
        return any(view.recoveries for view in first.history.attempts)

    wait_for(has_begun, period_s=0.02, what="the decision")
    first.kill_supervisor()
    second = bench.start(job)
    second.complete(undisturbed)
    (view,) = second.history.attempts
    assert [one.began.decision.rung for one in view.recoveries] == [Rung.NODE_REPLACE]
    assert all(one.succeeded for one in view.recoveries)
