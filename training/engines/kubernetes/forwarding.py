"""The way to agents from outside of a cluster: through the API server, a listener for each pod.

A caller at the listener's address reaches the pod: each connection becomes a stream of the API
server's port-forward. Listeners are on the loopback address, and agents require their token.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Collection
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any

from kubernetes import client
from kubernetes.stream import portforward

from perdure.training.engines.kubernetes.api import FAILURES, Api

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 1 << 16

_log = logging.getLogger("perdure.engine")


class Forwarder:
    """Listeners for the pods of a cluster.

    Args:
        api: the cluster.
        port: the agents' port.
    """

    def __init__(self, api: Api, port: int) -> None:
        self._settings = api.connection.configuration
        self._namespace = api.namespace
        self._port = port
        self._listeners: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_cut = False
        self._is_refused = False

    @property
    def is_cut(self) -> bool:
        """Whether the API server did not answer the latest connection."""
        return self._is_cut

    @property
    def is_refused(self) -> bool:
        """Whether the API server refused the latest connection for want of a right."""
        return self._is_refused

    def address(self, pod: str) -> tuple[str, int]:
        """Open a listener for a pod, once. Returns its host and port on this machine."""
        with self._lock:
            if pod not in self._listeners:
                listener = socket.create_server((LOOPBACK, 0), backlog=64)
                self._listeners[pod] = listener
                threading.Thread(
                    target=self._accept, args=(pod, listener), daemon=True, name=f"to {pod}"
                ).start()
            host, port = self._listeners[pod].getsockname()
            return host, port

    def keep(self, pods: Collection[str]) -> None:
        """Close the listeners of all other pods."""
        with self._lock:
            for pod in [name for name in self._listeners if name not in pods]:
                listener = self._listeners.pop(pod)
                with suppress(OSError):  # it may not be connected; this wakes accept()
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()

    def _accept(self, pod: str, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._carry, args=(pod, connection), daemon=True, name=f"call {pod}"
            ).start()

    def _carry(self, pod: str, connection: socket.socket) -> None:
        """Carry a connection to the pod until either side ends it."""
        with connection:
            try:
                # A separate client: during the call, all its requests are forwards.
                api = client.CoreV1Api(client.ApiClient(self._settings))
                forward = portforward(
                    api.connect_get_namespaced_pod_portforward,
                    pod,
                    self._namespace,
                    ports=str(self._port),
                )
            except FAILURES as error:
                status = _status_of(error)
                self._is_cut = not status
                self._is_refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
                _log.debug("no way to %s: %s", pod, error)
                return
            self._is_cut = self._is_refused = False
            with closing(forward.socket(self._port)) as stream:
                _exchange(connection, stream)


def _status_of(error: BaseException | None) -> int:
    """The status that the API server itself has answered; 0: it has not.

    The client's own error has status 0; that of the handshake below it has the server's.
    """
    while error is not None:
        status = getattr(error, "status_code", 0) or getattr(error, "status", 0)
        if status:
            return int(status)
        error = error.__cause__ or error.__context__
    return 0


def _exchange(connection: socket.socket, stream: Any) -> None:
    """Carry bytes both ways until either side ends the connection."""
    with selectors.DefaultSelector() as ready:
        ready.register(connection, selectors.EVENT_READ, stream)
        ready.register(stream, selectors.EVENT_READ, connection)
        while True:
            for key, _ in ready.select():
                source: Any = key.fileobj
                target = key.data
                try:
                    piece = source.recv(PIECE_BYTES)
                    target.sendall(piece)
                except OSError:
                    return
                if not piece:
                    return  # a request and its reply are a line each: nothing else follows
