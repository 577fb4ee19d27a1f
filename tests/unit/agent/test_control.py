"""The control socket: who is answered, who is refused, and what is survived."""

from __future__ import annotations

import json
import socket
from threading import Thread

import psutil
import pytest

from perdure.training.agent.control import AgentClient, ControlServer
from perdure.training.errors import AgentUnreachable, EngineError, OtherRelease
from perdure.training.wire.agent import (
    AgentReply,
    CheckOrder,
    MetricsQuery,
    Request,
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.version import PERDURE_VERSION, is_of_this_release
from tests.jobs import small_job

TOKEN = "the-token"
HOST = "127.0.0.1"


@pytest.fixture
def requests() -> list[Request]:
    return []


@pytest.fixture
def server(requests):
    def handle(request: Request) -> AgentReply:
        requests.append(request)
        return AgentReply(text="received", offset=5)

    server = ControlServer.open(HOST, TOKEN, handle)
    server.start()
    yield server
    server.close()


def client(port: int, *, token: str = TOKEN, epoch: int = 1) -> AgentClient:
    return AgentClient(HOST, port, token, epoch)


def check_order() -> CheckOrder:
    return CheckOrder(
        job=small_job(), num_nodes=1, slots_per_node=1, state_bytes=None, is_new=True,
        gang_host=None, variables={}, timeout_s=1.0,
    )  # fmt: skip


def send_line(port: int, line: bytes) -> AgentReply:
    with socket.create_connection((HOST, port), timeout=240) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as lines:
            return AgentReply.model_validate_json(lines.readline())


def test_an_order_reaches_the_handler_and_its_reply_the_caller(server, requests):
    reply = client(server.port, epoch=4).call(MetricsQuery(offset=17))
    assert (reply.text, reply.offset) == ("received", 5)
    assert [(r.epoch, r.order) for r in requests] == [(4, MetricsQuery(offset=17))]


@pytest.mark.parametrize("token", ["wrong", "", "the-token ", "schlüssel"])
def test_a_wrong_token_is_refused(server, requests, token):
    with pytest.raises(AgentUnreachable, match="wrong token"):
        client(server.port, token=token).call(StopOrder(grace_s=1))
    assert requests == []


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"\n",
        b"\xff\xfe\x00\n",
        b"[]\n",
        b'{"token": "the-token"}\n',
        b'{"token": "\\ud800", "epoch": 1, "order": {"op": "status"}}\n',
        b'{"token": "the-token", "epoch": 1, "order": {"op": "explode"}}\n',
        b'{"token": "the-token", "epoch": 1, "order": {"op": "status", "further": 1}}\n',
        b'{"token": "the-token", "epoch": 1, "order": {"op": "sta',
    ],
)
def test_a_garbage_line_gets_an_error_and_the_next_caller_an_answer(server, requests, line):
    error = send_line(server.port, line).error
    assert error is not None
    assert error.startswith("not a request")
    assert requests == []
    assert client(server.port).call(StatusQuery()).text == "received"


def test_an_order_with_a_job_of_another_version_is_refused_on_one_line(server, requests):
    order = check_order().model_dump(mode="json")
    order["job"]["setting_of_tomorrow"] = 1
    request = {"token": TOKEN, "epoch": 1, "order": order}
    error = send_line(server.port, json.dumps(request).encode() + b"\n").error
    assert error == (
        "not a request of this version: order.check.job.setting_of_tomorrow: "
        "Extra inputs are not permitted"
    )
    assert requests == []


def test_a_refusal_does_not_repeat_the_token(server):
    line = json.dumps({"token": TOKEN, "epoch": "x", "order": {"op": "status"}}).encode()
    assert TOKEN not in str(send_line(server.port, line + b"\n").error)


def test_a_handler_that_fails_costs_its_caller_the_answer_and_nobody_else(capfd):
    def handle(request: Request) -> AgentReply:
        if isinstance(request.order, StopOrder):
            raise OSError("disk full")
        return AgentReply()

    failing = ControlServer.open(HOST, TOKEN, handle)
    failing.start()
    with pytest.raises(AgentUnreachable):
        client(failing.port).call(StopOrder(grace_s=0))
    assert client(failing.port).call(StatusQuery()) == AgentReply()
    failing.close()
    assert "disk full" in capfd.readouterr().err


def test_a_caller_that_sends_nothing_holds_up_nobody(server):
    with socket.create_connection((HOST, server.port)):
        assert client(server.port).call(StatusQuery()).text == "received"


