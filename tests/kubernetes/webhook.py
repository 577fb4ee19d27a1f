"""An admission webhook for the pods of a run, on this machine as the lab's API server is."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from perdure.training.engines.kubernetes.objects import RUN
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import KEYS

COST_CENTER = "cost-center.lab.local"
DENIED = "pods need a cost center"


class Denial(BaseHTTPRequestHandler):
    """The answer of an admission webhook that says no to everything."""

    def do_POST(self) -> None:
        """Deny what is asked."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = {"message": DENIED}
        answer = {"uid": asked["request"]["uid"], "allowed": False, "status": status}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        kind = {name: asked[name] for name in ("apiVersion", "kind")}
        self.wfile.write(json.dumps({**kind, "response": answer}).encode())

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""


@dataclass(frozen=True)
class Webhook:
    """Denies pods of a run, or fails.

    Attributes:
        lab: whose API server asks it.
        port: where it answers.
    """

    lab: Lab
    port: int

    def deny(self, run_id: str) -> None:
        """Have it deny each pod of a run."""
        self._register(run_id, self.port)

    def fail(self, run_id: str) -> None:
        """Have nobody answer where it should be."""
        self._register(run_id, 1)  # where nothing listens

    def end(self) -> None:
        """Have the API server ask nobody."""
        self.lab.kubectl(
            "delete", "validatingwebhookconfiguration", COST_CENTER, "--ignore-not-found"
        )

    def _register(self, run_id: str, port: int) -> None:
        authority = base64.b64encode((KEYS / "ca.crt").read_bytes()).decode()
        pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        rule = {
            "name": COST_CENTER,
            "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": authority},
            "rules": [{**pods, "operations": ["CREATE"]}],
            "objectSelector": {"matchLabels": {RUN: run_id}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }
        kind = "ValidatingWebhookConfiguration"
        self.lab.create(
            {
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
                "metadata": {"name": COST_CENTER}, "webhooks": [rule],
            }
        )  # fmt: skip


@contextmanager
def serving(lab: Lab) -> Iterator[Webhook]:
    """Run a webhook that is asked about no pod yet; at the end it is gone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(KEYS / "apiserver.crt", KEYS / "apiserver.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Denial) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        webhook = Webhook(lab, server.server_port)
        try:
            yield webhook
        finally:
            webhook.end()
            server.shutdown()
