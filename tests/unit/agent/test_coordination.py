"""An agent's line to the coordinator, and what it has a group of workers do."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.training.agent.coordinator_client import AgentCoordinatorClient
from perdure.training.liveness.heartbeat import HeartbeatWriter
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.protocol import (
    GiveUp,
    NewGeneration,
    NotReplaced,
    ReplaceWorker,
    WorkerEnded,
)
from perdure.training.wire.coordinator import AgentJoined, CoordinatorAddress, NodeSampled
from perdure.training.wire.node import DeviceSample, NodeSample
from tests.unit.agent.conftest import agent_job
from tests.unit.agent.coordinator_end import CoordinatorEnd
from tests.waiting import wait_for

ENDED = WorkerEnded(rank=3, device=1, exit_code=-9, at_s=1.0)
CHECK = HealPlan("80E18404", (1,), may_reset=False, wait_s=0.0)


class Orders:
    """What the coordinator had the agent do, in its order."""

    def __init__(self) -> None:
        self.orders: queue.Queue[Any] = queue.Queue()

    def replace(self, order: ReplaceWorker) -> None:
        self.orders.put((order.rank, order.generation, order.check))

    def give_up(self, why: str) -> None:
        self.orders.put(why)

    def next(self) -> Any:
        return self.orders.get(timeout=240)


@pytest.fixture
def coordinator():
    end = CoordinatorEnd()
    yield end
    end.close()


@pytest.fixture
def orders() -> Orders:
    return Orders()


def connect(address: CoordinatorAddress, orders: Orders) -> AgentCoordinatorClient:
    return AgentCoordinatorClient(
        address,
        node="node-1",
        ranks=[2, 3],
        on_replace=orders.replace,
        on_give_up=orders.give_up,
    )


@pytest.fixture
def line(coordinator, orders):
    line = connect(coordinator.address, orders)
    yield line
    line.close()


def test_an_agent_identifies_itself_before_anything_else(line, coordinator):
    line.send(ENDED)
    joined = coordinator.receive()
    assert isinstance(joined, AgentJoined)
    assert (joined.node, joined.ranks) == ("node-1", (2, 3))
    assert joined.token.get_secret_value() == coordinator.address.token
    assert coordinator.receive() == ENDED


def test_a_sample_of_the_node_is_passed_on_while_the_connection_is_open(line, coordinator):
    sample = NodeSample(at_s=1.0, devices=(DeviceSample(index=0, power_w=3.0),))
    assert line.send_sample(sample)
    coordinator.receive()
    sampled = coordinator.receive()
    assert isinstance(sampled, NodeSampled)
    assert (sampled.node, NodeSample.model_validate(sampled.sample)) == ("node-1", sample)
    line.close()
    assert not line.send_sample(sample)


def test_orders_come_in_their_order(line, coordinator, orders):
    coordinator.receive()
    coordinator.send(
        ReplaceWorker(rank=3, generation=2, check=CHECK),
        NewGeneration(number=2),
        ReplaceWorker(rank=2, generation=3),
        GiveUp(why="enough"),
    )
    assert [orders.next() for _ in range(3)] == [(3, 2, CHECK), (2, 3, None), "enough"]


def test_a_coordinator_that_is_gone_gives_the_attempt_up(line, coordinator, orders):
    coordinator.receive()
    coordinator.disconnect()
    assert orders.next() == "the coordinator is gone: it closed the connection"
    assert not line.send(ENDED)


def test_a_message_that_makes_no_sense_is_not_from_a_coordinator(line, coordinator, orders):
    coordinator.receive()
    coordinator.connection.sendall(b'{"op": "explode"}\n')
    assert orders.next().startswith("the coordinator is gone: ")


def test_an_agent_that_disconnects_does_not_give_up(line, coordinator, orders):
    coordinator.receive()
    assert line.is_open
    line.close()
    assert coordinator.is_closed_by_peer()
    assert not line.send(ENDED)
    assert orders.orders.empty()


def test_an_address_that_refuses_connections_is_an_error(coordinator, orders):
    address = coordinator.address
    coordinator.close()
    with pytest.raises(OSError, match="refused"):
        connect(address, orders)


# A group of workers whose ends the coordinator answers.


def until(group, condition: Callable[[Any], bool], *, local_rank: int = 0) -> Any:
    """Poll the group until one of its workers is like this."""

    def look() -> Any:
        group.poll()
        status = group.statuses()[local_rank]
        return status if condition(status) else None

    return wait_for(look)


def replace(group, rank: int, generation: int) -> None:
    """Do what an agent does when the coordinator orders a new process for a rank."""
    if group.vacate(rank, generation):
        group.fill(rank, generation)


@pytest.fixture
def coordinated(new_group, line, coordinator):
    """Starts a group whose line is the test's."""

    def start(*command: str, **changes: Any) -> Any:
        coordinator.receive()
        group = new_group(*command, **changes)
        group.coordinator = line
        group.start(dict(os.environ), proc_start_cnt=1)
        return group

    return start


