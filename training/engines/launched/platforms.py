"""The variables by which platforms tell a container its place, a small table for each.

A reading takes one or more variables, which must all be set, and makes one fact of them. Where two
readings of a platform give the same fact, they must agree. The tables are in the order in which
they are asked: a launcher inside an allocation knows its processes better than the allocation
does, and ModelArts runs on Volcano.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

_HOST_RANGE = re.compile(r"([^,\[\]]*)\[([^\]]*)\]([^,\[\]]*)|[^,\[\]]+")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_MOST_HOSTS = 4096


class Platform(StrEnum):
    """Whoever gives the nodes."""

    MPI = "mpi"
    MODELARTS = "modelarts"
    SLURM = "slurm"
    ASCEND_OPERATOR = "ascend-operator"
    KUBEFLOW = "kubeflow"
    INDEXED_JOB = "indexed-job"
    BY_HAND = "by hand"


class Fact(StrEnum):
    """A fact about this node that a platform can tell."""

    NODE_RANK = "node rank"
    NUM_NODES = "nodes"
    TASKS_HERE = "tasks on this node"
    NODE_NAME = "node"
    ADDRESS = "address"
    RENDEZVOUS = "rendezvous"
    DEADLINE = "deadline"
    RESTARTS = "restarts"
    ALLOCATION = "allocation"


@dataclass(frozen=True, slots=True)
class Reading:
    """A fact, the variables that give it, and the function that reads them.

    Raises of `read`: ValueError, with what the variables must be.
    """

    fact: Fact
    variables: tuple[str, ...]
    read: Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class PlatformTable:
    """The readings of a platform.

    Attributes:
        marks: variables that are all set where this platform runs the command.
        source: document or program that defines the variables.
    """

    platform: Platform
    marks: tuple[str, ...]
    readings: tuple[Reading, ...]
    source: str


def _text(values: Sequence[str]) -> str:
    return values[0]


def _number(values: Sequence[str]) -> str:
    if not values[0].isdecimal():
        raise ValueError("must be a whole number from 0")
    return str(int(values[0]))


def _quotient(values: Sequence[str]) -> str:
    total, part = (int(_number([value])) for value in values)
    if part == 0 or total % part:
        raise ValueError("must divide")
    return str(total // part)


def _endpoint(values: Sequence[str]) -> str:
    return ":".join(values)


def _num_hosts(values: Sequence[str]) -> str:
    return str(len(_listed(values[0])))


def _host_at(values: Sequence[str]) -> str:
    hosts, index = _listed(values[0]), int(_number(values[1:]))
    if index >= len(hosts):
        raise ValueError(f"must have more than {index} hosts")
    return hosts[index]


def _listed(text: str) -> list[str]:
    return [host.strip() for host in text.split(",") if host.strip()]


def expand_hosts(text: str) -> list[str]:
    """Expand a node list of Slurm, such as `n[1-3,07],m2`.

    Raises:
        ValueError: it is none.
    """
    hosts: list[str] = []
    for match in _HOST_RANGE.finditer(text):
        if match[2] is None:
            hosts.append(match[0].strip())
            continue
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            if not (first.isdecimal() and (last or first).isdecimal()):
                raise ValueError("must be a node list of Slurm")
            numbers = range(int(first), int(last or first) + 1)
            if len(hosts) + len(numbers) > _MOST_HOSTS:
                raise ValueError(f"must have at most {_MOST_HOSTS} nodes")
            hosts += [f"{match[1]}{number:0{len(first)}d}{match[3]}" for number in numbers]
    return [host for host in hosts if host]


def _num_expanded(values: Sequence[str]) -> str:
    return str(len(expand_hosts(values[0])))


def _expanded_at(values: Sequence[str]) -> str:
    hosts, index = expand_hosts(values[0]), int(_number(values[1:]))
    if index >= len(hosts):
        raise ValueError(f"must have more than {index} nodes")
    return hosts[index]


def _tasks_at(values: Sequence[str]) -> str:
    """Read the tasks of a node from a list such as `2(x3),1`."""
    counts: list[int] = []
    for part in values[0].split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError("must be a list such as 1(x4)")
        counts += [int(match[1])] * min(int(match[2] or 1), _MOST_HOSTS)
    index = int(_number(values[1:]))
    return str(counts[index] if index < len(counts) else counts[-1])


PLATFORMS: tuple[PlatformTable, ...] = (
    PlatformTable(
        Platform.MPI,
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (
            Reading(Fact.NODE_RANK, ("OMPI_COMM_WORLD_RANK",), _number),
            Reading(Fact.NUM_NODES, ("OMPI_COMM_WORLD_SIZE",), _number),
            Reading(Fact.TASKS_HERE, ("OMPI_COMM_WORLD_LOCAL_SIZE",), _number),
            Reading(Fact.ALLOCATION, ("SLURM_JOB_ID",), _text),
            Reading(Fact.DEADLINE, ("SLURM_JOB_END_TIME",), _number),
            Reading(Fact.RESTARTS, ("SLURM_RESTART_COUNT",), _number),
        ),
        "Open MPI, 'Environment variables that are set for applications'",
    ),
    PlatformTable(
        Platform.MPI,
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        (
            Reading(Fact.NODE_RANK, ("PMI_RANK",), _number),
            Reading(Fact.NUM_NODES, ("PMI_SIZE",), _number),
            Reading(Fact.TASKS_HERE, ("MPI_LOCALNRANKS",), _number),
            Reading(Fact.ALLOCATION, ("SLURM_JOB_ID",), _text),
            Reading(Fact.DEADLINE, ("SLURM_JOB_END_TIME",), _number),
            Reading(Fact.RESTARTS, ("SLURM_RESTART_COUNT",), _number),
        ),
        "MPICH and Intel MPI: variables of their process manager, Hydra",
    ),
    PlatformTable(
        Platform.MODELARTS,
        ("MA_NUM_HOSTS", "VC_TASK_INDEX"),
        (
            Reading(Fact.NODE_RANK, ("VC_TASK_INDEX",), _number),
            Reading(Fact.NUM_NODES, ("MA_NUM_HOSTS",), _number),
            Reading(Fact.NUM_NODES, ("VC_WORKER_NUM",), _number),
            Reading(Fact.NUM_NODES, ("VC_WORKER_HOSTS",), _num_hosts),
            Reading(Fact.ADDRESS, ("MA_CURRENT_IP",), _text),
            Reading(Fact.NODE_NAME, ("MA_CURRENT_HOST_IP",), _text),
            Reading(Fact.NODE_NAME, ("NODE_NAME",), _text),
            Reading(Fact.RESTARTS, ("MA_SCHEDULE_CNT",), _number),
            Reading(Fact.ALLOCATION, ("MA_JOB_ID",), _text),
        ),
        "ModelArts, 'Managing environment variables of a training container' (develop-modelarts)",
    ),
    PlatformTable(
        Platform.SLURM,
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"),
        (
            Reading(Fact.NODE_RANK, ("SLURM_NODEID",), _number),
            Reading(Fact.NUM_NODES, ("SLURM_STEP_NUM_NODES",), _number),
            Reading(Fact.NUM_NODES, ("SLURM_STEP_NODELIST",), _num_expanded),
            Reading(Fact.TASKS_HERE, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"), _tasks_at),
            Reading(Fact.NODE_NAME, ("SLURMD_NODENAME",), _text),
            Reading(Fact.NODE_NAME, ("SLURM_STEP_NODELIST", "SLURM_NODEID"), _expanded_at),
            Reading(Fact.DEADLINE, ("SLURM_JOB_END_TIME",), _number),
            Reading(Fact.RESTARTS, ("SLURM_RESTART_COUNT",), _number),
            Reading(Fact.ALLOCATION, ("SLURM_JOB_ID",), _text),
        ),
        "srun(1), OUTPUT ENVIRONMENT VARIABLES",
    ),
    PlatformTable(
        Platform.KUBEFLOW,
        ("PET_NNODES", "PET_NODE_RANK"),
        (
            Reading(Fact.NODE_RANK, ("PET_NODE_RANK",), _number),
            Reading(Fact.NUM_NODES, ("PET_NNODES",), _number),
            Reading(Fact.RENDEZVOUS, ("PET_RDZV_ENDPOINT",), _text),
            Reading(Fact.RENDEZVOUS, ("PET_MASTER_ADDR", "PET_MASTER_PORT"), _endpoint),
            Reading(Fact.NODE_NAME, ("NODE_NAME",), _text),
            Reading(Fact.ADDRESS, ("POD_IP",), _text),
        ),
        "kubeflow/training-operator and kubeflow/trainer: torchrun's PET_ variables",
    ),
    PlatformTable(
        Platform.ASCEND_OPERATOR,
        ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        (
            Reading(Fact.NODE_RANK, ("RANK",), _number),
            Reading(Fact.NUM_NODES, ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), _quotient),
            Reading(Fact.RENDEZVOUS, ("MASTER_ADDR", "MASTER_PORT"), _endpoint),
            Reading(Fact.NODE_NAME, ("NODE_NAME",), _text),
            Reading(Fact.NODE_NAME, ("XDL_IP",), _text),
            Reading(Fact.ADDRESS, ("POD_IP",), _text),
        ),
        "Ascend/mind-cluster, ascend-operator: setPytorchEnv; XDL_IP of its sample jobs",
    ),
    PlatformTable(
        Platform.INDEXED_JOB,
        ("JOB_COMPLETION_INDEX",),
        (
            Reading(Fact.NODE_RANK, ("JOB_COMPLETION_INDEX",), _number),
            Reading(Fact.NODE_NAME, ("NODE_NAME",), _text),
            Reading(Fact.ADDRESS, ("POD_IP",), _text),
        ),
        "Kubernetes, 'Indexed Job', also of a JobSet; NODE_NAME and POD_IP by the downward API",
    ),
)
