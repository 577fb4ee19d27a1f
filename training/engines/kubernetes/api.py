"""Requests to a cluster's API server, through the official client; answers are plain documents.

The client's own classes belong to one version of the API and drop unknown fields. The fields used
here are the same from 1.20 on. Times are seconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from pydantic_core import from_json

from perdure.storage.proxies import is_direct
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.errors import EngineError, InputError

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 10.0
# A watch without a change for this long starts again: its connection may be dead without an end.
WATCH_TIMEOUT_S = 60
# How long a request waits for a server that is away: an upgrade restarts it in less time.
PATIENCE_S = 120.0
RETRY_S = 1.0
PAGE = 500
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_log = logging.getLogger("perdure.engine")
FAILURES = (ApiException, urllib3.exceptions.HTTPError, OSError)


class ApiError(EngineError):
    """The API server refused a request, or could not be reached.

    Attributes:
        status: HTTP status of the answer; None: the server did not answer.
        reason: short word of the answer, such as "Forbidden".
    """

    def __init__(self, message: str, *, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def is_unreachable(self) -> bool:
        """Whether the outcome of the request is unknown."""
        too_many = self.status == HTTPStatus.TOO_MANY_REQUESTS
        return self.status is None or too_many or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def is_absent(self) -> bool:
        """Whether the object does not exist."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_conflict(self) -> bool:
        """Whether the object exists already, or has changed meanwhile."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def is_forbidden(self) -> bool:
        """Whether the request is not allowed; true for an exceeded quota, too."""
        return self.status == HTTPStatus.FORBIDDEN

    @property
    def is_quota(self) -> bool:
        """Whether a quota has no room (apiserver/pkg/admission/plugin/resourcequota)."""
        return self.is_forbidden and "exceeded quota" in str(self)

    @property
    def is_refusal(self) -> bool:
        """Whether rights, a quota or an admission webhook refuse the request, or nobody answers.

        The same request passes once somebody has changed the cluster. A webhook may refuse with
        any status, by default with 400 (apiserver/pkg/admission/plugin/webhook/errors).
        """
        is_refused = self.is_forbidden or self.status == HTTPStatus.UNAUTHORIZED
        return is_refused or self.is_unreachable or "admission webhook" in str(self)

    @property
    def is_gap(self) -> bool:
        """Whether a watch cannot continue from its version."""
        return self.status == HTTPStatus.GONE


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, by its path on the API server.

    Attributes:
        group: API group; "" for the core API.
        version: of the API group.
        plural: name of the kind in the path.
        is_namespaced: whether its objects are in namespaces.
    """

    group: str
    version: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None, part: str | None = None) -> str:
        """Compose the path of the collection, of an object, or of a part such as its status."""
        root = f"/apis/{self.group}" if self.group else "/api"
        place = f"/namespaces/{namespace}" if self.is_namespaced and namespace is not None else ""
        parts = [root, f"/{self.version}", place, f"/{self.plural}"]
        parts += [f"/{segment}" for segment in (name, part) if segment is not None]
        return "".join(parts)


PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
EVENTS = Resource("", "v1", "events")
CLAIMS = Resource("", "v1", "persistentvolumeclaims")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
NODES = Resource("", "v1", "nodes", is_namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", is_namespaced=False)
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", is_namespaced=False)
POD_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups")
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", is_namespaced=False
)


