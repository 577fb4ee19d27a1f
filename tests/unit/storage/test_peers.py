"""Shares that go from checkpoint server to checkpoint server, and what is refused."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import pytest

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.checkpoint_server import peers, slots
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.peers import (
    HELLO_BYTES,
    Hello,
    Offer,
    Pace,
    PeerReply,
    give_copy,
)
from perdure.storage.checkpoint_server.protocol import PeerAddress, receive, send
from perdure.storage.checkpoint_server.publish import Publisher, is_recorded
from perdure.storage.checkpoint_server.server import CheckpointServer, Copying
from perdure.storage.checkpoint_server.slots import SlotTable
from perdure.storage.errors import NotCopied, StorageError
from perdure.storage.local import LocalStore
from perdure.storage.manifest import ShardRecord
from perdure.storage.partner_copies import CopyState
from perdure.storage.unauthenticated import MAX_OPEN
from tests.strangers import crowd
from tests.unit.storage.nodes import RUN_ID, bytes_of, reserve, share_of, written
from tests.waiting import wait_for

HOST = "127.0.0.1"
NO_LIMIT = Pace(None, Event())


@dataclass
class Server:
    """A checkpoint server in threads of this process."""

    name: str
    server: CheckpointServer
    client: CheckpointClient

    @property
    def address(self) -> PeerAddress:
        address = self.client.address()
        assert address is not None
        return address

    def held(self) -> list[tuple[int, int]]:
        shares = (one.written.share for one in self.client.shares())
        return sorted((share.step, share.rank) for share in shares)

    def save(self, step: int, *, rank: int = 0, keep: tuple[Any, ...] | None = ()) -> Any:
        share = share_of(step, rank=rank, world_size=2)
        slot = reserve(self.client, share)
        slot.memory[: share.size_bytes] = bytes_of(share)
        self.client.ready(slot, share, announce=None, keep=keep)
        return share.save_id

    def copies(self, save: Any, *, rank: int = 0) -> CopyState:
        def is_over() -> bool:
            return self.client.copy_state(save, rank) is not CopyState.COPYING

        wait_for(is_over, period_s=0.01, what="the copies")
        return self.client.copy_state(save, rank)


@contextmanager
def serving(folder: Any, copying: Copying | None) -> Iterator[Server]:
    checkpoints = CheckpointStore(LocalStore(folder / "store"), RUN_ID)
    name = f"perdure-test-{uuid.uuid4().hex}"
    server = CheckpointServer(
        name,
        publisher=Publisher(checkpoints, disk=None, retain=lambda _step: None, wait_s=0.1),
        store=checkpoints,
        disk=None,
        available_bytes=lambda: 1 << 30,
        copying=copying,
    )
    thread = Thread(target=server.serve, daemon=True)
    thread.start()
    with CheckpointClient(name) as client:
        yield Server(name, server, client)
    server.close(5)
    thread.join()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def start(copying: Copying | None = Copying(HOST)) -> Server:  # noqa: B008
            return stack.enter_context(serving(tmp_path, copying))

        yield start


@pytest.fixture
def pair(start) -> tuple[Server, Server]:
    first, second = start(), start()
    first.client.set_partners((second.address,), (0, 1))
    return first, second


def test_a_save_is_in_the_memory_of_the_partner_and_comes_back_to_a_new_node(pair, start):
    first, second = pair
    saved = first.save(10)
    assert first.copies(saved) is CopyState.COPIED
    assert second.held() == [(10, 0)]
    new = start()
    new.client.bring(saved, 0, second.address)
    memory = new.client.open(saved, 0)
    assert memory[:64] == bytes_of(share_of(10, world_size=2))
    assert [one.written for one in new.client.shares()] == [written(share_of(10, world_size=2))]


def test_nodes_with_ipv6_addresses_copy_too(start):
    first, second = start(Copying("::1")), start(Copying("::1"))
    first.client.set_partners((second.address,), (0, 1))
    assert first.copies(first.save(10)) is CopyState.COPIED
    assert second.held() == [(10, 0)]


def test_a_share_that_is_not_to_be_copied_stays_alone(pair):
    first, second = pair
    first.save(10, keep=None)
    assert first.copies(first.save(20)) is CopyState.COPIED
    assert second.held() == [(20, 0)]


def test_what_the_partner_has_already_is_not_sent_again(pair, monkeypatch):
    first, second = pair
    saved = first.save(10)
    first.copies(saved)
    taken: list[object] = []
    monkeypatch.setattr(peers, "_take", lambda *arguments, **_: taken.append(arguments))
    first.client.copy_again(saved, 0)
    assert first.copies(saved) is CopyState.COPIED
    assert (taken, second.held()) == ([], [(10, 0)])


def test_a_partner_keeps_the_copies_that_are_whole_everywhere(pair):
    first, second = pair
    kept = first.save(10)
    first.copies(kept)
    for step in (20, 30, 40):
        assert first.copies(first.save(step, keep=(kept,))) is CopyState.COPIED
    assert second.held() == [(10, 0), (40, 0)]


def test_copies_before_the_ranks_have_met_and_to_a_partner_that_is_gone_have_failed(start):
    first = start()
    assert first.copies(first.save(10)) is CopyState.FAILED
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    first.client.set_partners((PeerAddress(host=HOST, port=port, token="x"),), (0,))
    assert first.copies(first.save(20)) is CopyState.FAILED


def test_a_node_whose_partners_are_others_gives_the_memory_of_the_ones_before_back(pair):
    first, second = pair
    first.copies(first.save(10))
    newer = second.save(20, rank=1)
    assert second.held() == [(10, 0), (20, 1)]
    second.client.set_partners((), (1,))
    assert second.client.reserve(1, 64, keep=(newer,), copied=newer) is not None
    assert second.held() == [(20, 1)]


def test_a_save_that_is_still_hashed_when_the_server_closes_is_published(
    pair, monkeypatch, tmp_path
):
    first, _ = pair
    hashing, go_on = Event(), Event()

    class Held:
        @staticmethod
        def of(data: Any) -> ShardRecord:
            hashing.set()
            assert go_on.wait(240)
            return ShardRecord.of(data)

    monkeypatch.setattr(slots, "ShardRecord", Held)
    wait = first.server._tasks.wait

    def hash_then_wait(*arguments: Any, **more: Any) -> bool:
        go_on.set()
        return wait(*arguments, **more)

    monkeypatch.setattr(first.server._tasks, "wait", hash_then_wait)
    saved = first.save(10)
    assert hashing.wait(240)
    first.server.close(240)
    assert is_recorded(CheckpointStore(LocalStore(tmp_path / "store"), RUN_ID), saved, 0)


def test_a_save_after_the_end_of_the_copying_is_published_and_its_copy_has_failed(pair, tmp_path):
    first, second = pair
    first.server.close(240)
    saved = first.save(10)
    assert first.copies(saved) is CopyState.FAILED
    store = CheckpointStore(LocalStore(tmp_path / "store"), RUN_ID)
    wait_for(lambda: is_recorded(store, saved, 0), period_s=0.01, what="the share")
    assert second.held() == []
    assert first.server._slots.pin(saved, 0).readers == 1, "nobody else reads it"


def test_without_copying_nothing_listens(start):
    alone = start(None)
    assert alone.client.address() is None
    assert alone.client.copy_state(alone.save(10), 0) is CopyState.FAILED


def test_a_caller_with_another_token_gets_no_word(pair):
    _, second = pair
    wrong = second.address.model_copy(update={"token": "0" * 64})
    with pytest.raises(NotCopied, match=r"it closed the connection|reset|Broken pipe"):
        give_copy(wrong, written(share_of(10)), memoryview(b""), keep=(), pace=NO_LIMIT)
    assert second.held() == []


def test_a_first_message_that_is_too_long_is_not_even_read(pair):
    _, second = pair
    with socket.create_connection((HOST, second.address.port)) as connection:
        send(connection, Hello(token="0" * HELLO_BYTES))
        connection.settimeout(240)
        with suppress(ConnectionResetError):  # what was not read is answered so
            assert connection.recv(1) == b""


def test_a_first_message_that_comes_byte_by_byte_has_one_deadline(pair, monkeypatch):
    _, second = pair
    monkeypatch.setattr(peers, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_connection((HOST, second.address.port)) as connection:
        connection.settimeout(0.05)  # no pause is as long as the limit
        connection.sendall(struct.pack("<Q", HELLO_BYTES))
        with suppress(ConnectionError):  # what was not read is answered so
            for _ in range(HELLO_BYTES - 1):
                with suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    return
                connection.sendall(b" ")
            pytest.fail("the whole message was waited for")


def test_silent_connections_keep_no_copy_out(start):
    address = start().address
    share = share_of(10)

    def copied() -> bool:
        give_copy(address, written(share), memoryview(bytes_of(share)), keep=(), pace=NO_LIMIT)
        return True

    crowd((HOST, address.port), copied, MAX_OPEN + 8)


def test_shares_of_another_run_and_damaged_ones_are_refused(pair):
    _, second = pair
    other, share = share_of(10, run_id="another"), share_of(10)
    with pytest.raises(NotCopied, match="another is another run"):
        give_copy(
            second.address, written(other), memoryview(bytes_of(other)), keep=(), pace=NO_LIMIT
        )
    with pytest.raises(NotCopied, match="damaged on its way"):
        give_copy(second.address, written(share), memoryview(bytes(64)), keep=(), pace=NO_LIMIT)
    assert second.held() == []


def test_a_copy_that_is_cut_short_is_discarded_and_the_one_before_stays(pair):
    first, second = pair
    first.copies(first.save(10))
    with socket.create_connection((HOST, second.address.port)) as connection:
        connection.settimeout(240)
        send(connection, Hello(token=second.address.token))
        send(connection, Offer(written=written(share_of(20, world_size=2))))
        assert PeerReply.model_validate_json(receive(connection)[0]) == PeerReply()
        connection.sendall(b"half")
    assert second.held() == [(10, 0)]
    assert first.copies(first.save(30)) is CopyState.COPIED
    assert second.held() == [(10, 0), (30, 0)]


def test_a_share_that_the_source_has_no_more_is_refused_by_name(pair):
    first, second = pair
    saved = first.save(10, keep=None)
    with pytest.raises(StorageError, match="step 10 rank 0 is not here"):
        first.client.bring(saved, 0, second.address)


@pytest.mark.parametrize("direction", ["copied", "brought"])
def test_bytes_are_sent_once_who_takes_them_has_the_memory(pair, monkeypatch, direction):
    first, second = pair
    saved = first.save(10, keep=None)
    events: list[str] = []
    reserve_, send_bytes = SlotTable.reserve, peers._send_bytes

    def reserve(*arguments: Any, **more: Any) -> Any:
        slot = reserve_(*arguments, **more)
        sleeping.wait(0.2)  # bytes that do not wait for it would be sent meanwhile
        events.append("reserved")
        return slot

    def send_(*arguments: Any) -> None:
        events.append("sent")
        send_bytes(*arguments)

    sleeping = Event()
    monkeypatch.setattr(SlotTable, "reserve", reserve)
    monkeypatch.setattr(peers, "_send_bytes", send_)
    if direction == "copied":
        first.client.copy_again(saved, 0)
        assert first.copies(saved) is CopyState.COPIED
    else:
        second.client.bring(saved, 0, first.address)
    assert events == ["reserved", "sent"]
    assert second.held() == [(10, 0)]


def test_tokens_are_drawn_for_each_server_and_not_shown(pair):
    first, second = pair
    assert first.address.token != second.address.token
    assert len(first.address.token) == 64
    assert first.address.token not in repr(first.address)


class NoTime(Event):
    """An event that nobody waits for; it knows for how long they would have."""

    waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s = max(self.waited_s, timeout or 0.0)
        return False


def test_a_pace_spreads_bytes_over_the_time_that_its_rate_gives_them():
    ending = NoTime()
    pace = Pace(1e6, ending)
    for _ in range(50):
        pace.wait(pace.piece_bytes)
    assert pace.piece_bytes == 100_000
    assert ending.waited_s == pytest.approx(5.0, abs=0.1)
