"""The HTTP server that Prometheus scrapes.

It asks for no token, so every request keeps to the limits of connections without one.
"""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from perdure.storage.unauthenticated import FirstBytes, UnauthenticatedConnections

_log = logging.getLogger("perdure.coordinator")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connections = UnauthenticatedConnections()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, in its thread."""
        with self._connections.holding(request):
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 socketserver's
        """Note on one line why a client got no answer."""
        _log.info(f"a scrape was not answered: {sys.exception()!r}")


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Scrape(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(FirstBytes(self.connection))

    def log_message(self, *_: Any) -> None:
        """Leave out a line for each scrape."""


def serve_scrapes(registry: CollectorRegistry, host: str, port: int) -> int:
    """Answer scrapes in threads of their own, until the process ends. Returns the port.

    Raises:
        OSError: the port is taken, or the host is none of this machine's.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    kind = _IPv6Server if family == socket.AF_INET6 else _Server
    app = make_wsgi_app(registry)
    server = make_server(str(address[0]), port, app, kind, handler_class=_Scrape)
    threading.Thread(target=server.serve_forever, daemon=True, name="scrapes").start()
    return int(server.server_port)
