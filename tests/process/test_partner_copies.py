"""A lost node's state comes from the memory of its partner: no replica, no read from the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.local import LocalStore
from perdure.storage.share import SaveId
from perdure.training.agent.checkpoint_server import HELD_FILE, MemoryInventory
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.job import drill_job, write_corpus
from perdure.training.journal.events import CheckpointDamaged, CheckpointRestored
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import assert_as_undisturbed

STEPS = 30
EVERY = 10
PACE_S = 0.2  # time for the copies of a save before the next one
LIMIT_S = 240.0
PARTNER = "memory of a partner"

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@dataclass
class Course:
    """A job without replicas, below one folder, that loses nodes."""

    home: Path
    kind: ParallelKind = ParallelKind.FSDP2
    engine: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    pod_retries: int = 1
    pace_s: float = PACE_S
    steps: int = STEPS
    lost: list[tuple[str, ...]] = field(default_factory=list)

    def job(self, name: str, home: Path, **checkpoint: Any) -> Job:
        write_corpus(home)
        saves = {"every_steps": EVERY, **self.checkpoint, **checkpoint}
        restart = {"pod_retries": self.pod_retries}
        changes = {"checkpoint": saves, "engine": self.engine, "restart": restart}
        pace_s = self.pace_s if checkpoint else 0.0
        return drill_job(
            home, name, kind=self.kind, steps=self.steps, pace_s=pace_s, changes=changes
        )

    def run(
        self,
        *losses: tuple[Callable[[Course, Progress], bool], tuple[str, ...]],
        copies: int = 1,
        spoils: bool = False,
        uncommits: int | None = None,
    ) -> RunOutcome:
        """The run while it loses nodes together, each time when something has been seen.

        Args:
            losses: what has to be seen before, and the nodes.
            copies: on partner nodes.
            spoils: whether every shard in the store is overwritten at the loss: what is restored
                was not read there.
            uncommits: step that the store had not got yet at the loss.
        """
        job = self.job("lossy", self.home, partner_copies=copies)
        local = LocalRun(self.home, job.run_id)

        def look(_run: RunSupervisor, progress: Progress) -> None:
            if len(self.lost) == len(losses):
                return
            is_time, nodes = losses[len(self.lost)]
            if is_time(self, progress) and all(local.processes(node) for node in nodes):
                assert [node for node in nodes if not local.kill_node(node)] == []
                self.lost.append(nodes)
                if spoils:
                    self.spoil_store()
                if uncommits is not None:
                    self.checkpoints.delete(uncommits)

        played = RunDriver(self.home, limit_s=LIMIT_S).run(job, hook=look)
        assert self.lost == [nodes for _, nodes in losses], "every loss really happened"
        return played

    def undisturbed(self) -> RunOutcome:
        home = self.home / "undisturbed"
        return RunDriver(home).run(self.job("whole", home))

    def spoil_store(self) -> None:
        store = LocalStore(self.home / "store")
        shards = [
            info.key
            for info in store.list("runs/lossy/checkpoints/")
            if info.key.endswith(".safetensors")
        ]
        assert shards
        for key in shards:
            store.put(key, b"not a shard")

    def held(self, node: str) -> set[tuple[int, int]]:
        """Step and rank of what the memory of a node holds."""
        notes = (self.home / "runs" / "lossy" / "nodes" / node).glob(f"*/{HELD_FILE}")
        saves: list[tuple[SaveId, int]] = []
        for path in notes:
            saves += MemoryInventory.model_validate_json(path.read_text()).saves
        return {(save.step, rank) for save, rank in saves}

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(LocalStore(self.home / "store"), "lossy")

    def first_ranks_log(self) -> str:
        nodes = self.home / "runs" / "lossy" / "nodes"
        logs = nodes.glob("*/*/attempts/*/rank-00000.stdout.log")
        return "\n".join(path.read_text() for path in logs)


def at_step(step: int) -> Callable[[Course, Progress], bool]:
    def is_there(_course: Course, progress: Progress) -> bool:
        return progress.last is not None and progress.last.step >= step

    return is_there


def copied(
    step: int, *copies: tuple[str, int], then: int = 0
) -> Callable[[Course, Progress], bool]:
    """That nodes hold the copies of a step, each given by node and rank."""

    def is_there(course: Course, progress: Progress) -> bool:
        have = all((step, rank) in course.held(node) for node, rank in copies)
        return have and at_step(then or step)(course, progress)

    return is_there


def restored(played: RunOutcome) -> list[CheckpointRestored]:
    """Where each attempt after the first one got its state from."""
    found = [view.restored for view in played.history.attempts[1:]]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def damages(played: RunOutcome) -> list[CheckpointDamaged]:
    views = played.history.attempts
    return [one for view in views for one in view.events if isinstance(one, CheckpointDamaged)]


def rungs(played: RunOutcome) -> list[Rung]:
    return [view.decision.rung for view in played.history.attempts if view.decision is not None]


@pytest.mark.parametrize(
    ("lost", "stays"),
    [
        ("node-1", "node-0"),
        pytest.param("node-0", "node-1", marks=pytest.mark.long, id="the first node"),
    ],
)
def test_a_lost_node_costs_the_steps_since_the_save_and_no_read_from_the_store(
    tmp_path, lost, stays
):
    course = Course(tmp_path)
    theirs = (2, 3) if lost == "node-1" else (0, 1)
    time = copied(10, *((stays, rank) for rank in theirs), then=12)
    played = course.run((time, (lost,)), spoils=True)
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert rungs(played) == [Rung.POD_RESCHEDULE]
    (place,) = restored(played)
    assert (place.step, place.num_fetched) == (10, 0)
    assert place.shares == {"memory": 2, PARTNER: 2}
    assert place.partners == {"node-2": stays}
    assert played.history.attempts[1].from_step == 10, "what came after the save is trained again"
    assert damages(played) == []


@pytest.mark.long
def test_when_the_partner_is_lost_too_the_store_is_read_and_the_record_says_why(tmp_path):
    engine = {"nodes": 3, "slots_per_node": 1, "spares": 2}
    course = Course(tmp_path, engine=engine)
    time = copied(10, ("node-1", 0), ("node-2", 1), ("node-0", 2), then=12)
    played = course.run((time, ("node-1", "node-2")))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    (place,) = restored(played)
    assert (place.step, place.shares) == (10, {"store": 3})
    assert place.num_fetched >= 3
    assert "of step 10 the nodes lack the shares of ranks 1" in place.why


@pytest.mark.long
def test_two_copies_outlast_the_loss_of_a_node_and_of_a_partner(tmp_path):
    engine = {"nodes": 3, "slots_per_node": 1, "spares": 2}
    course = Course(tmp_path, engine=engine)
    time = copied(10, ("node-0", 1), ("node-0", 2), then=12)
    played = course.run((time, ("node-1", "node-2")), copies=2, spoils=True)
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    (place,) = restored(played)
    assert (place.step, place.num_fetched) == (10, 0)
    assert place.shares == {"memory": 1, PARTNER: 2}
    assert len(place.partners) == 2
    assert set(place.partners.values()) == {"node-0"}


@pytest.mark.long
@pytest.mark.parametrize("is_in_store", [True, False])
def test_a_copy_that_is_not_whole_yet_is_not_used(tmp_path, is_in_store):
    # A node's two shares take about 4 s, five steps 5 s: the copy of step 5 is whole at step 10,
    # that of step 10 begins then.
    course = Course(tmp_path, pace_s=1.0, steps=20)
    course.checkpoint = {"every_steps": 5, "partner_mb_per_s": 0.04}
    seen: dict[str, set[tuple[int, int]]] = {}

    def while_copying(course: Course, progress: Progress) -> bool:
        here, there = course.held("node-0"), course.held("node-1")
        own = {(10, 2), (10, 3)} <= there and 10 in course.checkpoints.steps()
        if not (own and {(5, 2), (5, 3)} <= here and progress.last is not None):
            return False
        seen["partner"] = here
        return True

    uncommits = None if is_in_store else 10
    played = course.run((while_copying, ("node-1",)), uncommits=uncommits)
    missing = sorted(rank for step, rank in {(10, 2), (10, 3)} - seen["partner"])
    assert missing, "the copy was on its way"
    course.checkpoint = {"every_steps": 5}
    assert_as_undisturbed(played, course.undisturbed(), steps=20)
    (place,) = restored(played)
    if is_in_store:
        assert (place.step, place.shares) == (10, {"store": 4})
        assert place.why.startswith("of step 10 the nodes lack the shares of ranks")
        assert place.why.endswith("; the nodes have no newer step than 5")
    else:
        assert (place.step, place.num_fetched) == (5, 0)
        assert place.shares == {"memory": 2, PARTNER: 2}
        assert place.why.startswith("of step 10 the nodes lack the shares of ranks")


@pytest.mark.long
def test_the_spare_holds_copies_again_and_a_second_loss_costs_no_more(tmp_path):
    course = Course(tmp_path)
    first = copied(10, ("node-0", 2), ("node-0", 3), then=12)
    second = copied(20, ("node-2", 0), ("node-2", 1), then=22)
    played = course.run((first, ("node-1",)), (second, ("node-0",)), spoils=True)
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert rungs(played) == [Rung.POD_RESCHEDULE, Rung.POD_RESCHEDULE]
    assert [(one.step, one.num_fetched) for one in restored(played)] == [(10, 0), (20, 0)]
    assert [one.partners for one in restored(played)] == [
        {"node-2": "node-0"},
        {"node-3": "node-2"},
    ]


@pytest.mark.long
def test_a_second_loss_before_the_next_save_finds_the_same_save_again(tmp_path):
    # No save is committed in between: that is a second node in a row.
    course = Course(tmp_path, pod_retries=2)
    first = copied(10, ("node-0", 2), ("node-0", 3), then=12)
    # The spare holds its own shares, brought, and the copies of the node that stayed.
    second = copied(10, ("node-2", 0), ("node-2", 1), ("node-2", 2), ("node-2", 3), then=13)
    played = course.run((first, ("node-1",)), (second, ("node-0",)), spoils=True)
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    assert [(one.step, one.num_fetched) for one in restored(played)] == [(10, 0), (10, 0)]


@pytest.mark.long
def test_a_node_that_is_replaced_while_the_others_live_on_becomes_a_partner(tmp_path):
    course = Course(tmp_path, kind=ParallelKind.DDP)
    time = copied(10, ("node-0", 2), ("node-0", 3), then=12)
    played = course.run((time, ("node-1",)))
    assert_as_undisturbed(played, course.undisturbed(), steps=STEPS)
    (view,) = played.history.attempts
    assert [one.began.decision.rung for one in view.recoveries] == [Rung.NODE_REPLACE]
    assert "memory saves are copied: node-0 to node-2, node-2 to node-0" in course.first_ranks_log()
