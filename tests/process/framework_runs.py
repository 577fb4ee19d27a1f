"""Runs of a script whose loop belongs to a framework, and what each of them outlives alike.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.process.harness import RECIPES, Running, Workbench
from tests.values import not_none
from tests.waiting import wait_for

STEPS = 24


def fault(kind: str, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    """One of a job's `drill.faults`."""
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def whole_curve(running: Running) -> dict[int, float]:
    """The loss of every step of a run that nothing disturbs."""
    running.complete()
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1]
    return curve


@dataclass(frozen=True, slots=True)
class FrameworkRuns:
    """Starts two ranks on one node that run a script of tests/recipes.

    Attributes:
        bench: that they run on.
        name: that the names of runs begin with.
        script: with the arguments that all runs have.
    """

    bench: Workbench
    name: str
    script: tuple[str, ...]

    def job(self, which: str, *further: str, **changes: Any) -> dict[str, Any]:
        """A run's job, `further` being more arguments of the script."""
        sections = {
            "data": None,
            "steps": STEPS,
            "worker": {"script": [*self.script, *further], "cwd": str(RECIPES)},
            "env": {"PACE_S": "0"},
        }
        return self.bench.pair(f"{self.name}-{which}", **{**sections, **changes})

    def start(self, which: str, *further: str, **changes: Any) -> Running:
        """Start a run."""
        return self.bench.start(self.job(which, *further, **changes))

    def start_apart(self, which: str, *further: str, **changes: Any) -> Running:
        """Likewise, each rank on a node of its own."""
        engine = self.bench.apart(which)["engine"]
        return self.start(which, *further, engine=engine, **changes)

    def loses_ranks_and_no_step(self, curve: Mapping[int, float], *, first_rank_at: int) -> Running:
        """A rank is killed, then the first one behind its vote, and at last connections break."""
        faults = [
            fault("kill", 1, 9),
            fault("kill", 0, first_rank_at, "voted"),
            fault("link", 1, 20),
        ]
        running = self.start("killed", drill={"faults": faults})
        running.complete(curve)
        assert running.rungs() == ["process_replace", "process_replace", "step_retry"]
        (attempt,) = running.history.attempts
        assert [not_none(one.ended).steps_lost for one in attempt.recoveries] == [0, 0, 0]

        status = running.status()
        assert (status["step"], status["loss"]) == (STEPS, curve[STEPS])
        assert status["ettr"] > 0
        assert status["tokens_per_s"] > 0
        assert status["checkpoints"]["store"] == {"newest": STEPS, "count": 3}
        return running

    def goes_one_step_back_when_a_loss_is_not_a_number(self, curve: Mapping[int, float]) -> None:
        """A rank's loss is NaN, once, and all ranks have a copy of the step before."""
        spiked = {"faults": [fault("not_a_number", 1, 19)]}
        restart = {"numeric_retry": True, "snapshot_every_steps": 1}
        running = self.start("spike", drill=spiked, restart=restart)
        running.complete(curve)
        assert running.rungs() == ["step_retry"]
        (attempt,) = running.history.attempts
        assert [not_none(one.ended).steps_lost for one in attempt.recoveries] == [0]

    def reads_a_stream_up_to_its_place(self, *further: str) -> None:
        """Both ranks die, one after the other, while a dataset without indices is trained on."""
        env = {"PACE_S": "0", "ITERABLE": "1"}
        curve = whole_curve(self.start("streams", *further, env=env))
        killed = {"faults": [fault("kill", 1, 13), fault("kill", 0, 22)]}
        restart = {"process_replace": False, "end_of_life_checkpoint": False}
        running = self.start("streams-killed", *further, env=env, drill=killed, restart=restart)
        running.complete(curve)
        assert [one.from_step for one in running.history.attempts] == [0, 10, 20]

    def has_its_last_step_saved_when_it_ends_early(self) -> None:
        """The framework ends its loop before the target, which fails the run."""
        running = self.stops("ends", env={"PACE_S": "0", "STOP_AT_STEP": "13"})
        assert "returned at step 13 of 24" in running.out
        assert running.status()["checkpoints"]["store"]["newest"] == 13

    def outlives_the_loss_of_a_node(self, curve: Mapping[int, float]) -> None:
        """The node of a rank is lost, and a spare takes its place."""
        lost = {"faults": [fault("kill_node", 1, 13)]}
        restart = {"pod_retries": 1, "node_replace": True}
        running = self.start_apart("node", drill=lost, restart=restart)
        running.complete(curve)
        assert running.rungs() == ["node_replace"]

    def is_restarted_when_it_hangs(
        self, curve: Mapping[int, float], *further: str, evaluate_s: float
    ) -> Running:
        """A rank stands still, while evaluations have a limit of their own."""
        stopped = {"faults": [fault("stop", 1, 15)]}
        env = {"PACE_S": "0", "EVALUATE_S": str(evaluate_s)}
        restart = {"hang_timeout_s": 8}
        running = self.start("hang", *further, drill=stopped, restart=restart, env=env)
        running.complete(curve)
        assert running.rungs() == ["hang_restart"]
        (ended, _) = running.history.attempts
        met = not_none(not_none(ended.ended).fault)
        assert (met.fault_class, met.rank) == ("hang", 1)
        return running

    def saves_and_goes_on_when_it_is_asked_to_end(self, curve: Mapping[int, float]) -> None:
        """A rank gets SIGTERM between two saves."""
        running = self.start("term", env={"PACE_S": "1"})
        running.reach(11)
        (rank_1,) = running.local.rank(1)
        rank_1.send_signal(signal.SIGTERM)
        wait_for(lambda: len(running.history.attempts) == 2, what=running.out)
        running.complete(curve)
        assert running.rungs() == ["in_place_restart"]
        saved = running.history.attempts[1].from_step
        assert saved >= 11
        assert saved % 10  # it was the request that had it saved

    def is_restarted_in_the_middle_of_an_epoch(
        self, curve: Mapping[int, float], **changes: Any
    ) -> Running:
        """Both ranks die, one after the other, and nothing but checkpoints is left."""
        killed = {"faults": [fault("kill", 0, 13), fault("kill", 1, 22)]}
        restart = {"process_replace": False, "end_of_life_checkpoint": False}
        running = self.start("place", drill=killed, restart=restart, **changes)
        running.complete(curve)
        assert running.rungs() == ["in_place_restart", "in_place_restart"]
        assert [one.from_step for one in running.history.attempts] == [0, 10, 20]
        return running

    def goes_on_with_other_ranks(self, num_ranks: int, **changes: Any) -> Running:
        """A run that was complete gets more steps, and another number of ranks than two."""
        half = STEPS // 2
        first = self.start("ranks", steps=half, **changes)
        first.complete()
        before = first.curve()
        engine = {"nodes": 1, "slots_per_node": num_ranks, "spares": 0, "grace_s": 10}
        running = self.start("ranks", engine=engine, **changes)
        running.complete()
        curve = running.curve()
        assert list(curve) == list(range(1, STEPS + 1))
        assert {step: curve[step] for step in before} == before
        assert curve[STEPS] < curve[half] < curve[1]
        assert running.history.attempts[-1].from_step == half
        return running

    def begins_with_the_weights_of_another(
        self, curve: Mapping[int, float], **changes: Any
    ) -> None:
        """A run begins with what the undisturbed one has trained; its steps begin with 1."""
        taught = {"run": f"{self.name}-undisturbed"}
        running = self.start("heir", steps=8, init_from=taught, **changes)
        running.complete()
        found = running.curve()
        assert list(found) == list(range(1, 9))
        assert abs(found[1] - curve[STEPS]) < abs(found[1] - curve[1])

    def pauses_and_goes_on(self, curve: Mapping[int, float]) -> None:
        """`perdure pause`, then `perdure resume`."""
        running = self.start("pause", env={"PACE_S": "1"})
        running.reach(5)
        self.bench.perdure("pause", running.job.run_id)
        wait_for(lambda: running.status()["pause"] is not None, what=running.out)
        assert running.step() == running.status()["pause"]["step"]
        self.bench.perdure("resume", running.job.run_id)
        running.complete(curve)

    def stops_at_a_wrong_argument(self, argument: str) -> None:
        """The script does not know an argument, which the diagnosis names."""
        running = self.stops("wrong", argument)
        (attempt,) = running.history.attempts
        assert argument in not_none(not_none(attempt.ended).fault).evidence
        assert argument in running.out
        running.leave_nothing()

    def stops(self, which: str, *further: str, **changes: Any) -> Running:
        """A run that nothing but its user can mend."""
        running = self.start(which, *further, **changes)
        assert running.finish() == 1
        assert running.rungs() == ["stop"]
        return running
