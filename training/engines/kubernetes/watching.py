"""A local copy of the objects of a kind: a list, then a watch, again and again.

Another list closes a gap (the server was away, or has forgotten the version), so that the copy
misses only objects that came and went in between. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from perdure.training.engines.kubernetes.api import Api, ApiError, Resource
from perdure.training.engines.kubernetes.objects import Document

RETRY_S = 1.0

_log = logging.getLogger("perdure.engine")


class Informer:
    """The objects of a kind that fit a selector, by name; a thread keeps them up to date.

    Args:
        api: their cluster.
        resource: the kind.
        labels: label selector.
    """

    def __init__(self, api: Api, resource: Resource, *, labels: str = "") -> None:
        self._api = api
        self._resource = resource
        self._labels = labels
        self._changed = threading.Condition()
        self._objects: dict[str, Document] = {}
        self._version = ""
        self._is_away = False
        self._refusal = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """List once, then follow in the background; another call does nothing.

        Raises:
            ApiError: the first list failed.
        """
        if self._thread is not None:
            return
        self._list()
        name = f"watch {self._resource.plural}"
        # A thread that held this object would outlive all its users.
        target = partial(_follow, weakref.ref(self))
        self._thread = threading.Thread(target=target, daemon=True, name=name)
        self._thread.start()

    def refresh(self) -> None:
        """List now, so that the copy has what this process has just done.

        Raises:
            ApiError: the request failed.
        """
        self._list()

    @property
    def objects(self) -> Mapping[str, Document]:
        """By name, as of the last list or change."""
        with self._changed:
            return dict(self._objects)

    @property
    def is_away(self) -> bool:
        """Whether the API server does not answer at the moment, or refuses: the copy gets old."""
        return self._is_away

    @property
    def refusal(self) -> str:
        """The API server's words, while it refuses to list or watch the objects; "" otherwise."""
        return self._refusal

    def wait(self, until: Callable[[Mapping[str, Document]], bool], *, timeout_s: float) -> bool:
        """Wait until the objects meet a condition. Returns whether they do."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not until(self._objects):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, RETRY_S))
        return True

    def _follow_once(self) -> None:
        """Apply changes until the connection ends; list anew where it ended with an error."""
        try:
            self._apply_changes()
        except ApiError as error:
            self._note_away(error)
            time.sleep(RETRY_S)
            try:
                self._list(patience_s=0.0)
            except ApiError as list_error:
                self._note_away(list_error)
                return
            self._note_away(None)

    def _note_away(self, error: ApiError | None) -> None:
        is_away = error is not None and error.is_refusal
        if is_away is not self._is_away:
            _log.warning(str(error or "the API server answers again"))
        self._is_away = is_away
        is_refused = error is not None and is_away and not error.is_unreachable
        self._refusal = str(error) if is_refused else ""

    def _list(self, patience_s: float | None = None) -> None:
        items, version = self._api.list(self._resource, labels=self._labels, patience_s=patience_s)
        by_name = {item["metadata"]["name"]: item for item in items}
        with self._changed:
            self._objects, self._version = by_name, version
            self._changed.notify_all()

    def _apply_changes(self) -> None:
        with self._changed:
            version = self._version
        for kind, document in self._api.watch(self._resource, version=version, labels=self._labels):
            with self._changed:
                self._version = document["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    self._objects.pop(document["metadata"]["name"], None)
                elif kind != "BOOKMARK":
                    self._objects[document["metadata"]["name"]] = document
                self._changed.notify_all()


def _follow(reference: weakref.ref[Informer]) -> None:
    """Follow until nobody uses the informer; a connection lasts a minute at most."""
    while (informer := reference()) is not None:
        informer._follow_once()  # noqa: SLF001 its own thread
        del informer
