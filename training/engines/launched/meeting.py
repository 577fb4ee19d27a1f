"""The nodes of a launched run find each other through its store.

Each `perdure launch` puts a signed registration there. Of two that exclude each other, the
earlier one stays: a node that comes twice, with another version or another job file is told so.
Times are seconds since the epoch.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from pydantic import SecretStr, ValidationError

from perdure.storage.errors import NotFound, PreconditionFailed
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.engines.launched.messages import (
    Claim,
    HelloQuery,
    HostOrder,
    HostReply,
    HostRequest,
    Registration,
)
from perdure.training.engines.launched.secret import LaunchSecret
from perdure.training.errors import AgentUnreachable, EngineError, InputError
from perdure.training.wire.transport import FanOut, TimedLine

HELLO_TIMEOUT_S = 3.0


def fingerprint(job: Job) -> str:
    """Compute what two nodes with the same job file have in common."""
    return hashlib.sha256(job.model_dump_json().encode()).hexdigest()[:16]


def signed(registration: Registration, secret: LaunchSecret) -> Registration:
    """Sign a registration."""
    signature = secret.sign(registration.signed_text)
    return registration.model_copy(update={"signature": signature})


@dataclass(frozen=True, slots=True)
class Registrations:
    """The registrations of a run in its store.

    Attributes:
        store: of the run.
        run_id: name of the run.
        secret: the run's.
    """

    store: ObjectStore
    run_id: str
    secret: LaunchSecret

    @property
    def _prefix(self) -> str:
        return f"runs/{self.run_id}/launch/"

    def _key(self, registration: Registration) -> str:
        return f"{self._prefix}{registration.node_rank:05d}-{registration.instance}.json"

    def put(self, registration: Registration) -> None:
        """Put a registration, or put it again."""
        self.store.put(self._key(registration), registration.model_dump_json().encode())

    def delete(self, registration: Registration) -> None:
        """Delete a registration."""
        self.store.delete(self._key(registration))

    def read(self) -> tuple[list[Registration], int]:
        """Read all that are signed, and count the others."""
        authentic: list[Registration] = []
        num_others = 0
        for info in self.store.list(self._prefix):
            with suppress(NotFound):  # its node has just left
                registration = self._parsed(self.store.get(info.key))
                if registration is None:
                    num_others += 1
                else:
                    authentic.append(registration)
        return authentic, num_others

    @property
    def _claim_key(self) -> str:
        return f"runs/{self.run_id}/launch-claim.json"

    def claim(self, claim: Claim) -> bool:
        """Say that this node is starting a supervisor. Returns whether no other one has."""
        try:
            self.store.put(self._claim_key, claim.model_dump_json().encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True

    def read_claim(self) -> Claim | None:
        """Read the claim that is there; None: there is none."""
        try:
            return Claim.model_validate_json(self.store.get(self._claim_key))
        except (NotFound, ValidationError):
            return None

    def withdraw_claim(self) -> None:
        """Delete the claim: its supervisor has not come to anything, or it was too long ago."""
        self.store.delete(self._claim_key)

    def _parsed(self, data: bytes) -> Registration | None:
        try:
            registration = Registration.model_validate_json(data)
        except ValidationError:
            return None
        is_signed = self.secret.is_signed(registration.signed_text, registration.signature)
        return registration if is_signed else None


class HostCalls:
    """Calls to the `perdure launch` of nodes; a reply that is not signed is none.

    Args:
        secret: the run's.
        epoch: the supervisor's; 0: of nobody who gives orders.
    """

    def __init__(self, secret: LaunchSecret, epoch: int = 0) -> None:
        self._secret = secret
        self._epoch = epoch
        self._fan_out = FanOut()

    def send(
        self, registration: Registration, order: HostOrder, *, timeout_s: float
    ) -> tuple[str, Future[TimedLine]]:
        """Send an order. Returns its nonce and the future of the answer."""
        nonce = secrets.token_hex(16)
        token = self._secret.token(registration.node, registration.instance)
        request = HostRequest(token=SecretStr(token), epoch=self._epoch, nonce=nonce, order=order)
        sent = self._fan_out.call(
            registration.host, registration.port, request, timeout_s=timeout_s
        )
        return nonce, sent

    def receive(self, registration: Registration, nonce: str, sent: Future[TimedLine]) -> HostReply:
        """Wait for the answer to an order.

        Raises:
            ConnectionRefusedError: nothing listens there any more.
            AgentUnreachable: there is no answer, or one of somebody else.
            EngineError: the node refuses the order.
        """
        at = f"perdure launch on {registration.node} ({registration.host}:{registration.port})"
        try:
            reply = HostReply.model_validate_json(sent.result().line)
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError) as error:
            raise AgentUnreachable(f"{at}: {error or type(error).__name__}") from error
        if reply.instance != registration.instance or not self._secret.is_signed(
            nonce + reply.signed_text, reply.signature
        ):
            raise AgentUnreachable(f"{at}: another program answers there")
        if reply.error is not None:
            raise EngineError(f"{at}: {reply.error}")
        return reply

    def living(self, registrations: Iterable[Registration]) -> list[Registration]:
        """The nodes of these registrations that answer now."""
        return self.tell(registrations, HelloQuery(), timeout_s=HELLO_TIMEOUT_S)

    def tell(
        self, registrations: Iterable[Registration], order: HostOrder, *, timeout_s: float
    ) -> list[Registration]:
        """Give nodes an order, all at once. Returns those that obey."""
        sent = [(r, *self.send(r, order, timeout_s=timeout_s)) for r in registrations]
        obedient: list[Registration] = []
        for registration, nonce, answer in sent:
            with suppress(ConnectionRefusedError, AgentUnreachable, EngineError):
                self.receive(registration, nonce, answer)
                obedient.append(registration)
        return obedient


def order_of(registration: Registration) -> tuple[float, str]:
    """Sort key by which the earlier of two registrations stays."""
    return registration.started_s, registration.instance


def refusal_of(node: Registration, living: Collection[Registration]) -> InputError | None:
    """Explain why a node may not join those that live; None: it may.

    Args:
        node: the node's registration.
        living: registrations whose node answers.
    """
    earlier = sorted((r for r in living if order_of(r) < order_of(node)), key=order_of)
    for other in earlier:
        where = f"process {other.pid} on {other.host}"
        if other.node_rank == node.node_rank:
            return InputError("--node-rank", f"node {node.node_rank} is there already: {where}")
        if other.node == node.node:
            text = f"{node.node} is there already, as node {other.node_rank}: {where}; start one"
            return InputError("--node-name", f"{text} `perdure launch` on each node")
    if earlier:
        first = earlier[0]
        if first.version != node.version:
            text = f"this node has {node.version}, and {first.node} has {first.version}"
            return InputError("version of Perdure", text)
        if first.job != node.job:
            text = f"differs from that of {first.node}; all nodes need the same job and --set"
            return InputError("job file", text)
    return None


def by_node(registrations: Iterable[Registration]) -> Mapping[str, Registration]:
    """The newest registration of each node: an earlier one is of a container that is gone."""
    return {r.node: r for r in sorted(registrations, key=order_of)}


def in_order(registrations: Iterable[Registration]) -> Sequence[Registration]:
    """Registrations in the order of their nodes' ranks."""
    return sorted(registrations, key=lambda r: (r.node_rank, r.node))