def test_nobody_at_the_address_is_unreachable():
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(AgentUnreachable, match=f"agent at {HOST}:{port}"):
        client(port).call(StatusQuery())


@pytest.mark.parametrize("answer", [b"", b"hello\n", b'{"unknown": 1}\n'])
def test_somebody_else_at_the_address_is_unreachable(answer):
    with socket.create_server((HOST, 0)) as other:
        other.settimeout(240)
        caller = client(other.getsockname()[1])

        def reply() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = Thread(target=reply)
        thread.start()
        with pytest.raises(AgentUnreachable):
            caller.call(StatusQuery())
        thread.join()


def test_the_server_listens_on_loopback_alone(server):
    ports = {
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == server.port
    }
    assert ports == {HOST}


@pytest.mark.parametrize("on_loopback", [True, False])
def test_a_port_forward_is_answered_where_the_engine_wants_it(on_loopback):
    host = "127.0.0.2"
    server = ControlServer.open(
        host, TOKEN, lambda _: AgentReply(text="received"), on_loopback=on_loopback
    )
    server.start()
    try:
        assert AgentClient(host, server.port, TOKEN, 1).call(StatusQuery()).text == "received"
        if on_loopback:
            assert client(server.port).call(StatusQuery()).text == "received"
            with pytest.raises(AgentUnreachable, match="wrong token"):
                client(server.port, token="another").call(StatusQuery())
        else:
            with pytest.raises(AgentUnreachable):
                client(server.port).call(StatusQuery())
    finally:
        server.close()


def status_line(**changes: object) -> bytes:
    """The answer of an agent to a poll, with other fields."""
    status = AgentStatus(
        node="n1", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, version=PERDURE_VERSION,
    )  # fmt: skip
    document = AgentReply(status=status).model_dump(mode="json")
    document["status"] |= changes
    return json.dumps(document).encode()


@pytest.mark.parametrize("version", [PERDURE_VERSION, f"{PERDURE_VERSION}.dev3", "0.1.77"])
def test_an_agent_of_the_same_release_is_spoken_to(version):
    reply = client(1).reply(StatusQuery(), status_line(version=version))
    assert reply.status is not None
    assert reply.status.version == version


def test_an_agent_of_before_there_were_versions_is_refused():
    document = json.loads(status_line())
    del document["status"]["version"]
    with pytest.raises(OtherRelease, match="is of a release that names no version, and this"):
        client(1).reply(StatusQuery(), json.dumps(document).encode())


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"version": ""}, "of a release that names no version"),
        ({"version": "0.0.9"}, "0.0.9"),
        ({"version": "0.2.0"}, "0.2.0"),
        ({"version": "1.1.0"}, "1.1.0"),
        # A later one, with a field that this one does not know, lives: it is not silent.
        ({"version": "9.0.0", "field_of_tomorrow": 1}, "of another version "),
        ({"state": "dreaming"}, "of another version "),
    ],
)
def test_an_agent_of_another_release_is_refused_on_one_line_and_is_not_lost(changes, version):
    with pytest.raises(EngineError) as refused:
        client(7).reply(StatusQuery(), status_line(**changes))
    text = str(refused.value)
    assert text.startswith(f"agent at 127.0.0.1:7 is {version}")
    assert f"this supervisor {PERDURE_VERSION}" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("error", "is_other"),
    [("not a request of this version: order: no such field", True), ("already stopped", False)],
)
def test_an_agent_that_cannot_read_a_request_is_of_another_release(error, is_other):
    with pytest.raises(EngineError, match=f"refused status: {error}") as refused:
        client(7).reply(StatusQuery(), AgentReply(error=error).model_dump_json().encode())
    assert isinstance(refused.value, OtherRelease) is is_other


@pytest.mark.parametrize("line", [b"", b"{", b"HTTP/1.1 400 Bad Request", b'{"status": '])
def test_an_answer_that_was_cut_short_or_is_of_a_stranger_is_no_answer(line):
    with pytest.raises(AgentUnreachable):
        client(1).reply(StatusQuery(), line)


@pytest.mark.parametrize(
    ("other", "current", "expected"),
    [
        ("0.1.0", "0.1.3", True),
        ("0.1.0", "0.2.0", False),
        ("1.0.0", "0.1.0", False),
        ("", "0.1.0", False),
        ("", "", True),
        ("0.1.0", "", True),
        ("0.10.0", "0.1.0", False),
    ],
)
def test_releases_that_differ_in_their_last_number_speak_to_each_other(other, current, expected):
    assert is_of_this_release(other, current=current) is expected
