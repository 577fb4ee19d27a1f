"""Notifications: a receiver of one's own gets a message when somebody has to act, and only then."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import UUID, uuid4

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.tasks.reporting import Reporter
from tests.process.rest import Api, ask
from tests.waiting import apart, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    # The flow that would create them is not there.
    pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning"),
]

ISOLATED = {
    "need": "isolated",
    "node": "node-1",
    "what": "Node node-1 is isolated",
    "why": "device_lost on node-1: code 80E01801",
    "action": "have it mended, then `perdure nodes notified --release node-1`",
}


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A web hook: its address, and what it was sent."""
    received: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    server.server_close()


def flow_run_of(api: Api, flow: str, name: str) -> UUID:
    """A flow run that is running, as far as the server knows."""
    flow_id = ask("POST", f"{api.url}/flows/", {"name": flow}).json()["id"]
    body = {"flow_id": flow_id, "name": name, "state": {"type": "RUNNING"}}
    return UUID(ask("POST", f"{api.url}/flow_runs/", body).json()["id"])


def fail(api: Api, flow_run: UUID, message: str) -> None:
    state = {"type": "FAILED", "name": "Failed", "message": message}
    ask("POST", f"{api.url}/flow_runs/{flow_run}/set_state", {"state": state})


def save_hook(api: Api, url: str) -> str:
    """A notification block for an address; its name."""
    name = f"receiver-{uuid4().hex[:8]}"
    with temporary_settings({PREFECT_API_URL: api.url}):
        block = CustomWebhookNotificationBlock(
            name="tests", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
        )
        apart(lambda: block.save(name))
    return name


def test_a_web_hook_is_told_what_failed_and_what_needs_somebody(bench, api, receiver):
    url, received = receiver
    name = save_hook(api, url)
    with temporary_settings({PREFECT_API_URL: api.url}):
        notified = flow_run_of(api, "pretrain", "notified")
        assert "needs you" in bench.perdure("notify", f"custom-webhook/{name}")
        reporter = Reporter("notified", notified, logging.getLogger("test"))
        reporter.start()
        reporter.event("fault", {"fault_class": "hang", "node": "node-1"})  # it was mended
        reporter.event("action_required", ISOLATED)
        reporter.close()
    wait_for(lambda: received, what="the first message")
    fail(api, flow_run_of(api, "checkpoint-retention", "all runs"), "not a run")
    fail(api, notified, "max_restarts used 3 of 3; 4 attempts on 4 placements")
    wait_for(lambda: len(received) >= 2, what="the second message")

    needs, failed = received
    assert needs["subject"] == "notified: Node node-1 is isolated"
    assert needs["body"].startswith(f"{ISOLATED['why']}\nWhat to do: {ISOLATED['action']}\n")
    assert failed["subject"] == "notified has failed"
    assert failed["body"].startswith("max_restarts used 3 of 3; 4 attempts on 4 placements\n")
    for message in received:
        assert str(notified) in message["body"], "a link to the flow run"


@pytest.mark.long
def test_of_a_real_run_the_lost_node_the_missing_spare_and_the_end_are_told(bench, api, receiver):
    url, received = receiver
    name = save_hook(api, url)
    bench.perdure("notify", f"custom-webhook/{name}")
    notes = bench.home / "hooked.starts"
    script = bench.home / "hooked.sh"
    script.write_text(f"echo >>{notes}; [ $(wc -l <{notes}) = 1 ] && exec sleep 600; exit 2")
    running = bench.start(
        {
            "run_id": "hooked",
            "storage": {"address": f"file://{bench.home}/store"},
            "worker": {"command": ["sh", str(script)]},
            "preflight": {"nodes": False},
            "engine": {"nodes": 1, "slots_per_node": 1, "spares": 1, "grace_s": 2},
        }
    )
    wait_for(notes.exists, what="the first attempt")
    assert running.local.kill_node("node-0")
    assert running.finish() == 1, running.out
    assert running.rungs() == ["job_reschedule_isolated", "stop"]
    subjects = {
        "hooked: Node node-0 is isolated",
        "hooked: No spare is left",
        "hooked has failed",
    }
    wait_for(
        lambda: subjects <= {message["subject"] for message in received},
        what="every message",
    )
    assert len(received) == len(subjects), "each is reported once"
    bodies = {message["subject"]: message["body"] for message in received}
    assert "'perdure nodes hooked --release node-0'" in bodies["hooked: Node node-0 is isolated"]
    assert "user_code_error is for the user to fix" in bodies["hooked has failed"]
    running.leave_nothing()


def test_a_block_that_is_not_there_is_refused_in_one_line(bench, api):
    done = bench.python("-m", "perdure", "notify", "custom-webhook/nobody")
    assert done.returncode == 2
    assert "custom-webhook/nobody" in done.stderr
    assert "prefect block ls" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
