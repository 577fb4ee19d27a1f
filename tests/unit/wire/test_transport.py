"""Connections on which both sides send: whole lines, and one report of their end."""

from __future__ import annotations

import queue
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel, SecretStr

from perdure.storage.unauthenticated import LIMIT_BYTES, MAX_OPEN
from perdure.training.wire import transport
from perdure.training.wire.transport import CUT_OFF_S, Connection, RequestServer, call, is_authentic
from tests.strangers import crowd, flood, trickle
from tests.waiting import wait_for

HOST = "127.0.0.1"
TOKEN = "a-secret"
TIMEOUT_S = 240


class Text(BaseModel):
    text: str


class Client(Connection):
    def __init__(self, port: int) -> None:
        self.received: queue.Queue[str] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        super().__init__(HOST, port, Text(text="joined"), timeout_s=TIMEOUT_S)

    def receive(self, line: bytes) -> None:
        self.received.put(Text.model_validate_json(line).text)

    def lost(self, why: str) -> None:
        self.ends.put(why)


@pytest.fixture
def pair():
    """A client, the server's socket for it, and what comes there."""
    with socket.create_server((HOST, 0)) as server:
        client = Client(server.getsockname()[1])
        server.settimeout(TIMEOUT_S)
        accepted, _ = server.accept()
        accepted.settimeout(TIMEOUT_S)
        with accepted, accepted.makefile("rb") as lines:
            yield client, accepted, lines
            client.close()


def test_lines_of_several_threads_are_whole_and_come_after_the_first(pair):
    client, _, lines = pair
    texts = [f"{number}" * 20_000 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for text in texts:
            pool.submit(client.send, Text(text=text))
        got = [Text.model_validate_json(lines.readline()).text for _ in range(41)]
    assert got[0] == "joined"
    assert sorted(got[1:]) == sorted(texts)


@pytest.mark.parametrize(
    ("last", "why"),
    [(b"", "it closed"), (b"nonsense\n", "ValidationError"), (b"x" * 100, "more than 100 bytes")],
)
def test_the_end_is_reported_once_and_nothing_is_sent_after_it(pair, monkeypatch, last, why):
    client, server, _ = pair
    monkeypatch.setattr(transport, "MAX_LINE_BYTES", 100)
    server.sendall(last)
    server.shutdown(socket.SHUT_WR)
    assert why in client.ends.get(timeout=TIMEOUT_S)
    assert not client.is_open
    assert not client.send(Text(text="late"))
    assert client.ends.empty()


def test_a_client_that_goes_over_to_another_server_loses_nothing_and_sends_there(pair):
    client, before, _ = pair
    with socket.create_server((HOST, 0)) as server:
        client.connect(HOST, server.getsockname()[1], Text(text="again"), timeout_s=TIMEOUT_S)
        server.settimeout(TIMEOUT_S)
        accepted, _ = server.accept()
        accepted.settimeout(TIMEOUT_S)
        with accepted, accepted.makefile("rb") as lines:
            assert client.send(Text(text="news"))
            got = [Text.model_validate_json(lines.readline()).text for _ in range(2)]
            assert got == ["again", "news"]
            assert before.makefile("rb").read().count(b"news") == 0
            accepted.sendall(b'{"text": "answer"}\n')
            assert client.received.get(timeout=TIMEOUT_S) == "answer"
            assert client.is_open
            assert client.ends.empty()
        assert client.ends.get(timeout=TIMEOUT_S), "the end of the new one is reported"


def test_a_server_that_cannot_be_reached_leaves_the_one_before(pair):
    client, _, lines = pair
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        client.connect(HOST, port, Text(text="again"), timeout_s=TIMEOUT_S)
    assert client.send(Text(text="still here"))
    assert [Text.model_validate_json(lines.readline()).text for _ in range(2)][-1] == "still here"


def test_a_send_that_fails_is_an_end_too(pair):
    client, _, _ = pair
    client._socket.shutdown(socket.SHUT_WR)
    assert not client.send(Text(text="lost"))
    assert client.ends.get(timeout=TIMEOUT_S)


class Ask(Text):
    """A request, whose token is not its first field here."""

    token: SecretStr = SecretStr(TOKEN)


@pytest.fixture
def server():
    server = RequestServer(HOST, lambda line: Text(text=f"{len(line)}"), token=TOKEN)
    server.start()
    yield server
    server.close()


def test_a_request_that_is_too_long_gets_no_answer(server, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(transport, "MAX_LINE_BYTES", 1 << 20)
    text = b'{"text": "38"}\n'
    assert call(HOST, server.port, Ask(text="short"), timeout_s=TIMEOUT_S) == text
    assert _answer(server.port, Ask(text="x" * (2 << 20))) == b""
    wait_for(lambda: "more than 1048576 bytes" in caplog.text)


def test_a_request_with_the_token_may_be_longer_than_a_strangers(server):
    size = 3 * LIMIT_BYTES
    line = call(HOST, server.port, Ask(text="x" * size), timeout_s=TIMEOUT_S)
    assert int(Text.model_validate_json(line).text) > size


@pytest.mark.parametrize(
    "piece",
    [
        b"x" * 4096,
        b'{"token": "another", "text": "' + b"x" * 4096,
        b'{"text": "a-secret", "token": "' + b"x" * 4096,
        b"[" * 4096,
    ],
)
def test_a_stranger_sends_little_before_the_connection_ends(server, piece, caplog):
    caplog.set_level("INFO")
    assert flood((HOST, server.port), piece) < 16 << 20
    wait_for(lambda: f"more than {LIMIT_BYTES} bytes without a token" in caplog.text)


def test_a_stranger_that_sends_a_byte_now_and_then_has_one_deadline(server, short_patience):
    trickle((HOST, server.port))


def test_silent_strangers_keep_nobody_out(server):
    def ask() -> bytes:
        return call(HOST, server.port, Ask(text="short"), timeout_s=TIMEOUT_S)

    crowd((HOST, server.port), ask, MAX_OPEN + 8)


def _answer(port: int, request: Text) -> bytes:
    try:
        return call(HOST, port, request, timeout_s=TIMEOUT_S)
    except ConnectionError:
        return b""  # what was not read resets the connection


def test_no_token_is_not_the_right_one():
    assert not is_authentic(None, "a-token")


def test_a_connection_ends_by_itself_when_the_other_host_is_silent(pair):
    client, _, _ = pair
    options = {
        name: client._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    }
    idle_s = options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
    assert client._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert (idle_s, options["TCP_USER_TIMEOUT"]) == (CUT_OFF_S, CUT_OFF_S * 1000)
