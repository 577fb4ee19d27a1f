"""The supervisor of a launched run: one of its nodes, as the lease of the run decides.

Every node looks whether the run is supervised. Where it is not, the nodes start a supervisor, each
a little later than the one before, spares first: a supervisor on a node that does not train is
lost with none that does. Two that start at once are no harm, since only one takes the run. Times
are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from perdure.storage.errors import StorageError
from perdure.training.engines.launched.meeting import (
    HostCalls,
    Registrations,
    in_order,
    refusal_of,
)
from perdure.training.engines.launched.messages import Claim, LeaveOrder, Registration
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.records import NodeReleased, RunEnded

LOOK_S = 2.0  # between two looks at the lease
TURN_S = 1.0  # between two nodes that would both start a supervisor
LAST_TURN = 8
RETRY_S, LONGEST_RETRY_S = 5.0, 60.0  # after a supervisor of this node that could not begin
EXIT_INPUT = 2
LEAVE_TIMEOUT_S = 3.0
CLAIM_S = 120.0  # for a supervisor to start, with its server; after that others start one, too
REGISTER_S = 15.0  # another node may have taken this one for dead, and deleted its registration
SPARES_WAIT_S = 20.0  # for spares, once there are as many nodes as train

_log = logging.getLogger("perdure.launch")


@dataclass(frozen=True, slots=True)
class Gathering:
    """How many nodes a supervisor begins with.

    Attributes:
        needed: without which there is no run.
        all_nodes: of the allocation.
        timeout_s: for the nodes that are needed.
    """

    needed: int
    all_nodes: int
    timeout_s: float

    def is_over(self, num_living: int, *, waited_s: float, enough_s: float) -> bool:
        """Whether a supervisor begins with the nodes that are there.

        Args:
            num_living: nodes that are there.
            waited_s: since this node came.
            enough_s: since there are enough.

        Raises:
            InputError: there are too few, and the time is over.
        """
        if num_living >= self.all_nodes:
            return True
        if num_living >= self.needed:
            return enough_s >= SPARES_WAIT_S
        if waited_s > self.timeout_s:
            text = (
                f"{self.needed}: only {num_living} came within {self.timeout_s:g} s "
                "(engine.gather_timeout_s); the store and the secret must be the same on all nodes"
            )
            raise InputError("engine.nodes", text)
        return False


class Election(threading.Thread):
    """Looks after the supervisor of a run from one node, until the run has ended.

    Attributes:
        registration: of this node.
        ended: the end of the run.
        history: of the run, when it had ended.
        refusal: why this node, or the run, cannot go on.
        nodes: names of all nodes that have been here.

    Args:
        registration: of this node.
        registrations: of all nodes.
        calls: to the other nodes.
        ledger: of the run.
        gathering: how many nodes are awaited at first.
        command: starts a supervisor; empty: it is outside.
        start: starts a process.
        has_trained: whether a member has had a container of this `perdure launch`.
    """

    def __init__(
        self,
        registration: Registration,
        registrations: Registrations,
        calls: HostCalls,
        ledger: Ledger,
        gathering: Gathering,
        *,
        command: Sequence[str],
        start: Callable[[Sequence[str]], subprocess.Popen[bytes]],
        has_trained: Callable[[], bool],
    ) -> None:
        super().__init__(name="perdure-election", daemon=True)
        self.ended: RunEnded | None = None
        self.refusal: InputError | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.registration, self.history = registration, RunHistory()
        self.nodes: set[str] = set()
        self._registrations, self._calls = registrations, calls
        self._ledger, self._gathering = ledger, gathering
        self._command, self._start = command, start
        self._has_trained = has_trained
        self._first_epoch: int | None = None
        self._came_s = time.monotonic()
        self._enough_s: float | None = None
        self._registered_s = float("-inf")
        self._has_gathered = False
        self._retry_s, self._not_before_s = RETRY_S, 0.0
        self._closed = threading.Event()

    def close(self) -> None:
        """Start no supervisor any more."""
        self._closed.set()

    def read_history(self) -> RunHistory:
        """Read what is on record of the run."""
        return self._ledger.read()

    def lead_others_out(self) -> None:
        """Have all other nodes leave the allocation now."""
        with suppress(StorageError):
            registrations, _ = self._registrations.read()
            calls = HostCalls(self._registrations.secret, self._ledger.read().epoch)
            calls.tell(registrations, LeaveOrder(), timeout_s=LEAVE_TIMEOUT_S)

    def run(self) -> None:
        """Look, until the run has ended."""
        while not self._closed.wait(LOOK_S) and self.ended is None:
            try:
                self._look()
            except StorageError as error:  # nobody can take the run meanwhile
                _log.warning("the run's store does not answer: %s", error)
            except InputError as error:
                self.refusal = error
                return

    def _look(self) -> None:
        if time.monotonic() - self._registered_s > REGISTER_S:
            self.meet()
            self._rejoin()
        if self._first_epoch is None:
            self._first_epoch = self._ledger.read().epoch
            self._rejoin()
        if self._ledger.is_supervised():
            self._has_gathered, self._retry_s = True, RETRY_S
            return
        self._check_supervisor()
        history = self._ledger.read()
        if self._is_end(history):
            self.history, self.ended = history, history.ended
        elif self._command and self._may_start and self._is_gathered():
            self._take_turn()

    def _rejoin(self) -> None:
        """Make this node a spare again, if it was isolated for a loss that came before it."""
        node = self.registration.node
        if not self._has_trained() and self._ledger.read().may_rejoin(node):
            _log.info("%s was lost and is back: it is a spare from now on", node)
            self._ledger.note(NodeReleased, node=node)

    def _check_supervisor(self) -> None:
        """Look how the supervisor of this node has ended.

        Raises:
            InputError: the job is wrong, as the supervisor has said on its line.
        """
        if self.supervisor is None or self.supervisor.poll() is None:
            return
        code, self.supervisor = self.supervisor.returncode, None
        if code == EXIT_INPUT:
            raise InputError("job file", "cannot be run, see above")
        self._withdraw()
        self._not_before_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    def _is_end(self, history: RunHistory) -> bool:
        """Whether the run has ended since this node came, and nobody has taken it further."""
        ended, first_epoch = history.ended, self._first_epoch or 0
        if ended is None or ended.epoch <= first_epoch:
            return False
        return ended.epoch == history.epoch or ended.outcome == "completed"

    @property
    def _may_start(self) -> bool:
        """Whether this node has no supervisor that is just starting, or has just failed."""
        return self.supervisor is None and time.monotonic() >= self._not_before_s

    def meet(self) -> list[Registration]:
        """Register this node, and look for the others.

        Raises:
            InputError: this node may not join them.
        """
        self._registrations.put(self.registration)
        self._registered_s = time.monotonic()
        registrations, _ = self._registrations.read()
        living = self._calls.living(registrations)
        self.nodes |= {registration.node for registration in living}
        refusal = refusal_of(self.registration, living)
        if refusal is not None:
            raise refusal
        alive = {registration.instance for registration in living}
        for registration in registrations:
            if registration.instance not in alive | {self.registration.instance}:
                with suppress(StorageError):
                    self._registrations.delete(registration)
        return living

    def _is_gathered(self) -> bool:
        if self._has_gathered:
            return True
        living, now_s = self.meet(), time.monotonic()
        if len(living) >= self._gathering.needed and self._enough_s is None:
            self._enough_s = now_s
        enough_s = now_s - self._enough_s if self._enough_s is not None else 0.0
        self._has_gathered = self._gathering.is_over(
            len(living), waited_s=now_s - self._came_s, enough_s=enough_s
        )
        return self._has_gathered

    def _take_turn(self) -> None:
        """Start a supervisor, unless a node before this one in the row has."""
        living = in_order(self._calls.living(self._registrations.read()[0]))
        later = sum(registration.node_rank > self.registration.node_rank for registration in living)
        if self._closed.wait(TURN_S * min(later, LAST_TURN)) or self._ledger.is_supervised():
            return
        epoch = self._ledger.read().epoch
        if not self._has_claimed(epoch, {registration.instance for registration in living}):
            return
        _log.info(
            "%s supervises run %s from now on", self.registration.node, self._registrations.run_id
        )
        self.supervisor = self._start(self._command)

    def _has_claimed(self, epoch: int, living: Collection[str]) -> bool:
        """Whether this node is the one that starts a supervisor now."""
        now_s = time.time()
        claim = self._registrations.read_claim()
        if claim is not None:
            is_new = claim.epoch == epoch and now_s - claim.at_s < CLAIM_S
            if is_new and claim.instance in living and claim.instance != self.registration.instance:
                return False
            self._registrations.withdraw_claim()
        return self._registrations.claim(
            Claim(instance=self.registration.instance, epoch=epoch, at_s=now_s)
        )

    def _withdraw(self) -> None:
        claim = self._registrations.read_claim()
        if claim is not None and claim.instance == self.registration.instance:
            self._registrations.withdraw_claim()