class Api:
    """A cluster, with the namespace of the run.

    Attributes:
        patience_s: how long a request is repeated while the API server is away.

    Args:
        connection: the official client's.
        namespace: the default for all requests.
        in_cluster: whether this process is in a pod of that cluster.
    """

    def __init__(self, connection: client.ApiClient, namespace: str, *, in_cluster: bool) -> None:
        self.connection = connection
        self.namespace = namespace
        self.in_cluster = in_cluster
        self.patience_s = PATIENCE_S

    @contextmanager
    def without_patience(self, *, is_away: bool) -> Iterator[None]:
        """Try each request once, since the supervisor watches a run meanwhile.

        Args:
            is_away: whether the server is known not to answer, or to refuse.

        Raises:
            EngineError: it is away.
        """
        if is_away:
            raise EngineError("the API server does not answer, or refuses")
        patience_s, self.patience_s = self.patience_s, 0.0
        try:
            yield
        finally:
            self.patience_s = patience_s

    def get(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str | None = None,
        patience_s: float | None = None,
    ) -> Document:
        """Get an object.

        Raises:
            ApiError: it does not exist, or the request failed.
        """
        path = resource.path(namespace or self.namespace, name)
        return self._request("GET", path, patience_s=patience_s)

    def list(
        self,
        resource: Resource,
        *,
        labels: str = "",
        fields: str = "",
        namespace: str | None = None,
        patience_s: float | None = None,
    ) -> tuple[list[Document], str]:
        """List the objects of a kind that fit the selectors, with the version of the list."""
        query: dict[str, str] = {"limit": str(PAGE)}
        query |= {"labelSelector": labels} if labels else {}
        query |= {"fieldSelector": fields} if fields else {}
        items: list[Document] = []
        while True:
            path = resource.path(namespace or self.namespace)
            answer = self._request("GET", path, query=query, patience_s=patience_s)
            items += answer.get("items") or []
            token = answer["metadata"].get("continue")
            if not token:
                return items, answer["metadata"].get("resourceVersion", "")
            query["continue"] = token

    def create(self, resource: Resource, document: Document) -> Document:
        """Create an object."""
        return self._request("POST", resource.path(self.namespace), body=document)

    def patch(self, resource: Resource, name: str, changes: Document) -> Document:
        """Merge changes into an object."""
        return self._request(
            "PATCH",
            resource.path(self.namespace, name),
            body=changes,
            content_type="application/merge-patch+json",
        )

    def delete(
        self,
        resource: Resource,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
    ) -> None:
        """Delete an object; its absence is no error.

        Args:
            resource: the kind of the object.
            name: the name of the object.
            grace_s: replaces a pod's grace period; 0 removes the pod without asking its node.
            uid: deletes the object only if it has this uid.
        """
        options: Document = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._request("DELETE", resource.path(self.namespace, name), body=options)
        except ApiError as error:
            if not (error.is_absent or error.is_conflict):
                raise

    def watch(
        self, resource: Resource, *, version: str, labels: str = "", fields: str = ""
    ) -> Iterator[tuple[str, Document]]:
        """Yield the changes after a version of a list, as type and object, while connected.

        Raises:
            ApiError: the server has forgotten the version (is_gap), or the request failed.
        """
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query |= {"timeoutSeconds": str(WATCH_TIMEOUT_S)}
        query |= {"labelSelector": labels} if labels else {}
        query |= {"fieldSelector": fields} if fields else {}
        path = resource.path(self.namespace)
        with _translated(f"watch {path}"):
            answer = self._send(
                "GET", path, query, None, timeout=(CONNECT_TIMEOUT_S, WATCH_TIMEOUT_S + 5.0)
            )
            try:
                for line in _lines(answer):
                    yield _change(line)
            finally:
                answer.close()

    def allows(
        self,
        verb: str,
        resource: Resource,
        *,
        part: str = "",
        namespace: str | None = None,
        name: str = "",
    ) -> bool:
        """Whether the API server allows this process an action.

        Args:
            verb: such as "get".
            resource: the kind of object.
            part: subresource, such as "portforward".
            namespace: the object's namespace; None: the run's.
            name: the object's name; empty: all objects.
        """
        asked: Document = {
            "verb": verb, "group": resource.group, "resource": resource.plural,
            "subresource": part, "name": name,
        }  # fmt: skip
        if resource.is_namespaced:
            asked["namespace"] = namespace or self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        answer = self._request("POST", ACCESS_REVIEWS.path(None), body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def has(self, resource: Resource) -> bool:
        """Whether the cluster has a kind of object: its CRD is installed."""
        root = f"/apis/{resource.group}/{resource.version}" if resource.group else "/api/v1"
        try:
            answer = self._request("GET", root)
        except ApiError as error:
            if error.is_absent:
                return False
            raise
        return any(kind.get("name") == resource.plural for kind in answer.get("resources", ()))

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        content_type: str = "application/json",
        patience_s: float | None = None,
    ) -> Document:
        """Send a request, again and again while the API server is away.

        Where the answer to a creation was lost, the next try is a conflict, which callers handle.
        """
        deadline_s = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        while True:
            try:
                with _translated(f"{method} {path}"):
                    answer = self._send(method, path, query or {}, body, content_type=content_type)
                    document: Document = from_json(answer.data or b"{}")
                    return document
            except ApiError as error:
                if not error.is_unreachable or time.monotonic() > deadline_s:
                    raise
                _log.info("%s; asked again", error)
            time.sleep(RETRY_S)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Document | None,
        *,
        content_type: str = "application/json",
        timeout: tuple[float, float] = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        return self.connection.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=timeout,
        )


