"""The control socket: who is answered, who is refused, and what is survived."""

from __future__ import annotations

import json
import socket
from threading import Thread

import psutil
import pytest

from perdure.training.agent.control import AgentClient, ControlServer
from perdure.training.errors import AgentUnreachable
from perdure.training.wire.agent import (
    AgentReply,
    CheckOrder,
    MetricsQuery,
    Request,
    StatusQuery,
    StopOrder,
)
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
