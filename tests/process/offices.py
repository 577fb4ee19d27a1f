"""A shell as offices have it: all requests go to a proxy, and no variable makes an exception."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAMES = ("http_proxy", "https_proxy", "all_proxy")


def proxy_variables(url: str = "http://127.0.0.1:9") -> dict[str, str]:
    """The variables of such a shell; by default a port that refuses, so requests fail at once."""
    return {variable: url for name in NAMES for variable in (name, name.upper())}


class DenyingProxy(ThreadingHTTPServer):
    """A proxy that answers 503 to all requests, as a firewall does.

    Attributes:
        requested: the addresses that it was asked for.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Deny)
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        """The value of a proxy variable."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Deny(BaseHTTPRequestHandler):
    server: DenyingProxy

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_CONNECT = do_GET  # noqa: N815 of the base

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def denying_proxy() -> Iterator[DenyingProxy]:
    """Such a proxy, until the test ends."""
    with DenyingProxy() as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()