@contextmanager
def _translated(request: str) -> Iterator[None]:
    """Turn the client's errors into ApiError, each on a single line."""
    try:
        yield
    except ApiException as error:
        raise _refusal(request, error) from error
    except FAILURES as error:
        raise ApiError(f"the API server cannot be reached: {_innermost(error)}") from error


def _refusal(request: str, error: ApiException) -> ApiError:
    try:
        details = from_json(error.body or "{}")
    except ValueError:
        details = {}
    text = details.get("message") or error.reason or "no reason given"
    reason = details.get("reason") or str(error.reason or "")
    return ApiError(f"{request}: {text}", status=error.status, reason=reason)


def _innermost(error: BaseException) -> str:
    """Extract the operating system's words from urllib3's error."""
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)


def _lines(answer: Any) -> Iterator[bytes]:
    remainder = b""
    for piece in answer.stream(amt=None, decode_content=False):
        *whole, remainder = (remainder + piece).split(b"\n")
        yield from (line for line in whole if line)


def _change(line: bytes) -> tuple[str, Document]:
    event = from_json(line)
    kind, document = event["type"], event["object"]
    if kind == "ERROR":
        raise ApiError(
            f"watch: {document.get('message')}",
            status=document.get("code"),
            reason=str(document.get("reason")),
        )
    return kind, document


def connect(*, context: str | None, namespace: str | None) -> Api:
    """Connect to the cluster of the kubeconfig, or else to that of this process's pod.

    Args:
        context: name of the kubeconfig's context; None: the current one.
        namespace: the run's; None: that of the context, or of this pod.

    Raises:
        InputError: there is no such context, or neither a kubeconfig nor a pod.
    """
    settings = client.Configuration()
    # By default the client would repeat a request for minutes while the server is down.
    settings.retries = False
    file = os.environ.get("KUBECONFIG")  # the client reads it when it is imported
    try:
        config.load_kube_config(
            file, context=context, client_configuration=settings, persist_config=False
        )
        listing = config.list_kube_config_contexts(file)
    except ConfigException as error:
        if context is not None:
            raise InputError("engine.context", f"{context!r}: {error}") from error
        return _connect_from_pod(settings, namespace)
    _bypass_proxy(settings)
    contexts, current = listing
    named = next((entry for entry in contexts if entry["name"] == context), current)
    place = namespace or named.get("context", {}).get("namespace") or "default"
    return Api(client.ApiClient(settings), place, in_cluster=False)


def _bypass_proxy(settings: client.Configuration) -> None:
    """Reach an API server of this network directly, unless the kubeconfig names a proxy."""
    if settings.proxy == client.Configuration().proxy and is_direct(settings.host):
        settings.proxy = None


def _connect_from_pod(settings: client.Configuration, namespace: str | None) -> Api:
    try:
        config.load_incluster_config(client_configuration=settings)
        pod_namespace = open(_NAMESPACE_FILE, encoding="utf-8").read().strip()  # noqa: PTH123, SIM115
    except (ConfigException, OSError) as error:
        why = "no cluster is known: KUBECONFIG names none, and this process is in no pod"
        raise InputError("engine.kind", why) from error
    _bypass_proxy(settings)
    return Api(client.ApiClient(settings), namespace or pod_namespace, in_cluster=True)
