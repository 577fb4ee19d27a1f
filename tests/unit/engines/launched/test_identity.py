"""The place of a node, as each platform tells it."""

from __future__ import annotations

import pytest

from perdure.training.engines.launched.identity import NodeIdentity, identify
from perdure.training.engines.launched.platforms import PLATFORMS, Fact, Platform, expand_hosts
from perdure.training.errors import InputError

MODELARTS = {
    "MA_NUM_HOSTS": "3",
    "MA_NUM_GPUS": "8",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "3",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job,job-worker-2.job",
    "MA_CURRENT_IP": "172.16.0.12",
    "MA_CURRENT_HOST_IP": "10.1.2.3",
    "MA_SCHEDULE_CNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[1-3],m07",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_END_TIME": "1800000000",
    "SLURM_RESTART_COUNT": "1",
}
ASCEND_OPERATOR = {
    "MASTER_ADDR": "10.0.0.3",
    "MASTER_PORT": "2222",
    "RANK": "3",
    "WORLD_SIZE": "32",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "0,1,2,3,4,5,6,7",
    "XDL_IP": "10.1.2.4",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "job-master-0",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "4", "NODE_NAME": "worker-9", "POD_IP": "10.0.0.9"}


def place(identity: NodeIdentity) -> tuple[Platform, int, int, str]:
    return identity.platform, identity.node_rank, identity.num_nodes, identity.name


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (MODELARTS, (Platform.MODELARTS, 1, 3, "10.1.2.3")),
        (SLURM, (Platform.SLURM, 2, 4, "n3")),
        ({**SLURM, "SLURMD_NODENAME": "n3.site"}, (Platform.SLURM, 2, 4, "n3.site")),
        (ASCEND_OPERATOR, (Platform.ASCEND_OPERATOR, 3, 4, "10.1.2.4")),
        (KUBEFLOW, (Platform.KUBEFLOW, 1, 2, "node-1")),
        (INDEXED_JOB, (Platform.INDEXED_JOB, 4, 5, "worker-9")),
        (OPEN_MPI, (Platform.MPI, 1, 3, "node-1")),
        (HYDRA, (Platform.MPI, 0, 2, "node-0")),
        ({**SLURM, **OPEN_MPI}, (Platform.MPI, 1, 3, "node-1")),
    ],
)
def test_each_platform_tells_a_node_its_place(environment, expected):
    assert place(identify({}, environment, expected_nodes=5)) == expected


def test_the_end_of_an_allocation_and_its_restarts_are_read():
    identity = identify({}, SLURM, expected_nodes=5)
    assert (identity.deadline_s, identity.restarts, identity.allocation) == (1.8e9, 1, "4711")


def test_addresses_are_read_where_the_platform_has_them():
    assert identify({}, MODELARTS, expected_nodes=1).address == "172.16.0.12"
    assert identify({}, ASCEND_OPERATOR, expected_nodes=1).rendezvous == "10.0.0.3:2222"
    assert identify({}, KUBEFLOW, expected_nodes=1).rendezvous == "job-master-0:23456"


def test_flags_suffice_and_win_over_variables():
    flags = {Fact.NODE_RANK: "0", Fact.NUM_NODES: "2", Fact.RENDEZVOUS: "10.0.0.3:29400"}
    assert place(identify(flags, {}, expected_nodes=9)) == (Platform.BY_HAND, 0, 2, "node-0")
    identity = identify(flags, MODELARTS, expected_nodes=9)
    assert (identity.node_rank, identity.num_nodes) == (0, 2)
    sources = {fact.fact: fact.source for fact in identity.facts}
    assert sources[Fact.NODE_RANK] == "--node-rank"
    assert sources[Fact.ADDRESS] == "MA_CURRENT_IP=172.16.0.12"


def test_the_job_tells_the_number_of_nodes_where_nothing_else_does():
    identity = identify({Fact.NODE_RANK: "1"}, {}, expected_nodes=3)
    assert identity.num_nodes == 3


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (
            {},
            {**MODELARTS, "VC_WORKER_NUM": "4"},
            "MA_NUM_HOSTS=3: tells 3 nodes, but VC_WORKER_NUM=4 4",
        ),
        (
            {},
            {**SLURM, "SLURM_STEP_NODELIST": "n[1-3]"},
            "SLURM_STEP_NUM_NODES=4: tells 4 nodes, but SLURM_STEP_NODELIST=n[1-3] 3",
        ),
        ({}, {**MODELARTS, "VC_TASK_INDEX": "one"}, "VC_TASK_INDEX: VC_TASK_INDEX=one: must be a"),
        ({}, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "8 commands on this node"),
        ({}, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2 commands on this node"),
        ({}, {**ASCEND_OPERATOR, "LOCAL_WORLD_SIZE": "0"}, "must divide"),
        ({Fact.NODE_RANK: "4"}, MODELARTS, "--node-rank: node rank 4 must be below"),
        ({Fact.NODE_RANK: "-1"}, {}, "--node-rank: '-1' must be a whole number"),
        ({Fact.NUM_NODES: "1"}, MODELARTS, "VC_TASK_INDEX=1: node rank 1 must be below"),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}, "srun perdure launch"),
        ({}, {}, "--node-rank: give this node's number"),
    ],
)
def test_a_contradiction_is_one_line(flags, environment, message):
    with pytest.raises(InputError) as caught:
        identify(flags, environment, expected_nodes=5)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],m2", ["n1", "n2", "n3", "n07", "m2"]),
        ("rack1-n[08-10].site", ["rack1-n08.site", "rack1-n09.site", "rack1-n10.site"]),
        ("a,b,c[2]", ["a", "b", "c2"]),
    ],
)
def test_node_lists_of_slurm_are_expanded(text, hosts):
    assert expand_hosts(text) == hosts


def test_every_table_names_its_source_and_tells_the_rank():
    for table in PLATFORMS:
        assert table.source
        assert Fact.NODE_RANK in {reading.fact for reading in table.readings}
