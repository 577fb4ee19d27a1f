"""Addresses that are reached without a proxy, and how each HTTP client is told."""

from __future__ import annotations

import os
import socket
import ssl
import urllib.request

import httpx
import psutil
import pytest
from pydantic import SecretStr
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from perdure.storage.proxies import (
    USERS_VARIABLES,
    bypass_proxies,
    export_line,
    is_direct,
    proxy_of,
    users_environment,
)
from perdure.storage.s3_client import connect
from perdure.storage.s3_options import S3Options
from tests.values import not_none

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


CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # one, as it takes long to make
REMOTE = "http://prefect.corp.example:4200/api"


@pytest.fixture
def office(monkeypatch):
    """Give this process an office's proxies, with or without no_proxy."""

    def give(no_proxy: str | None = None, **others: str) -> None:
        for name in ("no_proxy", "NO_PROXY", USERS_VARIABLES):
            monkeypatch.setenv(name, "")  # put back after the test
            monkeypatch.delenv(name)
        for name, value in {**OFFICE, **others}.items():
            monkeypatch.setenv(name, value)
        if no_proxy is not None:
            monkeypatch.setenv("no_proxy", no_proxy)

    return give


def goes_through_a_proxy(url: str) -> bool:
    with httpx.Client(verify=CONTEXT) as client:
        return client._transport_for_url(httpx.URL(url)) is not client._transport


@pytest.mark.parametrize("no_proxy", FORMS)
@pytest.mark.parametrize("url", SERVERS)
def test_every_client_of_prefect_reaches_a_server_of_its_own_directly(office, url, no_proxy):
    office(no_proxy)
    bypass_proxies(os.environ, (url,))
    assert not goes_through_a_proxy(url)
    assert get_proxy(parse_uri(url.replace("http", "ws"))) is None
    assert urllib.request.proxy_bypass(httpx.URL(url).host)
    assert proxy_of(url) is None


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "socks4://a:1", "http://a:port", "x y:z"])
def test_a_proxy_that_httpx_cannot_read_does_not_stand_before_a_server(office, proxy):
    office(all_proxy=proxy, ALL_PROXY=proxy)
    bypass_proxies(os.environ, (SERVERS[0],))
    assert not goes_through_a_proxy(SERVERS[0])
    assert users_environment(os.environ)["all_proxy"] == proxy


@pytest.mark.parametrize("no_proxy", [None, "", "127.0.0.0/8", ".local", "other.example"])
def test_a_remote_server_keeps_its_proxy_which_is_named_without_its_password(office, no_proxy):
    office(no_proxy, http_proxy="http://me:secret@proxy.corp.example:3128")
    bypass_proxies(os.environ, (REMOTE,))
    assert goes_through_a_proxy(REMOTE)
    assert str(proxy_of(REMOTE)) == "http_proxy=http://proxy.corp.example:3128"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ({"all_proxy": PROXY}, "all_proxy"),
        ({"ALL_PROXY": PROXY, "https_proxy": PROXY}, "ALL_PROXY"),
    ],
)
def test_the_variable_that_names_the_proxy_is_found(variables, name):
    assert not_none(proxy_of(REMOTE, variables)).variable == name


@pytest.mark.parametrize(
    ("no_proxy", "url"),
    [
        ("10.0.0.0/8", "http://10.1.2.3:9000"),
        ("10.1.2.3:9000", "http://10.1.2.3:9000"),
        ("2001:db8::/32", "http://[2001:db8::5]:9000"),
        ("*.corp.example", "https://s3.corp.example"),
        (".corp.example", "https://s3.corp.example"),
        ("localhost corp.example", "https://s3.corp.example:443"),
        ("*", "https://s3.corp.example"),
    ],
)
def test_no_proxy_is_read_in_every_usual_form(no_proxy, url):
    assert not is_direct(url, OFFICE)
    assert is_direct(url, {**OFFICE, "NO_PROXY": no_proxy})


def test_private_addresses_are_direct_in_a_pod_alone():
    address = "https://10.96.0.1:443"
    assert not is_direct(address, OFFICE)
    assert is_direct(address, {**OFFICE, "KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert not is_direct("https://8.8.8.8", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})


def test_addresses_of_this_machine_are_direct():
    for interfaces in psutil.net_if_addrs().values():
        for interface in interfaces:
            if interface.family is socket.AF_INET:
                assert is_direct(f"http://{interface.address}:9000", OFFICE)
    assert is_direct(f"http://{socket.gethostname()}:9000", OFFICE)


@pytest.mark.parametrize("no_proxy", FORMS)
def test_a_program_gets_the_variables_as_the_user_set_them(no_proxy):
    users = {**OFFICE, "PATH": "/bin"} | ({} if no_proxy is None else {"no_proxy": no_proxy})
    environment = dict(users)
    bypass_proxies(environment, (SERVERS[0],))
    bypass_proxies(environment, (SERVERS[4],))  # in a child of that process
    assert users_environment(environment) == users


def test_an_environment_without_proxies_stays_as_it_is():
    environment = {"PATH": "/bin", "no_proxy": "a"}
    bypass_proxies(environment, SERVERS)
    assert environment == {"PATH": "/bin", "no_proxy": "a"}
    assert export_line(SERVERS[0], environment) is None


def test_the_export_for_other_programs_is_printed_until_they_have_it():
    line = not_none(export_line(SERVERS[0], OFFICE))
    value = "localhost,127.0.0.1,::1"
    assert line == f"export no_proxy={value} NO_PROXY={value}"
    assert export_line(SERVERS[0], {**OFFICE, "no_proxy": value, "NO_PROXY": value}) is None


@pytest.mark.parametrize("no_proxy", [None, ".local", "127.0.0.0/8"])
@pytest.mark.parametrize(
    ("endpoint", "is_proxied"),
    [
        ("http://127.0.0.1:9000", False),
        ("http://minio.store.svc:9000", False),
        ("http://rgw:80", False),
        ("https://obs.corp.example", True),
    ],
)
def test_a_store_on_loopback_or_in_the_cluster_has_no_proxy(office, no_proxy, endpoint, is_proxied):
    office(no_proxy)
    options = S3Options(endpoint=endpoint, region="r", access_key=SecretStr("a"),
                        secret_key=SecretStr("b"))  # fmt: skip
    session = connect(options)._endpoint.http_session
    assert bool(session._proxy_config.proxy_url_for(endpoint)) is is_proxied


def test_the_endpoint_of_the_environment_has_no_proxy_either(office, monkeypatch):
    office()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    options = S3Options(region="r", access_key=SecretStr("a"), secret_key=SecretStr("b"))
    session = connect(options)._endpoint.http_session
    assert session._proxy_config.proxy_url_for("http://127.0.0.1:9000") is None
