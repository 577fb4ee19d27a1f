"""The servers, one at a time, and stores on them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.address import FILE_SCHEME, S3_SCHEME
from perdure.storage.local import LocalStore
from perdure.storage.objects import ObjectStore
from perdure.storage.retry import Retry
from perdure.storage.s3 import S3Store
from perdure.storage.s3_options import S3Options
from tests.s3.programs import HOST
from tests.s3.proxy import FaultProxy
from tests.s3.rgw import Rgw
from tests.s3.servers import ACCESS_KEY, SECRET_KEY, Folder, Moto, Rclone, Server
from tests.unit.storage.conftest import _no_credentials_from_outside  # noqa: F401 a fixture
from tests.unit.storage.stores import s3_options

KINDS: dict[str, type[Server]] = {"local": Folder, "moto": Moto, "rclone": Rclone, "rgw": Rgw}
# What tests are parametrised with.
RCLONE = pytest.param("rclone", marks=pytest.mark.process)
RGW = pytest.param("rgw", marks=pytest.mark.process)
EVERY_KIND = ["local", "moto", RCLONE, RGW]

BUCKET = "bucket"

FOLDER = Path(__file__).parent
CONNECTIONS: dict[S3Options, Any] = {}

Opener = Callable[..., S3Store]


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Server]:
    """The kind that the test names; pytest ends it before it starts the next."""
    kind = KINDS[request.param]
    missing = kind.missing()
    if missing:
        pytest.skip(missing)
    running = kind(tmp_path_factory.mktemp(request.param))
    try:
        if running.scheme == S3_SCHEME:
            open_s3(running.port, "")._client().create_bucket(Bucket=BUCKET)
        yield running
    finally:
        running.end()


@pytest.fixture
def store(server: Server, tmp_path: Path) -> ObjectStore:
    """An empty store on the server."""
    if server.scheme == FILE_SCHEME:
        return LocalStore(tmp_path / "store")
    assert server.scheme == S3_SCHEME, "tests/s3/conftest.py: the fixture `store` opens no such"
    return open_s3(server.port, f"team/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def running_proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy in front of the server that hands everything on, until a test changes that."""
    yield running_proxy
    running_proxy.reset()


@pytest.fixture
def open_store(server: Server, proxy: FaultProxy) -> Opener:
    """Opens stores of one fresh prefix, behind the proxy or beside it."""
    prefix = f"team/{uuid.uuid4().hex}"

    def opener(*, direct: bool = False, retry: Retry | None = None, **changes) -> S3Store:
        port = server.port if direct else proxy.server_port
        return open_s3(port, prefix, retry=retry, **changes)

    return opener


def open_s3(port: int, prefix: str, *, retry: Retry | None = None, **changes) -> S3Store:
    """A store on the server of that port; `changes` are of the options."""
    own = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY, "endpoint": f"http://{HOST}:{port}"}
    options = s3_options(**own | changes)
    store = S3Store(BUCKET, prefix, options=options, retry=retry)
    # A client takes longer to make than most tests to run, and all of one server are alike.
    store._connection = CONNECTIONS.get(store._options)
    store._client()
    CONNECTIONS[store._options] = store._connection
    return store


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One server after the other: pytest groups by places in a test's list, not by kinds."""
    places = [place for place, item in enumerate(items) if kind_of(item)]
    order = list(KINDS)
    grouped = sorted(
        (items[place] for place in places), key=lambda item: order.index(kind_of(item))
    )
    for place, item in zip(places, grouped, strict=True):
        items[place] = item


def kind_of(item: pytest.Item) -> str:
    """Which server the test needs, "" for tests elsewhere."""
    if not isinstance(item, pytest.Function) or FOLDER not in item.path.parents:
        return ""
    return str(item.callspec.params["server"])
