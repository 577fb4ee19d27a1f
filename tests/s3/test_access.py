"""How a store is reached: whose keys, which certificates, and where the bucket's name goes."""

from __future__ import annotations

import socket
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.address import Credentials, StorageSpec, check_reachable, clear, open_store
from perdure.storage.errors import AccessDenied, NotFound, PermanentError
from perdure.storage.objects import ObjectStore
from perdure.storage.retry import Retry
from tests.s3.conftest import BUCKET, RGW, open_s3
from tests.s3.programs import HOST, find_program
from tests.s3.rgw import DOMAIN, Rgw
from tests.s3.servers import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.parametrize("server", [RGW], indirect=True)

ONCE = Retry(max_tries=1)


def spec_of(endpoint: str, **changes: Any) -> StorageSpec:
    """As the storage section of a job has it."""
    return StorageSpec.model_validate(
        {
            "address": f"s3://{BUCKET}/team/{uuid.uuid4().hex}",
            "endpoint": endpoint,
            "region": "us-east-1",
            "addressing_style": "path",
            **changes,
        }
    )


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credentials file with the right keys under one name and wrong ones under two."""
    wrong = "wrong-secret-key"
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {wrong}\n"
        f"[team]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        f"[left]\naws_access_key_id = left-us\naws_secret_access_key = {wrong}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))


def test_an_address_is_cleared_with_what_no_listing_shows_and_nothing_beside_it(server):
    keys = Credentials.model_validate({"access_key": ACCESS_KEY, "secret_key": SECRET_KEY})
    whole = spec_of(f"http://{HOST}:{server.port}")
    mine = whole.model_copy(update={"address": f"{whole.address}/drills"})
    beside = whole.model_copy(update={"address": f"{whole.address}/drills-of-others"})
    open_store(beside, keys).put("ledger", b"kept")
    for number in range(3):
        open_store(mine, keys).put(f"runs/{number}", b"x", if_absent=True)  # leaves a probe
    client = open_s3(server.port, "")._client()
    prefix = whole.address.removeprefix(f"s3://{BUCKET}/")
    unfinished = {"Bucket": BUCKET, "Key": f"{prefix}/drills/shard"}
    client.create_multipart_upload(**unfinished)

    clear(mine, keys)

    left = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    assert [entry["Key"] for entry in left] == [f"{prefix}/drills-of-others/ledger"]
    uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/drills/")
    assert "Uploads" not in uploads


def test_a_whole_bucket_is_not_cleared(server):
    bucket = spec_of(f"http://{HOST}:{server.port}", address=f"s3://{BUCKET}")
    with pytest.raises(ValueError, match="a whole bucket is not cleared"):
        clear(bucket)


def test_the_keys_of_the_profile_that_is_named_open_the_store(server, profiles, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "team")
    store = open_store(spec_of(f"http://{HOST}:{server.port}"))
    check_reachable(store, "runs")
    store.put("a", b"data")
    assert store.get("a") == b"data"


@pytest.mark.parametrize(
    ("profile", "message"),
    [(None, "SignatureDoesNotMatch"), ("left", "InvalidAccessKeyId"), ("nobody", "nobody")],
)
def test_a_profile_without_the_right_keys_is_refused_and_no_other_is_tried(
    server, profiles, monkeypatch, profile, message
):
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    store = open_store(spec_of(f"http://{HOST}:{server.port}"), retry=ONCE)
    with pytest.raises(AccessDenied, match=message) as raised:
        store.put("a", b"data")
    assert "wrong-secret-key" not in str(raised.value)


@dataclass(frozen=True)
class Tls:
    """A gateway that speaks TLS, and who vouches for it."""

    endpoint: str
    ca_bundle: Path
    other_bundle: Path  # of another authority


def authority(folder: Path, name: str) -> Path:
    """The certificate of a new authority; its key is beside it."""
    certificate = folder / f"{name}.pem"
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", f"{folder / name}.key", "-out", str(certificate)),
    )
    return certificate


def signed(folder: Path, by: Path) -> tuple[Path, Path]:
    """Certificate and key of the server, signed by an authority."""
    request, names = folder / "server.csr", folder / "names"
    certificate, key = folder / "server.pem", folder / "server.key"
    names.write_text(f"subjectAltName=IP:{HOST}\n")
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=gateway"),
        *("-keyout", str(key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"),
        *("-CA", str(by), "-CAkey", str(by.with_suffix(".key"))),
        *("-extfile", str(names), "-out", str(certificate)),
    )
    return certificate, key


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tls(server: Rgw, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    if not find_program("openssl"):
        pytest.skip("no openssl: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    ours, other = authority(folder, "ours"), authority(folder, "other")
    port = server.start_tls_gateway(*signed(folder, ours))
    return Tls(f"https://{HOST}:{port}", ours, other)


@pytest.fixture
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_keys")
def test_a_server_that_the_ca_bundle_vouches_for_is_trusted(tls):
    store = open_store(spec_of(tls.endpoint, ca_bundle=str(tls.ca_bundle)))
    data = bytes(range(256)) * 8192
    store.put("a", data)
    out = bytearray(len(data))
    store.get_into("a", memoryview(out))
    assert out == data
    assert [info.size_bytes for info in store.list("")] == [len(data)]


@pytest.mark.usefixtures("_keys")
@pytest.mark.parametrize("bundle", [None, "other_bundle"])
def test_a_server_that_no_authority_vouches_for_is_refused_and_sent_nothing(tls, bundle):
    trusted = open_store(spec := spec_of(tls.endpoint, ca_bundle=str(tls.ca_bundle)))
    path = str(getattr(tls, bundle)) if bundle else None
    distrusted: ObjectStore = open_store(spec.model_copy(update={"ca_bundle": path}), retry=ONCE)
    for use in (lambda: distrusted.put("a", b"data"), lambda: distrusted.get("a")):
        with pytest.raises(PermanentError, match="certificate is not trusted; set ca_bundle"):
            use()
    with pytest.raises(NotFound):
        trusted.get("a")


@pytest.fixture
def names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a domain name system that knows our domain; nothing is left of it afterwards."""
    resolve = socket.getaddrinfo

    def answer(host: str, *arguments: Any, **more: Any) -> Any:
        return resolve(HOST if host.endswith(DOMAIN) else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.usefixtures("names_resolve")
@pytest.mark.parametrize(
    ("style", "endpoint", "host", "root"),
    [
        ("virtual", DOMAIN, f"{BUCKET}.{DOMAIN}", ""),
        ("path", DOMAIN, DOMAIN, f"/{BUCKET}"),
        # boto3 asks for hosts of buckets by itself at AWS alone.
        ("auto", DOMAIN, DOMAIN, f"/{BUCKET}"),
    ],
)
def test_the_buckets_name_goes_where_the_addressing_style_says(
    proxy, open_store, style, endpoint, host, root
):
    port = proxy.server_port
    store = open_store(endpoint=f"http://{endpoint}:{port}", addressing_style=style)
    prefix = store._prefix
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert store.stat("a").size_bytes == 4
    store.put("shard", bytes(6 * 2**20))
    assert [info.key for info in store.list("")] == ["a", "shard"]
    store.delete("a")
    assert set(proxy.hosts) == {f"{host}:{port}"}
    paths = [path for _, path in proxy.requests]
    of_objects = [path for path in paths if "list-type" not in path]
    assert len(of_objects) >= 8
    assert all(path.startswith(f"{root}/{prefix}") for path in of_objects)
    (listing,) = (path for path in paths if "list-type" in path)
    assert listing.partition("?")[0] == (root or "/")
    direct = open_store(direct=True)
    assert [info.key for info in direct.list("")] == ["shard"], "the same bucket, however named"
