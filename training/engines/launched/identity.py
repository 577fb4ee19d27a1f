"""The place of this node in what the platform has given: read from flags and variables.

A pure function over the tables of `platforms`. Flags win over variables; a contradiction is an
error, since a node that is wrong about its place would disturb another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perdure.training.engines.launched.platforms import (
    PLATFORMS,
    Fact,
    Platform,
    PlatformTable,
    Reading,
)
from perdure.training.errors import InputError

_FLAGS = {
    Fact.NODE_RANK: "--node-rank",
    Fact.NUM_NODES: "--nodes",
    Fact.RENDEZVOUS: "--rendezvous",
    Fact.NODE_NAME: "--node-name",
    Fact.ADDRESS: "--host",
    Fact.DEADLINE: "--deadline",
}
_SERIES = (Fact.NODE_NAME, Fact.ADDRESS)  # the first that is set; the others need not agree


@dataclass(frozen=True, slots=True)
class SourcedFact:
    """A fact with what it was read from."""

    fact: Fact
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The place of this node.

    Attributes:
        platform: whoever gave the node.
        node_rank: number of the node, from 0.
        num_nodes: nodes of the allocation.
        name: name of the node, by which the ledger knows it.
        address: address for the other nodes; "": to be found out.
        rendezvous: host and port at which the nodes find each other's network; "": none.
        deadline_s: end of the allocation, seconds since the epoch; None: none is known.
        allocation: the platform's name of the allocation; "": it has none.
        restarts: how often the platform has started the allocation again.
        facts: all that was read, for `--explain`.
    """

    platform: Platform
    node_rank: int
    num_nodes: int
    name: str
    address: str = ""
    rendezvous: str = ""
    deadline_s: float | None = None
    allocation: str = ""
    restarts: int = 0
    facts: tuple[SourcedFact, ...] = ()


def identify(
    flags: Mapping[Fact, str], environment: Mapping[str, str], *, expected_nodes: int
) -> NodeIdentity:
    """Find the place of this node.

    Args:
        flags: facts that the command line gives.
        environment: variables of the process.
        expected_nodes: nodes and spares of the job, where nothing tells their number.

    Raises:
        InputError: nothing tells the place, or two tell different places.
    """
    table = _platform_of(environment)
    facts = {fact: SourcedFact(fact, text, _FLAGS[fact]) for fact, text in flags.items()}
    if table is not None:
        for read in _read(table, environment):
            facts.setdefault(read.fact, read)
    facts.setdefault(
        Fact.NUM_NODES,
        SourcedFact(Fact.NUM_NODES, str(expected_nodes), "engine.nodes + engine.spares"),
    )
    if Fact.NODE_RANK not in facts:
        raise InputError("--node-rank", _without_rank(environment))
    rank, num_nodes = _whole(facts[Fact.NODE_RANK]), _whole(facts[Fact.NUM_NODES])
    _check_place(facts, rank, num_nodes)
    facts.setdefault(Fact.NODE_NAME, SourcedFact(Fact.NODE_NAME, f"node-{rank}", "the node rank"))
    deadline = facts.get(Fact.DEADLINE)
    return NodeIdentity(
        platform=table.platform if table is not None else Platform.BY_HAND,
        node_rank=rank,
        num_nodes=num_nodes,
        name=facts[Fact.NODE_NAME].value,
        address=_value(facts, Fact.ADDRESS),
        rendezvous=_value(facts, Fact.RENDEZVOUS),
        deadline_s=float(deadline.value) if deadline is not None else None,
        allocation=_value(facts, Fact.ALLOCATION),
        restarts=int(_value(facts, Fact.RESTARTS) or 0),
        facts=tuple(facts[fact] for fact in Fact if fact in facts),
    )


def _platform_of(environment: Mapping[str, str]) -> PlatformTable | None:
    tables = (t for t in PLATFORMS if all(environment.get(mark) for mark in t.marks))
    return next(tables, None)


def _read(table: PlatformTable, environment: Mapping[str, str]) -> Iterator[SourcedFact]:
    """Read the facts of a platform, each once.

    Raises:
        InputError: a variable is not what it must be, or two contradict each other.
    """
    facts: dict[Fact, SourcedFact] = {}
    for reading in table.readings:
        values = [environment.get(name, "") for name in reading.variables]
        if not all(values):
            continue
        fact = _sourced(reading, values)
        first = facts.setdefault(fact.fact, fact)
        if first.value != fact.value and fact.fact not in _SERIES:
            raise InputError(
                first.source, f"tells {first.value} {fact.fact}, but {fact.source} {fact.value}"
            )
    yield from facts.values()


def _sourced(reading: Reading, values: list[str]) -> SourcedFact:
    source = " ".join(f"{n}={v}" for n, v in zip(reading.variables, values, strict=True))
    try:
        return SourcedFact(reading.fact, reading.read(values), source)
    except ValueError as error:
        raise InputError(reading.variables[0], f"{source}: {error}") from None


def _whole(fact: SourcedFact) -> int:
    if not fact.value.isdecimal():
        raise InputError(fact.source, f"{fact.value!r} must be a whole number from 0")
    return int(fact.value)


def _check_place(facts: Mapping[Fact, SourcedFact], rank: int, num_nodes: int) -> None:
    """Check that one command stands for one node, and that the node is among all.

    Raises:
        InputError: not so.
    """
    tasks = facts.get(Fact.TASKS_HERE)
    if tasks is not None and int(tasks.value) > 1:
        text = f"{tasks.value} commands on this node; start one on each (--ntasks-per-node=1)"
        raise InputError(tasks.source, text)
    if rank >= num_nodes:
        nodes = facts[Fact.NUM_NODES]
        text = f"node rank {rank} must be below the number of nodes, {num_nodes} ({nodes.source})"
        raise InputError(facts[Fact.NODE_RANK].source, text)


def _value(facts: Mapping[Fact, SourcedFact], fact: Fact) -> str:
    return facts[fact].value if fact in facts else ""


def _without_rank(environment: Mapping[str, str]) -> str:
    if environment.get("SLURM_JOB_ID"):
        return (
            "this is the batch script of a Slurm job, not a step on its nodes; "
            "start it with 'srun perdure launch ...'"
        )
    marks = ", ".join(" and ".join(table.marks) for table in PLATFORMS)
    return f"give this node's number: no platform does, which would set {marks}"
