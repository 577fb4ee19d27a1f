"""Commands that keep their own checkpoints: broken, they go on from the newest and lose nothing."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
import time

import pytest

from perdure.storage.address import open_store
from perdure.training.commands.checkpoint_store import list_stored_saves
from perdure.training.drill.driver import RunDriver
from perdure.training.processes import free_port
from perdure.training.recovery.faults import FaultClass
from tests.local_run import LocalRun
from tests.process.program_jobs import (
    EXAMPLES,
    AtStep,
    after_saves,
    agent_logs,
    by_hand,
    example_job,
    lines_with,
    output_of,
    printed,
    send,
    status_of,
)
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 40
ARGUMENTS = (f"--max_iters={STEPS}", "--eval_interval=10")


@pytest.fixture(scope="module")
def alone(home) -> dict[int, str]:
    """What the program prints without Perdure."""
    out = home / "by-hand"
    data = EXAMPLES.parent / "README.md"
    found = printed(
        by_hand("nanogpt_train.py", f"--out_dir={out}", f"--dataset={data}", *ARGUMENTS)
    )
    assert list(found) == list(range(STEPS))
    return found


def test_a_program_that_must_be_told_to_resume_goes_on_from_its_checkpoint(home, alone):
    job = example_job(home, "nanogpt.yaml", "killed", *ARGUMENTS, "--pause_s=0.2", steps=STEPS)
    kill = AtStep(home, 14, after_saves(job, 1, send(1, signal.SIGKILL)))
    outcome = RunDriver(home).run(job, hook=kill)
    assert kill.done, "the rank was killed"
    assert outcome.ended == "completed"
    (killed, again) = outcome.history.attempts
    reached = not_none(not_none(killed.ended).to_step)
    resumed_at = not_none(again.first_step).step - 1
    assert resumed_at % 10 == 0
    assert kill.status["committed_step"] <= resumed_at <= reached < resumed_at + 20
    committed = kill.status["committed_step"]
    assert kill.status["checkpoints"] == {"program": {"newest": committed, "count": 1}}
    saves = [one.step for one in outcome.history.checkpoints]
    assert saves[0] <= committed < saves[-1] == STEPS
    assert all(step % 10 == 0 for step in saves)
    outcome.history.budgets_from = 0  # the end of a run begins them anew
    assert [one.progressed for one in outcome.history.recoveries()] == [True], "it is free"
    lines = output_of(home, job)
    assert len(lines_with(lines, "Initializing a new model from scratch")) == 1
    assert len(lines_with(lines, "Resuming training from")) == 1
    assert printed(lines) == alone, "every digit"


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_of_which_a_rank_gets_sigterm_goes_on_from_its_checkpoint(home, alone, rank):
    pace = (*ARGUMENTS, "--pause_s=0.2")
    job = example_job(home, "nanogpt.yaml", f"terminated-{rank}", *pace, steps=STEPS)
    terminate = AtStep(home, 14, after_saves(job, 1, send(rank, signal.SIGTERM)))
    outcome = RunDriver(home).run(job, hook=terminate)
    assert terminate.done, "the rank got the signal"
    assert outcome.ended == "completed"
    (ended, again) = outcome.history.attempts
    fault = not_none(not_none(ended.ended).fault)
    assert (fault.fault_class, fault.device) == (FaultClass.PREEMPTED, rank)
    # torchrun sends the same signal to the others, and its times are whole seconds.
    assert fault.rank in (None, rank)
    assert f"(exitcode: -15) local_rank: {rank}" in fault.evidence
    assert not_none(again.first_step).step - 1 >= 10
    assert not_none(again.first_step).step % 10 == 1
    lines = output_of(home, job)
    assert len(lines_with(lines, "Resuming training from")) == 1
    assert printed(lines) == alone, "every digit"
    assert LocalRun(home, job.run_id).processes() == []


@pytest.mark.long
def test_a_wrong_argument_of_a_command_is_named_and_stops_the_run(home):
    job = example_job(home, "nanogpt.yaml", "wrong-argument", "--learning_rte=1", steps=STEPS)
    outcome = RunDriver(home).run(job)
    (attempt,) = outcome.history.attempts
    fault = not_none(not_none(attempt.ended).fault)
    assert fault.user_fault
    assert "Unknown config key: learning_rte" in fault.evidence
    assert outcome.ended.endswith("is for the user to fix")
    assert status_of(home, job)["step"] is None
    assert LocalRun(home, job.run_id).processes() == []


class HeldPort:
    """Takes a port as soon as its owner gives it up, as a process does that does not die."""

    def __init__(self) -> None:
        self.port = free_port()
        self.is_held = threading.Event()
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def take(self) -> None:
        while not self.is_held.is_set():
            try:
                self._server.bind(("0.0.0.0", self.port))  # noqa: S104 as torch's store does
                self._server.listen()
                self.is_held.set()
            except OSError:
                time.sleep(0.01)

    def close(self) -> None:
        self.is_held.set()
        self._server.close()


@pytest.mark.long
def test_a_command_on_two_nodes_restarts_together_on_a_port_that_nobody_holds(home):
    held = HeldPort()
    apart = {"nodes": 2, "slots_per_node": 1, "spares": 0}
    job = example_job(
        home, "nanogpt.yaml", "two-nodes", *ARGUMENTS, "--pause_s=0.2",
        steps=STEPS, engine=apart, comm={"master_port": held.port},
    )  # fmt: skip

    def act(local):
        threading.Thread(target=held.take, daemon=True).start()
        return send(1, signal.SIGKILL)(local)

    kill = AtStep(home, 12, after_saves(job, 1, act))
    outcome = RunDriver(home).run(job, hook=kill)
    was_held = held.is_held.is_set()
    held.close()
    assert kill.done, "the rank was killed"
    assert was_held, "the port was taken before the second attempt could use it"
    assert outcome.ended == "completed"
    (_, again) = outcome.history.attempts
    assert set(not_none(again.ended).proc_start_cnt.values()) == {2}, "both nodes started again"
    assert len(lines_with(output_of(home, job), "Resuming training from")) == 1
    assert list(printed(output_of(home, job))) == list(range(STEPS))


@pytest.mark.long
def test_a_checkpoint_that_is_lost_with_its_node_comes_back_from_the_store(home):
    disks = home / "disks"
    out = f"{disks}/${{PERDURE_NODE}}/out"
    job = example_job(
        home, "nanogpt.yaml", "disk-lost", *ARGUMENTS, "--pause_s=0.3", f"--out_dir={out}",
        steps=STEPS, restart={"pod_retries": 1},
        engine={"nodes": 2, "slots_per_node": 1, "spares": 1},
        worker={"checkpoints": {"kind": "nanogpt", "path": out, "upload": True}},
    )  # fmt: skip
    store = open_store(job.storage)

    def lose(local: LocalRun) -> list[int]:
        if not list_stored_saves(store, job.run_id):
            return []
        killed = local.kill_node("node-0")
        shutil.rmtree(disks / "node-0")
        return killed

    lost = AtStep(home, 12, lose)
    outcome = RunDriver(home).run(job, hook=lost)
    assert lost.done, "the node was lost, and its disk"
    assert outcome.ended == "completed"
    (before, after) = outcome.history.attempts
    assert not_none(not_none(before.ended).fault).fault_class is FaultClass.NODE_LOST
    assert [one.node for one in after.members] == ["node-2", "node-1"]
    resumed_at = not_none(after.first_step).step - 1
    assert resumed_at >= 10
    assert not_none(not_none(after.ended).to_step) == STEPS
    # Both had no checkpoint: one node is new, and on the other the program does not save.
    fetched = f"step {resumed_at} of the command was fetched to"
    assert sum(fetched in text for text in agent_logs(home, job)) == 2
    lines = output_of(home, job)
    assert len(lines_with(lines, "Resuming training from")) == 1
    assert list(printed(lines)) == list(range(STEPS))
    assert STEPS in {one.step for one in list_stored_saves(store, job.run_id)}, (
        "the last one is stored, too"
    )
