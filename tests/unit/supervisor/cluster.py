"""A model of containers in memory, which survive their supervisors as real containers do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, ClockProbe, Placement, Snapshot
from perdure.training.errors import AgentUnreachable, NoCapacity
from perdure.training.journal.events import ChipsHealed
from perdure.training.journal.records import Member
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.healing import Act, ActDone
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.runbook import RunSteps, run_to_completion
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent import CheckOrder, NodeLog, StartOrder
from perdure.training.wire.agent_status import AgentState, AgentStatus, WorkerStatus
from perdure.training.wire.logs import Collected, LogPiece, ReadLogsQuery, WorkerLog
from perdure.training.wire.node import Check, HealOrder, HealReply

# Exit code and error of every worker, by how its attempt ends.
WORKER_ENDS: dict[str, tuple[int, str | None]] = {
    "done": (0, None),
    "crash": (-9, None),
    "node lost": (1, None),
    "storage error": (1, "perdure.storage.errors.NotFound: data/shards/0"),
    "user": (2, None),
    "memory": (1, "RuntimeError: UCE ERROR reason=[device mem error]"),
}


class Cluster:
    """Containers that live on when a supervisor dies. Each attempt follows a script.

    Attributes:
        outcomes: how the attempts end, one after the other; the last one goes on for all others.
        live: by attempt, its live file, as it is once its processes have ended.
    """

    def __init__(self, outcomes: Sequence[str]) -> None:
        self.outcomes = list(outcomes)
        self.members: dict[int, tuple[Member, int]] = {}  # member and its process starts
        self.placement = 0
        self.started: dict[tuple[int, int], set[int]] = {}
        self.now: tuple[int, int] | None = None
        self.lost: set[str] = set()
        self.deleted: set[int] = set()  # members without a container, on the same node
        self.live: dict[tuple[int, int], str] = {}  # live file of an attempt, written at its end
        self.written: set[tuple[int, int]] = set()
        self.orders: list[StartOrder] = []
        self.checks: dict[str, list[Check]] = {}  # what the checks of a node find
        self.checked: list[dict[int, bool]] = []  # which members were checked, as new ones or not
        self.clock_s = 0.0
        self.domains: dict[str, str] = {}  # failure domains by node
        self.ill: set[str] = set()  # nodes whose chips no healing mends
        self.healed: list[tuple[str, HealOrder]] = []

    @property
    def outcome(self) -> str:
        keys = sorted(self.started)
        index = keys.index(self.now) if self.now in keys else 0
        return self.outcomes[min(index, len(self.outcomes) - 1)]


class NothingStandsBy:
    """Of a fleet that has no room for containers that stand by."""

    def contacts(self) -> Mapping[str, AgentEndpoint]:
        return {}

    def start(self, placement: Placement, node: str) -> None:
        raise NoCapacity("no room")

    def was_checked(self, member: int) -> bool:
        return False


class FakeFleet:
    """The fleet of a Cluster; every call may be the supervisor's last."""

    def __init__(self, cluster: Cluster, tick: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.tick = tick
        self.spare_containers = NothingStandsBy()

    @property
    def capabilities(self) -> frozenset[Rung]:
        return frozenset(Rung) - {Rung.NODE_REPLACE}  # no coordinator is in memory

    def nodes(self) -> Sequence[str] | None:
        return ["node-0", "node-1", "node-2"]

    def usable_nodes(self) -> Sequence[str] | None:
        return self.nodes()

    def failure_domains(self) -> Mapping[str, str]:
        return self.cluster.domains

    def resolve_nodes(
        self, placement: Placement, members: Collection[int] | None = None
    ) -> Placement:
        return placement

    poll_s = 0.0
    first_container = ""

    @property
    def are_terminated(self) -> bool:
        return False

    def leftovers(self) -> Sequence[str]:
        return ()

    def losses(self, lost: Collection[str]) -> Sequence[NodeLoss]:
        return ()

    def _create(self, placement: Placement, members: Collection[int]) -> None:
        self.cluster.placement = placement.number
        for member in placement.members:
            if member.index in members:
                self.tick(f"boot {member.index}")
                self.cluster.members[member.index] = (member, 0)
                self.cluster.lost.discard(member.node)
                self.cluster.deleted.discard(member.index)

    def submit(self, placement: Placement) -> None:
        self.tick("submit")
        self.cluster.members = {}
        self._create(placement, {m.index for m in placement.members})

    def replace(
        self, placement: Placement, members: Collection[int], *, grace_s: float | None = None
    ) -> None:
        self.tick("replace")
        for index in members:
            self.cluster.members.pop(index, None)
        self._create(placement, members)

    def adopt(self, placement: Placement) -> frozenset[int]:
        if self.cluster.placement != placement.number:
            return frozenset()
        return frozenset(
            i for i, (m, _) in self.cluster.members.items() if m.node not in self.cluster.lost
        )

    def greet(self) -> dict[int, ClockProbe]:
        self.tick("greet")
        return {
            i: ClockProbe(m.node, "127.0.0.1", 1, self.cluster.clock_s, 0.0)
            for i, (m, _) in self.cluster.members.items()
        }

    def check(self, orders: Mapping[int, CheckOrder]) -> Sequence[Check]:
        self.tick("check")
        self.cluster.checked.append({i: order.is_new for i, order in orders.items()})
        nodes = [self.cluster.members[index][0].node for index in orders]
        return [check for node in nodes for check in self.cluster.checks.get(node, ())]

    def heal(self, node: str, order: HealOrder) -> HealReply:
        self.tick("heal")
        self.cluster.healed.append((node, order))
        is_good = node not in self.cluster.ill
        act = ActDone(Act.CHECK, is_good, "computes right" if is_good else "device 0: Alarm")
        done = ChipsHealed(
            at_s=6.0, number=1, node=node, rung=order.rung, succeeded=is_good, acts=(act,),
            seconds=0.5,
        )  # fmt: skip
        return HealReply(done=done)

    def start(self, order: StartOrder) -> None:
        key = (order.placement, order.attempt)
        self.cluster.orders.append(order)
        for index in range(order.num_nodes):
            self.tick(f"start {index}")
            if index not in self.cluster.members:
                raise AgentUnreachable(f"the agent of member {index} is gone")
            member, starts = self.cluster.members[index]
            if member.node in self.cluster.lost:
                raise AgentUnreachable(f"the agent of {member.node} is gone")
            done = self.cluster.started.setdefault(key, set())
            if index not in done:
                done.add(index)
                self.cluster.members[index] = (member, starts + 1)
        self.cluster.now = key
        if self.cluster.outcome == "node lost":
            self.cluster.lost.add(self.cluster.members[1][0].node)

    def poll(self) -> Snapshot:
        cluster = self.cluster
        if cluster.now is not None:
            cluster.written.add(cluster.now)
        agents, lost = {}, []
        for index, (member, starts) in cluster.members.items():
            if member.node in cluster.lost:
                lost.append(member.node)
                continue
            key = max((k for k, done in cluster.started.items() if index in done), default=(0, 0))
            state = AgentState.ENDED if starts else AgentState.IDLE
            code, error = WORKER_ENDS[cluster.outcome]
            worker = WorkerStatus(
                rank=index, local_rank=0, pid=1, exit_code=code, ended_s=5.0, error=error
            )
            agents[index] = AgentStatus(
                node=member.node, member=index, state=state, schedule_cnt=member.schedule_cnt,
                proc_start_cnt=starts, placement=key[0], attempt=key[1],
                workers=(worker,) if starts else (),
            )  # fmt: skip
        return Snapshot(agents, tuple(lost))

    def stop(self, grace_s: float) -> None:
        pass

    def metrics(self, offset: int, *, of_attempt: tuple[int, int] | None = None) -> tuple[str, int]:
        now = self.cluster.now
        text = self.cluster.live.get(now, "") if now in self.cluster.written else ""
        return text[offset:], len(text)

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        return []

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        return []

    def texts(
        self, tail_bytes: int, *, since_s: float, of_attempt: tuple[int, int] | None = None
    ) -> Sequence[tuple[str, NodeLog]]:
        return []

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:
        return []

    def stacks(self) -> Sequence[tuple[str, NodeLog]]:
        return []

    def collect_logs(self, placement: int, attempt: int) -> Sequence[tuple[str, Collected]]:
        return []

    def cancel(self, grace_s: float) -> None:
        self.tick("cancel")
        self.cluster.members = {}


class ClusterRun(RunSupervisor):
    """A run on a cluster in memory."""

    cluster: Cluster

    def _make_fleet(self, epoch: int) -> Any:
        return FakeFleet(self.cluster, lambda _action: None)


class Scheduled(FakeFleet):
    """The fleet of an engine that chooses nodes.

    Attributes:
        usable: names of the nodes that the platform shows; None: it shows none.
    """

    usable: frozenset[str] | None = None

    def nodes(self) -> Sequence[str] | None:
        return None

    def usable_nodes(self) -> Any:
        return self.usable

    def adopt(self, placement: Placement) -> frozenset[int]:
        counts = {member.index: member.schedule_cnt for member in placement.members}
        return frozenset(
            index
            for index, (member, _) in self.cluster.members.items()
            if member.schedule_cnt == counts[index] and index not in self.cluster.deleted
        )

    def resolve_nodes(
        self, placement: Placement, members: Collection[int] | None = None
    ) -> Placement:
        free = (f"k{i}" for i in range(100) if f"k{i}" not in (*placement.avoid, *placement.nodes))
        return placement.with_nodes({m.index: m.node or next(free) for m in placement.members})


class ScheduledRun(ClusterRun):
    """A run whose nodes an engine chooses."""

    usable: frozenset[str] | None = None

    def _make_fleet(self, epoch: int) -> Any:
        fleet = Scheduled(self.cluster, lambda _action: None)
        fleet.usable = self.usable
        return fleet


def supervise(run: RunSupervisor, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
    """Take a run and bring it to its end, without Prefect."""
    if not run.take().ended_well:
        run_to_completion(RunSteps(run, on_progress=on_progress), log=logging.getLogger("test"))
