"""Names of the cluster's services, for dnsmasq: asks the API server, writes a file of hosts.

It asks again and again and does not watch: in a lab the API server is away at times. While it is,
the names stay as they were. Times are seconds.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.kubernetes.lab.places import DOMAIN, KEYS, KUBECONFIG
from tests.kubernetes.lab.programs import DNS_HOSTS, DNS_PID

PERIOD_S = 0.5
ANSWER_S = 5.0

Document = Mapping[str, Any]


def hosts(services: Iterable[Document], endpoints: Iterable[Document]) -> list[str]:
    """The lines of a hosts file: a service's own address, or those of its pods if it has none."""
    lines: set[str] = set()
    headless: set[str] = set()
    for service in services:
        name, address = _name(service), service["spec"].get("clusterIP")
        if address in (None, "", "None"):
            headless.add(name)
        else:
            lines.add(f"{address} {name}")
    for one in endpoints:
        if _name(one) in headless:
            lines.update(_pods(one))
    return sorted(lines)


def _name(document: Document) -> str:
    meta = document["metadata"]
    return f"{meta['name']}.{meta['namespace']}.svc.{DOMAIN}"


def _pods(endpoints: Document) -> Iterator[str]:
    name = _name(endpoints)
    for subset in endpoints.get("subsets") or ():
        for address in subset.get("addresses") or ():
            yield f"{address['ip']} {name}"
            if address.get("hostname"):
                yield f"{address['ip']} {address['hostname']}.{name}"


def main() -> None:
    """Keep the file as the cluster is."""
    config = json.loads(KUBECONFIG.read_text())
    url = config["clusters"][0]["cluster"]["server"]
    token = config["users"][0]["user"]["token"]
    context = ssl.create_default_context(cafile=str(KEYS / "ca.crt"))

    def items(kind: str) -> list[Document]:
        request = urllib.request.Request(  # noqa: S310 the lab's own API server
            f"{url}/api/v1/{kind}?resourceVersion=0", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as answer:  # noqa: S310
            found: list[Document] = json.load(answer)["items"]
            return found

    written: list[str] | None = None
    while True:
        try:
            lines = hosts(items("services"), items("endpoints"))
        except (OSError, urllib.error.URLError, ValueError):  # the API server is away
            lines = written or []
        if lines != written:
            _publish(lines)
            written = lines
        time.sleep(PERIOD_S)


def _publish(lines: list[str]) -> None:
    part = DNS_HOSTS.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(DNS_HOSTS)
    os.kill(int(DNS_PID.read_text()), signal.SIGHUP)


if __name__ == "__main__":
    main()
