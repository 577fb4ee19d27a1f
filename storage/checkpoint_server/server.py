"""The checkpoint server's threads: one per connection, pools for disk, uploads and commits.

Sizes are bytes, times seconds.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.copying import Copier
from perdure.storage.checkpoint_server.peers import PeerServer, bring
from perdure.storage.checkpoint_server.protocol import (
    REQUEST,
    Bring,
    CopyAgain,
    CopyStateQuery,
    Greet,
    HeldShare,
    ListShares,
    Open,
    Prepare,
    Ready,
    Reply,
    Republish,
    Request,
    Reserve,
    SetPartners,
    Settle,
    check_peer,
    receive,
    send,
)
from perdure.storage.checkpoint_server.publish import (
    Committing,
    Publisher,
    is_recorded,
    shares_on_disk,
)
from perdure.storage.checkpoint_server.slots import NoMemory, Slot, SlotTable
from perdure.storage.checkpoint_server.slots import available_bytes as host_available_bytes
from perdure.storage.checkpoint_server.tasks import Tasks
from perdure.storage.errors import StorageError
from perdure.storage.share import SaveId, WrittenShare, read_share

_log = logging.getLogger("perdure.storage")

DISK_THREADS = 4
UPLOAD_THREADS = 4
COMMIT_THREADS = 4
# At the end the checkpoint servers of other nodes upload too; a commit gives them this long.
OTHERS_WAIT_S = 10.0
ACCEPT_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class _Connection:
    """The connection of a worker, and the slots that it reads."""

    socket: socket.socket
    reading: list[Slot] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Copying:
    """Settings of copies between nodes, of this node's shares and of those it takes.

    Attributes:
        host: address that it listens on for them.
        bytes_per_s: limit of what it sends; None: none.
    """

    host: str
    bytes_per_s: float | None = None


class CheckpointServer:
    """Holds the checkpoints of a node's ranks and publishes them.

    Args:
        name: name of the socket in the abstract namespace.
        publisher: writes and commits.
        disk: the node's disk tier, if there is one.
        store: the run's checkpoints in the object store.
        available_bytes: returns how much memory the host can still give.
        note: called with what the memory holds whenever that changes.
        copying: None: nothing is copied from node to node.
    """

    def __init__(
        self,
        name: str,
        *,
        publisher: Publisher,
        store: CheckpointStore,
        disk: CheckpointStore | None,
        available_bytes: Callable[[], int] | None = None,
        note: Callable[[Sequence[tuple[SaveId, int]]], None] = lambda _saves: None,
        copying: Copying | None = None,
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._disk = disk
        self._note = note
        self._slots = SlotTable(available_bytes or host_available_bytes)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        # Apart: a store that hangs keeps no share from the disk, nor an upload from its turn.
        self._disk_writes = ThreadPoolExecutor(DISK_THREADS)
        self._uploads = ThreadPoolExecutor(UPLOAD_THREADS)
        self._commits = ThreadPoolExecutor(COMMIT_THREADS)
        self._tasks = Tasks()
        self._lock = threading.Lock()
        self._republished: set[tuple[tuple[int, int], SaveId, int]] = set()
        self._noting = threading.Lock()
        self._noted: Sequence[tuple[SaveId, int]] = []
        self._closing = threading.Event()
        self._copier: Copier | None = None
        self._peers: PeerServer | None = None
        self._ranks: tuple[int, ...] | None = None  # whose shares are held here
        if copying is not None:
            self._copier = Copier(self._slots, copying.bytes_per_s)
            self._peers = PeerServer(
                copying.host, self._slots, run_id=store.run_id, changed=self._note_held
            )

    def serve(self) -> None:
        """Answer until `close`."""
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
                threading.Thread(
                    target=self._converse, args=(_Connection(accepted),), daemon=True
                ).start()
            except (OSError, RuntimeError) as exc:
                if not self._closing.is_set():
                    # Out of descriptors or threads, perhaps: the saves that are held outlast it.
                    _log.error(f"no connection taken: {exc}")
                    self._closing.wait(ACCEPT_PAUSE_S)

    def close(self, timeout_s: float) -> bool:
        """Take no more, finish what was handed over. Whether everything was published."""
        deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._peers is not None:
            self._peers.close()
        self._tasks.wait(timeout_s, pools=(self._disk_writes, self._uploads))
        if self._copier is not None:
            self._copier.close()
        left_s = max(0.0, deadline_s - time.monotonic())
        settled = self._tasks.wait(min(OTHERS_WAIT_S, left_s / 2))
        self._publisher.end()
        self._tasks.wait(max(0.0, deadline_s - time.monotonic()))
        return settled

    def _converse(self, connection: _Connection) -> None:
        try:
            check_peer(connection.socket)
            while self._answer_next(connection):
                pass
        except (OSError, ValueError):
            return  # the worker is gone, or is none
        finally:
            self._slots.abandon(connection)
            for slot in connection.reading:
                self._slots.unpin(slot)
            connection.socket.close()

    def _answer_next(self, connection: _Connection) -> bool:
        """Answer one request; False when the worker is gone."""
        data, unused = receive(connection.socket)
        if unused is not None:
            os.close(unused)
        if not data:
            return False
        request = REQUEST.validate_json(data)
        descriptor = None
        try:
            reply, descriptor = self._answer(connection, request)
        except Exception as exc:  # noqa: BLE001 the worker gets it, and others go on
            _log.error(f"{request.op}: {type(exc).__name__}: {exc}")
            reply = Reply(refused=f"the checkpoint server: {type(exc).__name__}: {exc}")
        send(connection.socket, reply, descriptor)
        return True

    def _answer(self, connection: _Connection, request: Request) -> tuple[Reply, int | None]:
        """The reply, and the memory that goes with it."""
        if isinstance(request, Reserve):
            return self._reserve(connection, request)
        if isinstance(request, Open):
            return self._open_share(connection, request)
        return self._plain_answer(connection, request), None

    def _plain_answer(
        self,
        connection: _Connection,
        request: Request,
    ) -> Reply:
        reply = Reply()
        match request:
            case Greet() | SetPartners() | CopyAgain() | CopyStateQuery() | Bring():
                reply = self._answer_of_copies(request)
            case Prepare():
                reply = self._prepare(request)
            case Ready():
                reply = self._ready(connection, request)
            case ListShares():
                reply = Reply(shares=tuple(self._held()))
            case Republish():
                self._republish(request)
            case Settle():
                busy = not self._tasks.wait(request.timeout_s)
                reply = Reply(busy=busy, failure=self._tasks.take_failure(request.owner))
        return reply

    def _answer_of_copies(
        self, request: Greet | SetPartners | CopyAgain | CopyStateQuery | Bring
    ) -> Reply:
        if self._copier is None or self._peers is None:
            return Reply()
        reply = Reply()
        match request:
            case Greet():
                reply = Reply(address=self._peers.address)
            case SetPartners():
                self._copier.set_partners(request.partners)
                self._ranks = request.ranks
            case CopyAgain():
                self._copier.begin(request.save, request.rank, keep=())
            case CopyStateQuery():
                reply = Reply(copies=self._copier.state(request.save, request.rank))
            case Bring():
                bring(self._slots, request.source, request.save, request.rank)
                self._note_held()
        return reply

    def _prepare(self, request: Prepare) -> Reply:
        try:
            self._slots.prepare(request.rank, request.size_bytes, num_slots=request.num_slots)
        except NoMemory as exc:
            return Reply(refused=str(exc))
        return Reply()

    def _reserve(self, connection: _Connection, request: Reserve) -> tuple[Reply, int | None]:
        failure = self._tasks.take_failure(request.owner)
        if failure is not None:  # before a slot is taken: it would stay COPYING
            return Reply(failure=failure), None
        if request.copied is not None and self._ranks is not None:
            # Other nodes hold the copies of these nodes by now.
            self._slots.drop((*self._ranks, request.rank), whole_save=request.copied)
        try:
            slot = self._slots.reserve(
                request.rank,
                request.size_bytes,
                writer=connection,
                timeout_s=request.timeout_s,
                keep=request.keep,
            )
        except NoMemory as exc:
            return Reply(refused=str(exc)), None
        if slot is None:
            return Reply(busy=True), None
        self._note_held()  # no longer what the slot held before
        return _reply_with(slot), slot.descriptor

    def _ready(self, connection: _Connection, request: Ready) -> Reply:
        slot = self._slots.ready(request.slot, request.share, writer=connection)
        if slot is None:
            return Reply(refused=f"slot {request.slot} is not yours")
        self._note_held()
        save = request.share.save_id
        if self._copier is not None and request.keep is not None:
            self._copier.expect(save, request.share.rank)
        task = None
        if request.share.rank == 0:
            announce = Path(request.announce) if request.announce else None
            task = Committing(save, save.owner, announce)
        self._tasks.begin(
            self._disk_writes,
            partial(self._hash_and_write, slot, task, request.keep),
            owner=save.owner,
        )
        return Reply()

    def _note_held(self) -> None:
        # One after the other: they write the same file. A full disk refuses no save.
        with self._noting, suppress(OSError):
            saves = self._slots.saves()
            if saves != self._noted:
                self._noted = saves
                self._note(saves)

    def _hash_and_write(
        self, slot: Slot, task: Committing | None, keep: tuple[SaveId, ...] | None
    ) -> None:
        """Hash a share and put it onto the disk; then it waits its turn for the store."""
        try:
            written = slot.written()
            if self._copier is not None and keep is not None:
                self._copier.begin(written.share.save_id, written.share.rank, keep=keep)
            with slot.view() as view:
                self._publisher.write_to_disk(written, view)
            upload = partial(self._upload, slot, written, task)
            self._tasks.begin(self._uploads, upload, owner=written.share.save_id.owner)
        except BaseException:
            if self._copier is not None and slot.record is None and slot.share is not None:
                self._copier.fail(slot.share.save_id, slot.rank)
            self._slots.settle(slot)
            raise

    def _upload(self, slot: Slot, written: WrittenShare, task: Committing | None) -> None:
        share = written.share
        try:
            # A save under other names than the first ones may be of a step that is committed.
            wanted = not share.save_id.first_file or self._publisher.may_commit(
                share.step, share.save_id.owner
            )
            if wanted:
                with slot.view() as view:
                    self._publisher.upload(written, view)
        finally:
            self._slots.settle(slot)
        if task is not None:
            self._begin_commit(task)

    def _begin_commit(self, task: Committing) -> None:
        self._tasks.begin(self._commits, partial(self._commit, task), owner=task.owner)

    def _commit(self, task: Committing) -> None:
        self._publisher.commit(task)

    def _republish(self, request: Republish) -> None:
        by_save = {
            (held.written.share.save_id, held.written.share.rank): held for held in self._held()
        }
        for (save, rank), held_share in by_save.items():
            share, work = held_share.written.share, None
            if save == request.save and (request.ranks is None or rank in request.ranks):
                work = partial(self._publish_again, save, rank, request.owner)
            elif share.attachments and share.step < request.save.step:
                # Steps of earlier saves that were not published: this one keeps them.
                work = partial(self._publisher.attach, share)
            if work is not None and self._is_first_request(request.owner, save, rank):
                self._tasks.begin(self._uploads, work, owner=request.owner)
        if request.commit:
            announce = Path(request.announce) if request.announce else None
            self._begin_commit(Committing(request.save, request.owner, announce))

    def _is_first_request(self, owner: tuple[int, int], save: SaveId, rank: int) -> bool:
        """Whether no worker of an attempt requested this before: each of a node's ranks does."""
        with self._lock:
            if (owner, save, rank) in self._republished:
                return False
            self._republished = {request for request in self._republished if request[0] >= owner}
            self._republished.add((owner, save, rank))
            return True

    def _publish_again(self, save: SaveId, rank: int, owner: tuple[int, int]) -> None:
        """Put a share into the store that is not there, nor on its way."""
        # In this order: records are deleted after the commit.
        if is_recorded(self._store, save, rank) or not self._publisher.may_commit(save.step, owner):
            return
        slot = self._slots.pin(save, rank)
        if slot is None:
            self._publish_from_disk(save, rank)
            return
        try:
            if slot.settled:
                with slot.view() as view:
                    self._publisher.upload(slot.written(), view)
        finally:
            self._slots.unpin(slot)

    def _publish_from_disk(self, save: SaveId, rank: int) -> None:
        if self._disk is None:
            return  # it was in memory, and newer saves have its slot
        for written in shares_on_disk(self._disk):
            if (written.share.save_id, written.share.rank) != (save, rank):
                continue
            data = memoryview(bytearray(written.record.size_bytes))
            read_share(self._disk, written, data)
            self._publisher.upload(written, data)

    def _held(self) -> Sequence[HeldShare]:
        on_disk: Sequence[WrittenShare] = ()
        if self._disk is not None:
            try:
                on_disk = shares_on_disk(self._disk)
            except StorageError as exc:
                _log.error(f"the node's disk: {exc}")
        return [
            *(HeldShare(written=written, tier=Tier.MEMORY) for written in self._in_memory()),
            *(HeldShare(written=written, tier=Tier.DISK) for written in on_disk),
        ]

    def _in_memory(self) -> list[WrittenShare]:
        pinned = self._slots.pin_all()
        try:
            return [slot.written() for slot in pinned]
        finally:
            for slot in pinned:
                self._slots.unpin(slot)

    def _open_share(self, connection: _Connection, request: Open) -> tuple[Reply, int | None]:
        slot = self._pinned(connection, request.save, request.rank)
        if slot is None:
            return Reply(refused=f"step {request.save.step} rank {request.rank} is gone"), None
        return _reply_with(slot), slot.descriptor

    def _pinned(self, connection: _Connection, save: SaveId, rank: int) -> Slot | None:
        slot = self._slots.pin(save, rank)
        if slot is not None:
            connection.reading.append(slot)
        return slot


def _reply_with(slot: Slot) -> Reply:
    return Reply(slot=slot.number, memory_id=slot.memory_id, size_bytes=slot.size_bytes)
