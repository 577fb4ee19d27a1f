"""Addresses that are reached without a proxy, and how each HTTP client is told."""

from __future__ import annotations

import urllib.request

import httpx
import pytest
from botocore.utils import should_bypass_proxies
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from perdure.storage.proxies import (
    bypass_proxies,
    export_line,
    is_direct,
    proxy_of,
    users_environment,
)
from perdure.storage.s3_client import connect
from perdure.storage.s3_options import S3Options

PROXY = "http://127.0.0.1:9"
OFFICE = {
    name: PROXY
    for lower in ("http_proxy", "https_proxy", "all_proxy")
    for name in (lower, lower.upper())
}
FORMS = [
    None, "", "127.0.0.0/8", ".local", "*", "*.corp.example", "::1/128", "[::1]", "localhost",
    "10.0.0.0/8, fd00::/8;<local>", "a.example b.example", "*,corp.example", "http://corp.example",
]  # fmt: skip
SERVERS = [
    "http://127.0.0.1:4200/api",
    "http://127.3.2.1:4200/api",
    "http://localhost:4200/api",
    "http://[::1]:4200/api",
    "http://prefect-server:4200/api",
    "http://prefect.perdure.svc:4200/api",
    "http://prefect.perdure.svc.cluster.local:4200/api",
]


@pytest.fixture
def office(monkeypatch):
    """Set an office's proxies, with or without no_proxy, in this process."""

    def set_(no_proxy=None, **others):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**OFFICE, **others}.items():
            monkeypatch.setenv(name, value)
        if no_proxy is not None:
            monkeypatch.setenv("no_proxy", no_proxy)
        monkeypatch.setenv("PERDURE_USERS_PROXIES", "")  # restored after the test

    return set_


def _proxied(client: httpx.Client, url: str) -> bool:
    return client._transport_for_url(httpx.URL(url)) is not client._transport


@pytest.mark.parametrize("no_proxy", FORMS)
@pytest.mark.parametrize("url", SERVERS)
def test_every_client_of_prefect_reaches_its_own_server_directly(office, url, no_proxy):
    import os

    office(no_proxy)
    bypass_proxies(os.environ, (url,))
    with httpx.Client() as client:
        assert not _proxied(client, url)
    assert get_proxy(parse_uri(url.replace("http", "ws"))) is None
    assert urllib.request.proxy_bypass(httpx.URL(url).host)


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "socks4://a:1", "http://a:port", "x y"])
def test_a_proxy_that_httpx_cannot_read_costs_no_client_of_an_own_server(office, proxy):
    import os

    office(all_proxy=proxy, ALL_PROXY=proxy)
    bypass_proxies(os.environ, (SERVERS[0],))
    with httpx.Client() as client:
        assert not _proxied(client, SERVERS[0])
