"""Proxies of the environment, and the addresses that are reached without them.

Many offices set http_proxy, https_proxy and all_proxy in every shell. HTTP clients read no_proxy in
different ways: httpx knows no networks and fails at one of IPv6 (0.28), and urllib and botocore
take "*" only alone. `is_direct` decides for all of them. A client that Perdure makes is told so;
Prefect's read the environment, which `bypass_proxies` changes for Perdure's own process, and
`users_environment` is for the programs that it starts.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

USERS_VARIABLES = "PERDURE_USERS_PROXIES"  # the variables as the user set them, as JSON
_NO_PROXY = "no_proxy"
_NAMES = frozenset(
    f"{scheme}_proxy" for scheme in ("http", "https", "all", "ws", "wss", "socks", "no")
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CLUSTER = re.compile(r"\.svc(\.|$)|\.cluster\.local$")  # of a Service in Kubernetes
_IN_POD = "KUBERNETES_SERVICE_HOST"
_READABLE = re.compile(r"[A-Za-z0-9._:-]+|\d+(\.\d+){3}/\d+")  # by httpx; others end its clients
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Proxy:
    """The proxy of an address.

    Attributes:
        variable: name of the environment variable.
        url: its value without a password.
    """

    variable: str
    url: str

    def __str__(self) -> str:
        return f"{self.variable}={self.url}"


def is_direct(url: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether requests to an address never go through a proxy.

    That is so for this machine, its networks and services of a cluster; in a pod, for private
    addresses; and for what the user's no_proxy covers in any of the usual forms.
    """
    host = _host_of(url)
    if _is_near(host, in_pod=_IN_POD in environment):
        return True
    return any(_covers(entry, host) for entry in _entries(_users(environment)))


def proxy_of(url: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """Find the proxy through which requests to an address go; None: there is none."""
    if is_direct(url, environment):
        return None
    for name in (f"{urlsplit(url).scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if value := environment.get(variable):
                return Proxy(variable, re.sub(r"[^/@]*@", "", value))
    return None


def bypass_proxies(environment: MutableMapping[str, str], urls: Iterable[str]) -> None:
    """Have HTTP clients of a process reach addresses without a proxy.

    Args:
        environment: that of the process.
        urls: addresses that its clients use; those that are not direct keep their proxy.
    """
    users = _users(environment)
    proxies = {name: value for name, value in users.items() if name.lower() != _NO_PROXY}
    if not any(proxies.values()):
        return
    environment[USERS_VARIABLES] = json.dumps(users)
    value = ",".join(_no_proxy(users, urls, environment))
    environment[_NO_PROXY] = environment[_NO_PROXY.upper()] = value
    for name, proxy in proxies.items():
        # httpx would refuse to make any client, also for an address without a proxy (0.28).
        if not _is_usable(proxy):
            environment.pop(name, None)


def users_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment, with the variables of proxies as the user set them."""
    if USERS_VARIABLES not in environment:
        return dict(environment)
    without_proxies = {
        name: value
        for name, value in environment.items()
        if name.lower() not in _NAMES and name != USERS_VARIABLES
    }
    return without_proxies | _users(environment)


def export_line(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Compose the shell command after which programs reach an address without a proxy.

    Returns:
        None: they do so already.
    """
    changed = dict(environment)
    bypass_proxies(changed, (url,))
    names = (_NO_PROXY, _NO_PROXY.upper())
    if all(changed.get(name) == environment.get(name) for name in names):
        return None
    return "export " + " ".join(f"{name}={changed[name]}" for name in names)


def _users(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of proxies as the user set them."""
    if text := environment.get(USERS_VARIABLES):
        variables: dict[str, str] = json.loads(text)
        return variables
    return {name: value for name, value in environment.items() if name.lower() in _NAMES}


def _entries(environment: Mapping[str, str]) -> list[str]:
    """Entries of no_proxy; programs separate them by commas, blanks or both."""
    names = (_NO_PROXY, _NO_PROXY.upper())
    text = next((environment[name] for name in names if environment.get(name)), "")
    return [entry for entry in re.split(r"[\s,;]+", text) if entry]


def _no_proxy(
    users: Mapping[str, str], urls: Iterable[str], environment: Mapping[str, str]
) -> list[str]:
    """List entries that every client reads alike."""
    entries = _entries(users)
    if "*" in entries:
        return ["*"]
    hosts = [_host_of(url) for url in urls if is_direct(url, environment)]
    readable = [entry for entry in map(_plain, entries) if _READABLE.fullmatch(entry)]
    return list(dict.fromkeys([*_LOOPBACK, *hosts, *readable]))


def _plain(entry: str) -> str:
    """Write an entry as all clients read it: `*.corp` as `.corp`, `[::1]` as `::1`."""
    return entry.removeprefix("*").replace("[", "").replace("]", "")


def _covers(entry: str, host: str) -> bool:
    """Whether an entry of no_proxy names a host, its domain or its network."""
    if entry == "*":
        return True
    name = entry.partition("://")[2] or entry
    address = _address_of(host)
    if address is not None:
        try:
            network = ipaddress.ip_network(re.sub(r"^\[(.*)\](:\d+)?$", r"\1", name), strict=False)
        except ValueError:
            return name.rpartition(":")[0] == host
        return address in network
    domain = re.sub(r":\d+$", "", name).lstrip("*").strip(".").lower()
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _is_near(host: str, *, in_pod: bool) -> bool:
    """Whether a proxy has nothing to do with a host, whatever no_proxy says."""
    address = _address_of(host)
    if address is None:
        is_ours = host in {"localhost", socket.gethostname().lower()}
        # A proxy does not know the short names of a network, nor a cluster's services.
        return is_ours or "." not in host or _CLUSTER.search(host) is not None
    if address.is_loopback or address.is_unspecified or address.is_link_local:
        return True
    return (in_pod and address.is_private) or any(address in network for network in _networks())


def _networks() -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Yield the networks of this machine's interfaces."""
    for interfaces in psutil.net_if_addrs().values():
        for interface in interfaces:
            if interface.family in (socket.AF_INET, socket.AF_INET6):
                address = interface.address.partition("%")[0]
                prefix = _prefix_length(interface.netmask) or _address_bits(address)
                yield ipaddress.ip_network(f"{address}/{prefix}", strict=False)


def _prefix_length(mask: str | None) -> int:
    return int(ipaddress.ip_address(mask)).bit_count() if mask else 0


def _address_bits(address: str) -> int:
    return ipaddress.ip_address(address).max_prefixlen


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _address_of(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_usable(proxy: str) -> bool:
    """Whether httpx can use a proxy."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    if parts.scheme in ("socks5", "socks5h"):
        return importlib.util.find_spec("socksio") is not None
    return is_whole and parts.scheme in ("http", "https")
