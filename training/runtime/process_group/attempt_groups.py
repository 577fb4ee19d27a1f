"""This process's place in the process groups of its attempt, under the attempt's coordinator."""

from __future__ import annotations

import datetime as dt
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from perdure.training.device import healing_of
from perdure.training.liveness.heartbeat import HeartbeatWriter
from perdure.training.recovery.protocol import Reconnected, WorkerFault, WorkerFaultKind
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.coordinator_client import CoordinatorClient
from perdure.training.runtime.errors import WorkerError
from perdure.training.runtime.process_group.generations import GLOO, Generations, StoreClient
from perdure.training.runtime.process_group.reconfigurable import NewGroup, install
from perdure.training.runtime.process_group.replay import (
    ReplayableConnections,
    ReplayableProcessGroup,
)
from perdure.training.wire.coordinator import CoordinatorAddress

MAX_WAIT = dt.timedelta(days=30)  # a rank that does not come is for the limits of silence


class RankMembership:
    """The groups of this process; joins the current generation, or waits for one to join.

    Args:
        context: rank, job and folders of this process.
        coordinator: file with the address of the coordinator.
        device: the rank's accelerator, or the CPU.
        heartbeat: counts collectives.

    Attributes:
        generations: the present and the announced generation.
        client: connection to the coordinator.
        step: newest completed step, for the reports of broken connections.
        connections: those replaceable within a generation; None: the backend has none.
    """

    def __init__(
        self,
        context: WorkerContext,
        coordinator: Path,
        device: torch.device,
        heartbeat: HeartbeatWriter,
    ) -> None:
        self.step = 0
        self.generations = Generations(
            context.rank,
            device=device,
            op_timeout_s=context.job.comm.timeout_s,
            open_store=_open_store,
            on_collective=heartbeat.enter_collective,
            on_collective_end=heartbeat.leave_collective,
            on_transfer=heartbeat.begin_transfer,
            stop_device=healing_of(device).stop,
        )
        self.connections = self._install_groups(context)
        self.client = CoordinatorClient(
            coordinator,
            rank=context.rank,
            on_generation=self.generations.announce,
            on_wait=heartbeat.beat,
            layout=context.own_layout,
            rejoin_s=context.rejoin_s,
            on_moved=_moved,
        )
        if self.connections is not None:
            self.generations.on_announced = self.connections.fail
            self.client.on_reconnect = partial(self._reconnect, self.connections)
        if context.generation is None:
            self.generations.enter(self.client.newer_than(0))
        else:
            # The others built their groups together. Here they are built alone; state comes later.
            self.generations.is_alone = True

    def _install_groups(self, context: WorkerContext) -> ReplayableConnections | None:
        """Install the default group of this process; gloo's connections can be replaced."""
        connections: ReplayableConnections | None = None
        new_group: NewGroup | None = None
        if self.generations.backend == GLOO:
            connections = ReplayableConnections(
                self.generations,
                open_store=_open_store,
                report=self._report_broken,
                budget_s=context.job.comm.link_retry_s,
                replays=context.job.comm.link_retry,
            )
            new_group = partial(ReplayableProcessGroup, self.generations, connections)
        install(self.generations, world_size=context.world_size, new_group=new_group)
        return connections

    def wait_for_all(self, size: int, *, place: str) -> None:
        """Wait until every rank has come to a place in the program; collective.

        Args:
            size: number of ranks.
            place: for the heartbeats.

        Raises:
            Interrupted: a newer generation is announced.
            RuntimeError: the rendezvous store is lost.
        """
        generations = self.generations
        if generations.is_alone or size == 1:
            return
        generations.check()
        generations.on_collective(place)
        try:
            meet(generations.open_prefix("meetings"), size)
        finally:
            generations.check()
        generations.on_collective_end()

    def end_step(self) -> None:
        """Drop the operations of a step that all ranks have completed."""
        if self.connections is not None:
            self.connections.end_step()

    def _report_broken(self, text: str, number: int) -> None:
        """Report connections that broke under an operation; the training thread goes on waiting."""
        self.client.send(
            WorkerFault(
                generation=self.generations.current,
                kind=WorkerFaultKind.CONNECTION,
                text=text.strip().splitlines()[0][:500],
                step=self.step,
                at_s=time.time(),
                connection=number,
            )
        )

    def _reconnect(self, connections: ReplayableConnections, generation: int, number: int) -> None:
        """Replace the connections under operations that were cut short; in a thread of its own."""
        count, problem = 0, None
        try:
            count = connections.reconnect(generation, number)
        except (RuntimeError, WorkerError) as exc:
            problem = f"{type(exc).__name__}: {exc}"[:500]
        self.client.send(
            Reconnected(generation=generation, connection=number, operations=count, problem=problem)
        )


def meet(store: Store, size: int) -> None:
    """Wait for all ranks, for as long as it takes: a library's barrier ends after its limit.

    Args:
        store: common to the ranks, which may meet in it again and again.
        size: number of ranks.
    """
    arrivals = store.add("arrivals", 1)
    meeting = (arrivals - 1) // size
    if arrivals % size == 0:
        store.set(f"all-{meeting}", "")
    store.wait([f"all-{meeting}"], MAX_WAIT)


def _moved(address: CoordinatorAddress) -> None:
    """Go over to the rendezvous store beside the new coordinator."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.host, str(address.store_port)


def _open_store() -> StoreClient:
    return StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
