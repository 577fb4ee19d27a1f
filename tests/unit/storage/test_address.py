"""Specs and credentials: one clear message per mistake, and keys that show nowhere."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from perdure.storage import address
from perdure.storage.address import (
    STORES,
    Credentials,
    StorageSpec,
    check_reachable,
    open_store,
    worker_environment,
)
from perdure.storage.errors import AccessDenied, Corrupt
from perdure.storage.local import LocalStore
from perdure.storage.objects import ObjectStore
from perdure.storage.s3 import S3Store
from tests.s3.conftest import EVERY_KIND, KINDS

BUCKET = StorageSpec(address="s3://bucket")
KEYS: dict[str, Any] = {
    "access_key": "AKID-SECRET",
    "secret_key": "KEY-SECRET",
    "session_token": "TOKEN-SECRET",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"address": "file://relative/folder"}, "is a relative path; write file:///absolute"),
        ({"address": "file://"}, "is a relative path"),
        ({"address": "/folder"}, "neither file:// nor s3://; for a folder write file:///folder"),
        ({"address": "file:/folder"}, "for a folder write file:///folder"),
        ({"address": "folder"}, "write file:///absolute/folder or s3://bucket/prefix"),
        ({"address": "obs://bucket/x"}, "'obs://bucket/x' begins with neither"),
        ({"address": "obs://bucket/x"}, "write s3://bucket/x, with its endpoint"),
        ({"address": "s3://"}, "names no bucket"),
        ({"address": "s3:///prefix"}, "names no bucket"),
        ({"address": "s3://bucket/a/../b"}, "without '.' or '..'"),
        ({"address": "file:///a", "endpoint": "https://obs"}, "needs an s3:// address"),
        ({"address": "s3://b", "endpoint": "obs.example"}, "must start with https://"),
        ({"address": "s3://b", "access_key": "k"}, "Extra inputs"),
        ({"address": "s3://b", "read_timeout_s": 0}, "greater than 0"),
        ({"address": "s3://b", "adress": 0}, "Extra inputs"),
    ],
)
def test_each_mistake_has_one_clear_message(fields, message):
    with pytest.raises(ValidationError) as raised:
        StorageSpec(**fields)
    assert raised.value.error_count() == 1
    assert message in raised.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Credentials, {"access_key": "AKID-SECRET"}),
        (Credentials, KEYS | {"secret_kye": "KEY-SECRET"}),
        (Credentials, KEYS | {"session_token": "TOKEN-SECRET\n"}),
        (Credentials, KEYS | {"secret_key": ["KEY-SECRET"]}),
        (StorageSpec, KEYS | {"address": "s3://bucket"}),
        (
            StorageSpec,
            {"address": "s3://bucket", "endpoint": "https://AKID-SECRET:KEY-SECRET@obs.example"},
        ),
    ],
)
def test_error_texts_of_credentials_and_specs_hold_no_keys(kind, fields):
    with pytest.raises(ValidationError) as raised:
        kind(**fields)
    assert "SECRET" not in str(raised.value)


def test_keys_appear_in_no_text_of_the_credentials():
    keys = Credentials(**KEYS)
    texts = [repr(keys), str(keys), keys.model_dump_json(), str(keys.model_dump())]
    assert all("SECRET" not in text for text in texts)


def test_keys_reach_children_by_environment_only():
    assert worker_environment(BUCKET, Credentials(**KEYS)) == {
        "AWS_ACCESS_KEY_ID": "AKID-SECRET",
        "AWS_SECRET_ACCESS_KEY": "KEY-SECRET",
        "AWS_SESSION_TOKEN": "TOKEN-SECRET",
    }


def test_keys_of_the_own_environment_reach_containers_which_inherit_none(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-environment")
    assert worker_environment(BUCKET, None) == {
        "AWS_ACCESS_KEY_ID": "of-environment",
        "AWS_SECRET_ACCESS_KEY": "secret-of-environment",
    }
    folder = StorageSpec(address=f"file://{tmp_path}")
    assert worker_environment(folder, None) == {}, "a folder wants no keys"


def test_addresses_open_their_store(tmp_path):
    local = open_store(StorageSpec(address=f"file://{tmp_path}/store"))
    assert isinstance(local, LocalStore)
    assert local.url("a") == f"file://{tmp_path}/store/a"
    assert local.local_path("a") == tmp_path / "store" / "a"
    s3 = open_store(StorageSpec(address="s3://bucket/a/b/", region="r"), Credentials(**KEYS))
    assert isinstance(s3, S3Store)
    assert s3.url("c") == "s3://bucket/a/b/c"
    assert s3.local_path("c") is None
    assert s3._options.secret_key == SecretStr("KEY-SECRET")


def test_only_a_folder_is_a_folder(tmp_path):
    assert StorageSpec(address=f"file://{tmp_path}/store").folder == tmp_path / "store"
    assert StorageSpec(address="s3://bucket/a").folder is None


def test_every_store_has_an_address_and_is_tested_as_the_others_are():
    wanted = {name for name in vars(ObjectStore) if not name.startswith("_")}
    package = import_module("perdure.storage")
    modules = [
        import_module(f"perdure.storage.{one.name}") for one in iter_modules(package.__path__)
    ]
    stores = {
        one.__name__
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and wanted <= set(dir(one)) and one is not ObjectStore
    }
    source = Path(address.__file__).read_text(encoding="utf-8")
    without = [name for name in stores if f"{name}(" not in source]
    assert not without, "storage/address.py: STORES needs a line for each store"
    tested = {kind.scheme for kind in KINDS.values()}
    assert tested == set(STORES), "tests/s3/conftest.py: KINDS needs a server for each scheme"
    kinds = {getattr(one, "values", (one,))[0] for one in EVERY_KIND}
    assert kinds == set(KINDS), "tests/s3/conftest.py: EVERY_KIND needs each of KINDS"


def test_the_keys_of_a_spec_open_a_real_bucket(s3, moto_endpoint):
    spec = StorageSpec(
        address=f"s3://{s3._bucket}/team",
        endpoint=moto_endpoint,
        region="us-east-1",
        addressing_style="path",
    )
    store = open_store(spec, Credentials(**KEYS))
    check_reachable(store, "run")
    assert list(store.list("")) == [], "the probe is removed"


def test_a_reachable_store_is_left_as_it_was(tmp_path):
    store = LocalStore(tmp_path / "store")
    check_reachable(store, "")
    check_reachable(store, "runs/")
    assert list(store.list("")) == []


def test_the_check_of_an_unreachable_store_names_what_failed(local, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(local, "get", lambda _key: b"other")
        with pytest.raises(
            Corrupt, match=r"storage check: cannot read: .*differ from those written"
        ):
            check_reachable(local, "x")

    def denied(*_: object) -> None:
        raise AccessDenied("no")

    monkeypatch.setattr(local, "put", denied)
    with pytest.raises(AccessDenied, match="storage check: cannot write: no"):
        check_reachable(local, "x")


URLS = {"AWS_ENDPOINT_URL": "https://obs.example.com", "AWS_REGION": "cn-north-4"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, URLS),
        ({"endpoint": "https://s3.example.com"}, {"AWS_REGION": "cn-north-4"}),
        ({"region": "eu-1"}, {"AWS_ENDPOINT_URL": "https://obs.example.com"}),
        ({"endpoint": "https://s3.example.com", "region": "eu-1"}, {}),
    ],
)
@pytest.mark.parametrize("credentials", [None, Credentials(access_key="a", secret_key="b")])
def test_endpoint_and_region_that_a_job_does_not_name_are_handed_on(
    monkeypatch, section, expected, credentials
):
    for name, value in URLS.items():
        monkeypatch.setenv(name, value)
    spec = StorageSpec(address="s3://bucket", **section)
    variables = worker_environment(spec, credentials)
    assert {name: value for name, value in variables.items() if "KEY" not in name} == expected
