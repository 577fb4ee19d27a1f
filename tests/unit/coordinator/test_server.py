"""The coordinator as a server: what members report is what Prometheus gets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import SecretStr
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from perdure.storage.local import LocalStore
from perdure.storage.unauthenticated import LIMIT_BYTES, MAX_OPEN
from perdure.training.coordinator.history_writer import HISTORY_FILE
from perdure.training.coordinator.server import MIN_UNAUTHENTICATED, Coordinator
from perdure.training.journal.attempt_log import AttemptLog, parse_lines
from perdure.training.journal.events import CheckpointCommitted, StepRecord
from perdure.training.recovery import replay
from perdure.training.recovery.actions import AbnormalNorm
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.protocol import (
    CoordinatorMessage,
    GiveUp,
    NotReplaced,
    RecoveryEnded,
    ReplaceWorker,
    Trains,
    WorkerEnded,
)
from perdure.training.recovery.rungs import Rung
from perdure.training.runtime.coordinator_client import CoordinatorClient
from perdure.training.runtime.errors import GivenUp
from perdure.training.wire.coordinator import (
    PACKED_FROM_CHARACTERS,
    TO_MEMBER,
    AgentJoined,
    CoordinatorAddress,
    CoordinatorConfig,
    MetricsAddress,
    NodeSampled,
    WorkerJoined,
    metrics_file,
)
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample
from perdure.training.wire.transport import dump_line
from tests.jobs import small_job
from tests.strangers import crowd, flood, trickle
from tests.waiting import wait_for

HOST = "127.0.0.1"
ENGINE = {"nodes": 1, "slots_per_node": 2}
TOKEN = "a-token"
RECORD = StepRecord(
    step=7, loss=1.5, grad_norm=0.5, lr=1e-3, tokens_per_s=1000.0, mfu=None, at_s=99.0,
    step_s=2.5, position=56, epoch=0, placement=1, attempt=1,
)  # fmt: skip


class Served:
    """A coordinator that serves in a thread."""

    def __init__(
        self, folder: Path, *, restart: Mapping[str, Any] | None = None, **watch: Any
    ) -> None:
        self.folder = folder
        job = small_job(
            folder, run_id="run-1", watch=watch, restart=dict(restart or {}), engine=ENGINE
        )
        self.config = CoordinatorConfig(
            job=job,
            host=HOST,
            store_port=0,
            token=TOKEN,
            placement=1,
            attempt=1,
            live_file=str(folder / "metrics.jsonl"),
            address_file=str(folder / "address.json"),
            supported=tuple(Rung),
        )
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        wait_for((folder / "address.json").exists)

    def _serve(self) -> None:
        async def main() -> None:
            task = asyncio.create_task(Coordinator(self.config).serve())
            self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
            await task

        with suppress(asyncio.CancelledError):
            asyncio.run(main())  # which ends open connections, too

    @property
    def address(self) -> CoordinatorAddress:
        return CoordinatorAddress.model_validate_json((self.folder / "address.json").read_text())

    def text(self) -> str:
        """What Prometheus gets."""
        file = metrics_file(self.folder)
        wait_for(file.exists)
        url = MetricsAddress.model_validate_json(file.read_text()).url
        return httpx.get(url, timeout=240).text

    def until(self, part: str) -> None:
        wait_for(lambda: part in self.text())

    def close(self) -> None:
        self._stop()
        self._thread.join(240)


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def test_steps_and_commits_of_the_attempt_log_are_exported(served):
    with AttemptLog(served.folder / "metrics.jsonl") as log:
        log.append(RECORD)
        log.append(CheckpointCommitted(step=5))
    labels = '{attempt="1",placement="1",run_id="run-1"}'
    served.until(f"perdure_step{labels} 7.0")
    assert f"perdure_checkpoint_committed_step{labels} 5.0" in served.text()
    assert f"perdure_step_duration_seconds_count{labels} 1.0" in served.text()


def test_an_agents_samples_are_exported_until_it_is_gone(served):
    sample = NodeSample(
        at_s=1.0, devices=(DeviceSample(index=0, power_w=99.0),), host=HostSample(cpu_percent=50.0)
    )
    where = (served.address.host, served.address.port)
    with socket.create_connection(where) as line:
        joined = AgentJoined(token=SecretStr(TOKEN), node="node-7", ranks=(0,))
        sampled = NodeSampled(node="node-7", sample=sample.model_dump(mode="json"))
        line.sendall(dump_line(joined) + dump_line(sampled))
        served.until('node="node-7"')
        assert "perdure_device_power_watts" in served.text()
    wait_for(lambda: 'node="node-7"' not in served.text())


def member_is_answered(served: Served) -> bool:
    """Whether an agent that joins now is taken, and what it sends right behind its token."""
    sample = NodeSample(at_s=1.0, devices=(), host=HostSample(cpu_percent=50.0))
    with socket.create_connection((served.address.host, served.address.port)) as line:
        joined = AgentJoined(token=SecretStr(TOKEN), node="node-7", ranks=(0,))
        sampled = NodeSampled(node="node-7", sample=sample.model_dump(mode="json"))
        line.sendall(dump_line(joined) + dump_line(sampled))
        served.until('node="node-7"')
    return True


@pytest.mark.parametrize(
    "piece", [b"x" * 4096, b"[" * 4096, b'{"op": "agent_joined", "node": "' + b"x" * 4096]
)
def test_a_stranger_sends_little_before_the_connection_ends(served, piece, caplog):
    assert flood((HOST, served.address.port), piece) < 16 << 20
    wait_for(lambda: f"more than {LIMIT_BYTES} bytes without a token" in caplog.text)
    assert member_is_answered(served)


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[" * 5000 + b"\n", b'{"op": "agent_joined", "node": "n", "ranks": []}\n', b"\xff\n"],
)
def test_a_first_line_without_the_token_gets_no_word(served, line):
    with socket.create_connection((HOST, served.address.port), timeout=240) as connection:
        connection.sendall(line)
        assert connection.recv(1) == b""
    assert member_is_answered(served)


def test_a_stranger_that_sends_a_byte_now_and_then_has_one_deadline(served, short_patience):
    trickle((HOST, served.address.port))


def test_silent_strangers_keep_no_member_out(served):
    crowd((HOST, served.address.port), lambda: member_is_answered(served), MIN_UNAUTHENTICATED + 8)


def scrapes(served: Served) -> tuple[str, int]:
    """Where Prometheus scrapes."""
    assert served.text()
    url = MetricsAddress.model_validate_json(metrics_file(served.folder).read_text()).url
    return HOST, httpx.URL(url).port or 0


@pytest.mark.parametrize("piece", [b"GET /" + b"x" * 4096, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 9])
def test_a_scrape_is_short(served, piece):
    assert flood(scrapes(served), piece) < 16 << 20
    assert served.text()


def test_a_scrape_that_comes_byte_by_byte_has_one_deadline(served, short_patience, capfd):
    trickle(scrapes(served))
    assert "Traceback" not in capfd.readouterr().err


def test_silent_strangers_keep_no_scrape_out(served):
    crowd(scrapes(served), served.text, MAX_OPEN + 8)


def ordered_after_a_fault_of_memory(served: Served, agent: socket.socket) -> ReplaceWorker:
    """What the agent of two ranks in training is told when the process of rank 1 ends so."""
    where = (served.address.host, served.address.port)

    def tell(line: socket.socket, *messages: CoordinatorMessage | AgentJoined) -> None:
        line.sendall(b"".join(dump_line(message) for message in messages))

    tell(agent, AgentJoined(token=SecretStr(TOKEN), node="node-0", ranks=(0, 1)))
    ranks = [socket.create_connection(where) for _ in range(2)]
    for rank, line in enumerate(ranks):
        tell(line, WorkerJoined(token=SecretStr(TOKEN), rank=rank, pid=1))
        tell(line, Trains(generation=1, step=0))
    served.until('perdure_ranks{attempt="1",placement="1",run_id="run-1",state="training"} 2.0')
    error = "DeviceBeyondHealing: not recoverable"
    tell(agent, WorkerEnded(rank=1, device=1, exit_code=1, error=error, at_s=1.0))
    order = TO_MEMBER.validate_json(agent.makefile("rb").readline())
    assert isinstance(order, ReplaceWorker)
    for line in ranks:
        line.close()
    return order


def test_a_chip_at_fault_is_checked_first_and_a_rank_that_is_not_replaced_is_on_record(served):
    with socket.create_connection((served.address.host, served.address.port)) as agent:
        order = ordered_after_a_fault_of_memory(served, agent)
        assert order.check == HealPlan(None, (1,), may_reset=False, wait_s=0.0)
        agent.sendall(dump_line(NotReplaced(rank=1, why="device 1: Alarm")))
        log = served.folder / "metrics.jsonl"

        def failed() -> list[RecoveryEnded]:
            return [e for e in parse_lines(log.read_text()) if isinstance(e, RecoveryEnded)]

        (ended,) = wait_for(failed)
    assert (ended.succeeded, ended.why) == (False, "rank 1 is not replaced: device 1: Alarm")


def test_whatever_came_over_the_connections_can_be_played_again(served, capsys):
    history = served.folder / HISTORY_FILE
    with socket.create_connection((served.address.host, served.address.port)) as agent:
        ordered_after_a_fault_of_memory(served, agent)
        wait_for(lambda: history.read_text().count("rank_disconnected") == 2)
    assert replay.main([str(history)]) == 0
    printed = capsys.readouterr().out
    assert "training -> gathering: ProcessEnded(rank=1" in printed
    assert '    agent of rank 1 {"op": "replace"' in printed
    assert TOKEN not in history.read_text()


def test_a_job_may_have_processes_replaced_without_a_check(tmp_path):
    served = Served(tmp_path, restart={"heal": {"check": False}})
    with socket.create_connection((served.address.host, served.address.port)) as agent:
        assert ordered_after_a_fault_of_memory(served, agent).check is None
    served.close()


def test_a_port_that_is_taken_is_a_warning_and_no_end(tmp_path, caplog):
    with socket.create_server((HOST, 0)) as taken:
        served = Served(tmp_path, metrics_port=taken.getsockname()[1])
        wait_for(lambda: "no metrics at" in caplog.text)
        with socket.create_connection((served.address.host, served.address.port)) as line:
            joined = AgentJoined(token=SecretStr(TOKEN), node="node-0", ranks=(0,))
            line.sendall(dump_line(joined))
        assert not metrics_file(tmp_path).exists()
        served.close()


@pytest.mark.parametrize("before", [None, b'{"3": [90.0, 91.0]}', b"not json"])
def test_an_abnormal_step_that_was_accepted_is_added_to_the_runs_list(served, before):
    store = LocalStore(served.folder / "store")
    key = "runs/run-1/abnormal_global_norm.json"
    if before is not None:
        store.put(key, before)
    Coordinator(served.config)._carry_out(AbnormalNorm(step=7, norms=(1e9, 1e9)))
    if before == b"not json":
        assert store.get(key) == before, "what cannot be read is not written over"
        return
    earlier = {"3": [90.0, 91.0]} if before is not None else {}
    assert json.loads(store.get(key)) == {**earlier, "7": [1e9, 1e9]}


def test_the_rendezvous_store_listens_on_the_hosts_own_address_alone(served):
    port = served.address.store_port
    assert sorted(addresses_of(port)) == [HOST]
    for other in ("127.0.0.2", "::1"):  # this machine's as well, as a peer's would be
        with pytest.raises(DistNetworkError):
            TCPStore(other, port, timeout=timedelta(seconds=2)).set("written/from/outside", "1")
    inside = TCPStore(HOST, port)
    inside.set("written/from/inside", "1")
    assert not inside.check(["written/from/outside"])


def addresses_of(port: int) -> list[str]:
    """Where this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return [
        one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]


def client_of(served: Served, rank: int) -> CoordinatorClient:
    client = CoordinatorClient(
        served.folder / "address.json",
        rank=rank,
        on_generation=lambda _number: None,
        on_wait=lambda: None,
    )
    assert client.newer_than(0) == 1
    return client


def test_each_rank_gets_the_documents_of_all_in_the_order_of_the_ranks(served):
    exchanges: list[Any] = [{"rank": 0}, None, ["x" * PACKED_FROM_CHARACTERS], 3]
    clients = [client_of(served, rank) for rank in (0, 1)]

    def exchange(client: CoordinatorClient) -> list[list[Any]]:
        return [client.gather([document, client is clients[0]]) for document in exchanges]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(exchange, clients)
    assert first == second == [[[one, True], [one, False]] for one in exchanges]
    for client in clients:
        client.close()


def test_a_rank_that_gathers_alone_learns_that_the_other_is_lost(served):
    client, other = client_of(served, 0), client_of(served, 1)
    other.close()
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(client.gather, 1)
        wait_for(lambda: client._num_gathered == 1)
        client.receive(dump_line(GiveUp(why="rank 1 is lost")))
        with pytest.raises(GivenUp, match="rank 1 is lost"):
            gathered.result(240)
    client.close()
