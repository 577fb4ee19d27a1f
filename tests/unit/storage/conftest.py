"""Stores to test against: a folder, a moto S3 server, and a tiny S3 server that fails on demand."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

import pytest
from moto.server import ThreadedMotoServer

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Chunk, Manifest, ShardRecord, TensorRecord
from perdure.storage.objects import ObjectStore
from perdure.storage.retry import Retry
from perdure.storage.s3 import S3Store
from tests.unit.storage.nodes import Cluster
from tests.unit.storage.stores import s3_options

RUN_ID = "run-1"


REFUSALS = {  # fault -> answer; nothing is done
    "slow_down": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "conflict": (409, "ConditionalRequestConflict"),
}
ANSWER_LOST = "answer_lost"  # done, then the connection is closed
HALF_A_BODY = "half_a_body"  # the answer breaks off


class FaultyS3(ThreadingHTTPServer):
    """PUT (also If-None-Match) and GET of whole objects; `faults` strike in order.

    A listing shows nothing.
    """

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.ahead_s = 0.0  # of this machine's clock
        self.lock = Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self._next_fault()
        if fault in REFUSALS:
            self._refuse(*REFUSALS[fault])
        elif not self._published(data):
            self._refuse(412, "PreconditionFailed")
        elif fault == ANSWER_LOST:
            self.close_connection = True
        else:
            self._answer(200, b"")

    def do_GET(self) -> None:
        fault = self._next_fault()
        if fault in REFUSALS:
            self._refuse(*REFUSALS[fault])
        elif "list-type=2" in self.path:
            self._answer(
                200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            )
        elif self.path not in self.server.objects:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(200, self.server.objects[self.path], half=fault == HALF_A_BODY)

    def date_time_string(self, timestamp: float | None = None) -> str:
        at_s = time.time() if timestamp is None else timestamp
        return super().date_time_string(at_s + self.server.ahead_s)

    def log_message(self, *args: object) -> None:
        pass

    def _published(self, data: bytes) -> bool:
        with self.server.lock:
            if "If-None-Match" in self.headers and self.path in self.server.objects:
                return False
            self.server.objects[self.path] = data
            return True

    def _next_fault(self) -> str | None:
        self.server.requests.append(self.command)
        return self.server.faults.pop(0) if self.server.faults else None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, *, half: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if half else body)
        self.close_connection = half


@pytest.fixture(autouse=True)
def _no_credentials_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto_endpoint: str) -> S3Store:
    """An empty bucket of the moto server."""
    store = S3Store(f"bucket-{uuid.uuid4().hex}", "team/runs", options=s3_options(moto_endpoint))
    store._client().create_bucket(Bucket=store._bucket)
    return store


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    server = FaultyS3()
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pauses_s() -> list[float]:
    """What `faulty_store` slept between its tries, if sleeping were real."""
    return []


@pytest.fixture
def faulty_store(faulty: FaultyS3, pauses_s: list[float]) -> S3Store:
    retry = Retry(clock=lambda: 0.0, sleep=pauses_s.append)
    return S3Store("bucket", options=s3_options(faulty.endpoint), retry=retry)


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Every kind of store."""
    opened: ObjectStore = request.getfixturevalue(request.param)
    return opened


@pytest.fixture
def checkpoints(local: LocalStore) -> CheckpointStore:
    return CheckpointStore(local, RUN_ID, clock=lambda: 1000.0)


Committer = Callable[..., Manifest]


@pytest.fixture
def commit() -> Committer:
    """Write two shards of each step and publish them. Returns the last manifest."""

    def publish(checkpoints: CheckpointStore, *steps: int, **owner: int) -> Manifest:
        return [publish_one(checkpoints, step, **owner) for step in steps][-1]

    def publish_one(
        checkpoints: CheckpointStore, step: int, *, placement: int = 0, attempt: int = 0
    ) -> Manifest:
        shards: dict[str, ShardRecord] = {}
        for rank in range(2):
            name = shard_name(placement, attempt, rank)
            shards[name] = checkpoints.put_shard(step, name, bytes([rank, step % 256]) * 500)
        chunk = Chunk(offsets=(0,), lengths=(1,), shard=name, key="weight")
        manifest = Manifest(
            run_id=checkpoints.run_id,
            placement=placement,
            attempt=attempt,
            step=step,
            world_size=2,
            written_at_s=checkpoints.clock(),
            tensors={"weight": TensorRecord(dtype="U8", shape=(1,), chunks=(chunk,))},
            shards=shards,
        )
        checkpoints.commit(manifest)
        return manifest

    return publish


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """Nodes with checkpoint servers that keep two steps in the store."""
    cluster = Cluster.at(tmp_path, keep_last=2)
    yield cluster
    cluster.close()
