"""A node takes orders only from who has the run's secret, and only from the newest supervisor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.storage.address import open_store
from perdure.training.engines.launched.engine import LaunchedEngine
from perdure.training.engines.launched.meeting import HostCalls, Registrations, signed
from perdure.training.engines.launched.messages import (
    ContainersQuery,
    EndContainersOrder,
    HelloQuery,
    HostReply,
    Registration,
)
from perdure.training.engines.launched.node_host import NodeHost, variables_for_agents
from perdure.training.engines.launched.secret import SECRET_ENV, LaunchSecret, find_secret
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.wire.transport import RequestServer
from tests.jobs import small_job

SECRET = LaunchSecret("of a test, 16 long", "run")
LOOPBACK = "127.0.0.1"


def host_of(node: str, folder, secret: LaunchSecret = SECRET) -> NodeHost:
    host = NodeHost(
        node, f"life of {node}", folder=folder, host=LOOPBACK, secret=secret, secrets_env={}
    )
    host.start()
    return host


def registration_of(node: str, rank: int, port: int) -> Registration:
    return Registration(
        node=node, node_rank=rank, instance=f"life of {node}", started_s=1.0 + rank,
        host=LOOPBACK, port=port, pid=1, version="1", job="job",
    )  # fmt: skip


@pytest.fixture
def host(tmp_path) -> Iterator[NodeHost]:
    made = host_of("n1", tmp_path)
    yield made
    made.close()


@pytest.fixture
def registration(host) -> Registration:
    return registration_of("n1", 0, host.port)


def ask(calls: HostCalls, registration: Registration, order) -> HostReply:
    return calls.receive(registration, *calls.send(registration, order, timeout_s=10.0))


def test_a_node_answers_who_has_the_secret(registration):
    assert ask(HostCalls(SECRET), registration, HelloQuery()).instance == "life of n1"
    assert HostCalls(SECRET).living([registration]) == [registration]


def test_a_node_refuses_who_has_another_secret(registration):
    stranger = HostCalls(LaunchSecret("of somebody else, long", "run"))
    with pytest.raises(AgentUnreachable, match="another program answers"):
        ask(stranger, registration, EndContainersOrder())


def test_a_node_refuses_a_superseded_supervisor_but_anybody_may_ask(registration):
    ask(HostCalls(SECRET, 5), registration, EndContainersOrder())
    with pytest.raises(EngineError, match="epoch 4 is superseded by 5"):
        ask(HostCalls(SECRET, 4), registration, EndContainersOrder())
    assert ask(HostCalls(SECRET, 4), registration, ContainersQuery()).containers == ()


def test_a_program_that_listens_in_its_place_is_not_believed():
    impostor = RequestServer(
        LOOPBACK, lambda _line: HostReply(instance="life of n1", signature="0"), token="any"
    )
    impostor.start()
    try:
        with pytest.raises(AgentUnreachable, match="another program answers"):
            ask(HostCalls(SECRET), registration_of("n1", 0, impostor.port), HelloQuery())
    finally:
        impostor.close()


def test_the_engine_knows_the_nodes_that_answer_in_order_of_their_ranks(tmp_path):
    job = small_job(tmp_path, engine={"kind": "launched", "nodes": 1, "slots_per_node": 1})
    secret = find_secret("run", home=tmp_path, environment={}, store_keys={})
    registrations = Registrations(open_store(job.storage), "run", secret)
    hosts = {name: host_of(name, tmp_path / name, secret) for name in ("b", "a", "gone")}
    for rank, (name, host) in enumerate(hosts.items()):
        registrations.put(signed(registration_of(name, rank, host.port), secret))
    hosts.pop("gone").close()
    engine = LaunchedEngine(job, home=tmp_path, epoch=1, secrets_env={})
    try:
        assert engine.nodes() == ["b", "a"]
        assert engine.warm_spares() == {}
        assert engine.leftovers() == []
    finally:
        for host in hosts.values():
            host.close()


def test_agents_have_neither_the_secret_nor_the_place_of_the_platform():
    environment = {
        "HOME": "/root", "LD_LIBRARY_PATH": "/usr/local/Ascend", "AWS_ACCESS_KEY_ID": "id",
        "HCCL_CONNECT_TIMEOUT": "600", "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS": "60",
    }  # fmt: skip
    platform = {
        SECRET_ENV: "secret", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "PET_NNODES": "2",
        "SLURM_NODEID": "1", "OMPI_COMM_WORLD_RANK": "0", "RANK_TABLE_FILE": "/user/hccl.json",
        "VC_TASK_INDEX": "1", "MA_NUM_HOSTS": "2", "JOB_COMPLETION_INDEX": "3",
        "PREFECT_API_URL": "http://server/api",
    }  # fmt: skip
    assert variables_for_agents({**environment, **platform}) == environment