FAILING = """
echo "$PERDURE_GENERATION" >> lives
[ -n "$PERDURE_GENERATION" ] && exec sleep 600
echo '{"message": "E: bad"}' > $TORCHELASTIC_ERROR_FILE
exit 3
"""


def test_an_end_is_reported_to_the_coordinator_and_held_back_from_the_supervisor(
    coordinated, coordinator
):
    group = coordinated("sh", "-c", 'if [ "$LOCAL_RANK" = 1 ]; then exit 3; fi; sleep 600')
    status = until(group, lambda worker: worker.is_recovering, local_rank=1)
    assert (status.exit_code, status.ended_s) == (None, None)
    ended = coordinator.receive()
    assert isinstance(ended, WorkerEnded)
    assert (ended.rank, ended.device, ended.exit_code, ended.is_oom) == (3, 1, 3, False)


RECORD = """echo '{{"message": "{}"}}' > $TORCHELASTIC_ERROR_FILE; exit 1"""


@pytest.mark.parametrize(
    ("end", "error", "is_oom"),
    [
        ("kill -KILL $$$$", None, True),
        (RECORD.format("worker (pid 9) is killed"), "worker (pid 9) is killed", True),
        (RECORD.format("E: bad"), "E: bad", False),
    ],
)
def test_an_end_carries_the_error_that_was_recorded_and_whether_memory_was_short(
    coordinated, coordinator, end, error, is_oom
):
    kills = iter([4, 5])
    group = coordinated(
        "sh", "-c", end,
        slots_per_node=1, oom_kills=lambda: next(kills, 5),
    )  # fmt: skip
    until(group, lambda worker: worker.is_recovering)
    ended = coordinator.receive()
    assert isinstance(ended, WorkerEnded)
    assert (ended.error, ended.is_oom) == (error, is_oom)


BEAT_AT_30 = """
import os, pathlib
from perdure.training.liveness.heartbeat import HeartbeatWriter
HeartbeatWriter(pathlib.Path(os.environ["PERDURE_HEARTBEAT"])).beat(step=30)
"""
AT_ITS_TARGET = (sys.executable, "-c", BEAT_AT_30)


def test_a_worker_that_ends_well_is_not_reported(coordinated, coordinator, line):
    group = coordinated(*AT_ITS_TARGET, slots_per_node=1, job=agent_job(steps=30))
    wait_for(group.poll)
    line.close()
    assert coordinator.is_closed_by_peer(), "nothing was sent"


def test_a_session_that_exits_well_before_its_target_is_reported(coordinated, coordinator):
    job = agent_job(steps=30)
    group = coordinated("true", slots_per_node=1, job=job)
    status = until(group, lambda worker: worker.is_recovering)
    ended = coordinator.receive()
    assert isinstance(ended, WorkerEnded)
    assert (ended.exit_code, ended.error) == (0, status.error)
    assert "exit code 0 at step 0 of 30" in status.error
    group.release()
    assert group.statuses()[0].ended_early


def test_a_command_that_exits_well_has_no_step_to_be_judged_by(coordinated, coordinator, line):
    group = coordinated("true", is_command=True, job=agent_job(worker={"command": ["true"]}))
    wait_for(group.poll)
    assert not group.statuses()[0].ended_early
    line.close()
    assert coordinator.is_closed_by_peer(), "nothing was sent"


def test_a_replaced_worker_knows_the_generation_that_it_joins(coordinated, tmp_path):
    group = coordinated("sh", "-c", FAILING, slots_per_node=1, cwd=str(tmp_path))
    ended = until(group, lambda worker: worker.is_recovering)
    replace(group, group.ranks[0], 4)
    replaced = until(group, lambda worker: not worker.is_recovering)
    assert replaced.pid != ended.pid
    assert (ended.error, replaced.error, replaced.exit_code) == ("E: bad", None, None)
    wait_for(lambda: (tmp_path / "lives").read_text() == "\n4\n")


