"""A node of a launched run: `perdure launch` from its start to its exit code.

Times are seconds of CLOCK_MONOTONIC, but for those of the allocation.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from perdure.storage.address import Credentials, make_store, open_store, worker_environment
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.config.engine import LaunchedEngineSpec
from perdure.training.config.job import Job
from perdure.training.engines.launched.election import Election, Gathering
from perdure.training.engines.launched.ends import (
    AGAIN,
    ENDS,
    LaunchEnd,
    PlatformEnd,
    again_without,
    end_of,
)
from perdure.training.engines.launched.identity import NodeIdentity
from perdure.training.engines.launched.meeting import (
    HostCalls,
    Registrations,
    fingerprint,
    signed,
)
from perdure.training.engines.launched.messages import Registration
from perdure.training.engines.launched.node_host import NodeHost
from perdure.training.engines.launched.secret import LaunchSecret
from perdure.training.engines.launched.slurm import is_cancelled
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.processes import address_towards
from perdure.training.recovery.faults import TRAITS

WORK_S = 0.2  # between two looks of the main thread
OTHERS_LEAVE_AFTER_S = 5.0  # without a word of the supervisor's node
LEAVING_MARGIN_S = 10.0  # behind the grace period: last words of agents and supervisor
_FAR_ADDRESS = ("192.0.2.1", 9)  # of no machine (RFC 5737): the way there is the default one

_log = logging.getLogger("perdure.launch")


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How a node's `perdure launch` ends.

    Attributes:
        nodes: that the next allocation is to do without.
    """

    end: LaunchEnd
    message: str
    on_platform: PlatformEnd
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchedNode:
    """This node of a run.

    Attributes:
        job: to be run.
        identity: the node's place.
        home: Perdure's folder on this node.
        secret: the run's.
        credentials: keys of the job's store; None: boto3's default chain.
        command: starts a supervisor; empty: it is outside.
        cancel: has the run end as cancelled, whose processes have ended.
        variables: of a supervisor that begins now.
        leaves_s: seconds before the end of the allocation at which the run saves.
    """

    job: Job
    identity: NodeIdentity
    home: Path
    secret: LaunchSecret
    credentials: Credentials | None
    command: Sequence[str]
    cancel: Callable[[], None]
    variables: Callable[[], Mapping[str, str]]
    leaves_s: float

    def run(self) -> NodeEnd:
        """Take part in the run, until it has ended or this node is to leave it.

        Raises:
            InputError: this node may not take part.
            StorageError: the store cannot be used.
        """
        make_store(self.job.storage)
        store = open_store(self.job.storage, self.credentials)
        is_terminated = _noted_termination()
        instance = uuid.uuid4().hex[:12]
        host = NodeHost(
            self.identity.name,
            instance,
            folder=self.home / "runs" / self.job.run_id,
            host=own_address(self.identity),
            secret=self.secret,
            secrets_env=worker_environment(self.job.storage, self.credentials),
        )
        host.start()
        election = self._election(store, host, instance)
        try:
            election.meet()
            host.end_remains()  # not before: a second command must not end the first one's
            election.start()
            while election.ended is None and election.refusal is None:
                host.work(WORK_S)
                if is_terminated or host.is_leaving or self._is_due(election):
                    return self._leave(host, election, is_due=not is_terminated)
        except InputError:
            host.close()
            raise
        finally:
            election.close()
            with suppress(StorageError):
                self._registrations(store).delete(election.registration)
        try:
            if election.refusal is not None:
                raise election.refusal
            return self._end(election)
        finally:
            self._await_supervisor(election)
            host.close()

    def _is_due(self, election: Election) -> bool:
        """Whether the allocation is about to end.

        The supervisor's node has the others leave at the same moment: clocks differ.
        """
        if self.identity.deadline_s is None:
            return False
        late_s = 0.0 if election.supervisor is not None else OTHERS_LEAVE_AFTER_S
        return time.time() >= self.identity.deadline_s - self.leaves_s + late_s

    def _registrations(self, store: ObjectStore) -> Registrations:
        return Registrations(store, self.job.run_id, self.secret)

    def _election(self, store: ObjectStore, host: NodeHost, instance: str) -> Election:
        spec, identity = self.job.engine, self.identity
        assert isinstance(spec, LaunchedEngineSpec)  # noqa: S101 the command sees to it
        registration = Registration(
            node=identity.name,
            node_rank=identity.node_rank,
            instance=instance,
            started_s=time.time(),
            host=own_address(identity),
            port=host.port,
            pid=os.getpid(),
            version=version("perdure"),
            job=fingerprint(self.job),
            allocation=identity.allocation,
        )
        return Election(
            signed(registration, self.secret),
            self._registrations(store),
            HostCalls(self.secret),
            Ledger(store, self.job.run_id, lease_s=spec.lease_s),
            Gathering(spec.nodes, identity.num_nodes, spec.gather_timeout_s),
            command=self.command,
            start=self._start_supervisor,
            has_trained=lambda: host.has_trained,
        )

    def _end(self, election: Election) -> NodeEnd:
        ended = election.ended
        assert ended is not None  # noqa: S101 the loop was left for it
        history = election.history
        num_healthy = self.identity.num_nodes - len(election.nodes.intersection(history.isolated))
        end = end_of(
            ended.outcome,
            is_user_fault=_is_user_fault(history),
            is_short_of_nodes=num_healthy < self.job.engine.nodes,
        )
        message = f"{ended.outcome}: {ended.message}"
        return self._again(message, history) if end in AGAIN else self._told(end, message)

    def _again(self, message: str, history: RunHistory) -> NodeEnd:
        end, nodes = again_without(history)
        at_fault = f"; nodes at fault: {', '.join(nodes)}" if nodes else ""
        return self._told(end, f"{message}{at_fault}", nodes)

    def _told(self, end: LaunchEnd, message: str, nodes: tuple[str, ...] = ()) -> NodeEnd:
        return NodeEnd(end, message, ENDS[self.identity.platform][end].without(nodes), nodes)

    def _leave(self, host: NodeHost, election: Election, *, is_due: bool) -> NodeEnd:
        """Have everything of this node save and end, as far as the platform's time goes."""
        election.close()
        supervisor = election.supervisor
        if is_due and supervisor is not None:
            election.lead_others_out()
        host.terminate()
        if supervisor is not None:
            with suppress(ProcessLookupError):
                supervisor.terminate()
        by_person = not is_due and is_cancelled(self.identity)
        until_s = time.monotonic() + self.job.engine.grace_s + LEAVING_MARGIN_S
        while time.monotonic() < until_s:
            host.work(WORK_S)
            if host.is_empty and (supervisor is None or supervisor.poll() is not None):
                break
        host.close()
        if not by_person:
            message = "this node was asked to end, and has saved"
            try:
                return self._again(message, election.read_history())
            except StorageError:
                return self._told(LaunchEnd.START_AGAIN, message)
        # Nobody but the supervisor's node: only its Prefect server may have the run.
        if supervisor is not None or (not self.command and self.identity.node_rank == 0):
            self.cancel()
        return self._told(LaunchEnd.CANCELLED, "its allocation was cancelled, and it has saved")

    def _start_supervisor(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a supervisor on this node; what it prints is this command's output."""
        return subprocess.Popen(command, env=self.variables(), stdin=subprocess.DEVNULL)

    def _await_supervisor(self, election: Election) -> None:
        """Let the supervisor of this node print its last words."""
        if election.supervisor is not None:
            with suppress(subprocess.TimeoutExpired):
                election.supervisor.wait(timeout=60.0)


def own_address(identity: NodeIdentity) -> str:
    """Find the address of this node for the others.

    Raises:
        InputError: it has none.
    """
    if identity.address:
        return identity.address
    host, _, port = identity.rendezvous.rpartition(":")
    towards = (host, int(port)) if host and port.isdecimal() else _FAR_ADDRESS
    address = address_towards(*towards)
    if address is not None:
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        raise InputError("--host", "this node has no address that can be seen; give it") from None


def _noted_termination() -> Sequence[int]:
    """Note SIGTERM and Ctrl-C from now on, in a list that is empty until then."""
    numbers: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: numbers.append(received))
    return numbers


def _is_user_fault(history: RunHistory) -> bool:
    fault = history.attempts[-1].fault if history.attempts else None
    return fault is not None and TRAITS[fault.fault_class].user_fault