def test_a_replaced_worker_is_one_start_more_and_the_others_stay_as_they_were(
    coordinated, tmp_path
):
    script = "echo $MA_PROC_START_CNT >> starts-$LOCAL_RANK; exec sleep 600"
    group = coordinated("sh", "-c", script, slots_per_node=2, cwd=str(tmp_path))

    def has_starts(file: Path, starts: str) -> bool:
        return file.exists() and file.read_text().split() == starts.split()

    def await_starts(first: str, second: str) -> None:
        for local_rank, starts in enumerate((first, second)):
            wait_for(partial(has_starts, tmp_path / f"starts-{local_rank}", starts))

    await_starts("1", "1")
    replace(group, group.ranks[1], 2)
    await_starts("1", "1 2")
    replace(group, group.ranks[1], 3)
    await_starts("1", "1 2 3")
    replace(group, group.ranks[0], 4)
    await_starts("1 2", "1 2 3")
    assert group.proc_start_cnt == 3, "the highest of all ranks"


def test_a_worker_that_is_replaced_while_it_lives_is_ended_first(coordinated, tmp_path):
    group = coordinated("sh", "-c", "echo $$ >> lives; exec sleep 600", slots_per_node=1)
    wait_for((tmp_path / "lives").exists)
    (ended,) = group.statuses()
    replace(group, group.ranks[0], 2)
    with pytest.raises(ProcessLookupError):
        os.kill(ended.pid, 0)
    assert not group.statuses()[0].is_recovering


def test_the_heartbeat_that_a_process_left_is_not_taken_for_that_of_its_successor(coordinated):
    group = coordinated("sleep", "600", slots_per_node=1, is_command=False)
    HeartbeatWriter(group.folder / "heartbeat-0").beat(step=7)
    assert group.heartbeats() == {}
    began_s = group.mute_ranks()[0]
    replace(group, group.ranks[0], 2)
    assert group.mute_ranks()[0] > began_s, "it has all of its time to begin"


def test_an_error_is_reported_without_the_secrets_of_the_environment(coordinated, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "very-secret-key")
    text = RECORD.format("E: no access with very-secret-key")
    group = coordinated("sh", "-c", text, slots_per_node=1)
    status = until(group, lambda worker: worker.is_recovering)
    assert status.error == "E: no access with ***"


def test_an_end_that_the_coordinator_gives_up_on_is_reported_and_ends_the_others(coordinated):
    group = coordinated("sh", "-c", 'if [ "$LOCAL_RANK" = 1 ]; then exit 3; fi; sleep 600')
    until(group, lambda worker: worker.is_recovering, local_rank=1)
    group.release()
    status = group.statuses()[1]
    assert (status.exit_code, status.is_recovering) == (3, False)
    wait_for(group.poll)
    assert group.statuses()[0].stopped_by_agent


def test_after_giving_up_no_end_is_reported_any_more(coordinated, coordinator, line, tmp_path):
    script = 'if [ "$LOCAL_RANK" = 0 ]; then while [ ! -e go ]; do sleep 0.02; done; fi; exit 3'
    group = coordinated("sh", "-c", script)
    until(group, lambda worker: worker.is_recovering, local_rank=1)
    group.release()
    (tmp_path / "go").touch()
    wait_for(group.poll)
    line.close()
    assert isinstance(coordinator.receive(), WorkerEnded)
    assert coordinator.is_closed_by_peer()
    assert [worker.exit_code for worker in group.statuses()] == [3, 3]


def test_a_failure_without_a_line_ends_the_attempt(coordinated, coordinator, line, orders):
    group = coordinated("sh", "-c", "sleep 0.2; exit 3", slots_per_node=1)
    coordinator.disconnect()
    orders.next()
    wait_for(group.poll)
    assert group.statuses()[0].exit_code == 3


def test_an_end_that_no_coordinator_has_answered_is_reported_to_the_next_one(
    coordinated, coordinator, line
):
    group = coordinated("sh", "-c", "exit 3", slots_per_node=1)
    until(group, lambda worker: worker.is_recovering)
    first = coordinator.receive()
    coordinator.disconnect()
    with closing(CoordinatorEnd()) as following:
        line.rejoin(following.address)
        group.rejoin(following.address)
        assert isinstance(following.receive(), AgentJoined)
        second = following.receive()
        assert isinstance(second, WorkerEnded)
        assert (second.rank, second.exit_code) == (first.rank, 3)
        assert group.statuses()[0].is_recovering


def test_an_end_ends_the_attempt_where_the_next_coordinator_is_gone_too(
    coordinated, coordinator, line, orders
):
    group = coordinated("sh", "-c", "exit 3", slots_per_node=1)
    until(group, lambda worker: worker.is_recovering)
    coordinator.disconnect()
    orders.next()
    group.rejoin(coordinator.address)
    wait_for(group.poll)
    assert group.statuses()[0].exit_code == 3


def test_nothing_is_replaced_once_the_attempt_is_asked_to_end(coordinated):
    group = coordinated("sh", "-c", "exit 3", slots_per_node=1)
    ended = until(group, lambda worker: worker.is_recovering)
    group.stop(60)
    replace(group, group.ranks[0], 2)
    wait_for(group.poll)
    (replaced,) = group.statuses()
    assert (replaced.pid, replaced.exit_code) == (ended.pid, 3)


# A place that is kept while a chip is checked.

STAYS = ("sh", "-c", "echo $$ >> lives; exec sleep 600")


def vacated(coordinated, folder, generation: int = 2) -> Any:
    """A group whose only rank has lost its process, for one of this generation."""
    group = coordinated(*STAYS, slots_per_node=1)
    wait_for((folder / "lives").exists)
    assert group.vacate(group.ranks[0], generation)
    return group


def lives(folder) -> int:
    return len((folder / "lives").read_text().split())


def test_the_end_of_a_process_that_is_to_be_replaced_is_no_fault(
    coordinated, coordinator, line, tmp_path
):
    group = vacated(coordinated, tmp_path)
    for _ in range(3):
        assert not group.poll()
    (status,) = group.statuses()
    assert (status.is_recovering, status.exit_code, status.stopped_by_agent) == (True, None, True)
    assert not group.is_stopping
    line.close()
    assert coordinator.is_closed_by_peer(), "nothing was sent"


def test_the_process_that_a_place_is_kept_for_is_started_once(coordinated, tmp_path):
    group = vacated(coordinated, tmp_path)
    group.fill(group.ranks[0], 2)
    (replaced,) = group.statuses()
    assert not replaced.is_recovering
    wait_for(lambda: lives(tmp_path) == 2)
    group.fill(group.ranks[0], 2)
    assert group.statuses()[0].pid == replaced.pid


def test_a_rank_that_cannot_be_replaced_is_reported_and_waits_for_the_answer(
    coordinated, coordinator, tmp_path
):
    group = vacated(coordinated, tmp_path)
    group.fill(group.ranks[0], 2, why_not="device 0: Alarm")
    assert coordinator.receive() == NotReplaced(rank=group.ranks[0], why="device 0: Alarm")
    assert not group.poll()
    assert not group.is_stopping
    group.release()  # as it is given up
    wait_for(group.poll)
    assert lives(tmp_path) == 1


def test_a_rank_that_cannot_be_replaced_ends_the_attempt_where_no_coordinator_answers(
    coordinated, line, tmp_path
):
    group = vacated(coordinated, tmp_path)
    line.close()
    group.fill(group.ranks[0], 2, why_not="device 0: Alarm")
    wait_for(group.poll)
    assert lives(tmp_path) == 1


def test_a_process_that_cannot_be_started_is_reported_too(
    coordinated, coordinator, tmp_path, monkeypatch
):
    group = vacated(coordinated, tmp_path)

    def no_fork_server(_wanted: Any) -> Any:
        raise OSError("the fork server is gone")

    group.fork = no_fork_server
    group.fill(group.ranks[0], 2)
    report = coordinator.receive()
    why = "its process does not start: the fork server is gone"
    assert report == NotReplaced(rank=group.ranks[0], why=why)


@pytest.mark.parametrize("end", ["release", "stop"])
def test_a_place_is_not_filled_once_the_attempt_is_stopped_or_given_up(coordinated, tmp_path, end):
    group = vacated(coordinated, tmp_path)
    _ = group.release() if end == "release" else group.stop(60)
    group.fill(group.ranks[0], 2)
    wait_for(group.poll)
    assert lives(tmp_path) == 1


def test_what_was_found_for_an_order_does_not_answer_the_next_one(coordinated, tmp_path):
    group = vacated(coordinated, tmp_path)
    assert group.vacate(group.ranks[0], 3)
    group.fill(group.ranks[0], 2)
    assert group.statuses()[0].is_recovering
    assert group.statuses()[0].stopped_by_agent
    group.fill(group.ranks[0], 3)
    assert not group.statuses()[0].is_recovering
