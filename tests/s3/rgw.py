"""Ceph RGW: a monitor, an OSD that keeps its data in memory, a gateway.

No authentication between them, no manager, no replicas. The gateway alone can be killed and
started again: what it acknowledged is in the OSD.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

from perdure.storage.address import S3_SCHEME
from perdure.training.processes import free_port
from tests.s3.programs import HOST, Program, find_program
from tests.s3.servers import ACCESS_KEY, SECRET_KEY

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")
MEMORY_BYTES = 2**30  # for all objects; taken as they come
COMMAND_S = 240.0
DOMAIN = "s3.test"  # below which buckets are hosts; nothing resolves it

CONFIG = """\
[global]
fsid = {fsid}
mon host = v2:{host}:{mon_port}/0
public addr = {host}
ms bind ipv4 = true
auth cluster required = none
auth service required = none
auth client required = none
# Encryption needs the keys that are not requested.
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
ms client mode = crc
ms service mode = crc
ms cluster mode = crc
run dir = {folder}
pid file = {folder}/$type.pid
log file = {folder}/$type.log
admin socket =

# One OSD is enough, however full the disk is that it does not use.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data = {folder}/mon
mon data avail crit = 1
mon osd full ratio = .99
mon osd backfillfull ratio = .98
mon osd nearfull ratio = .97
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}

# A pool is made in the time of a proposal, and RGW makes eight when it starts.
paxos propose interval = 0.02
paxos min wait = 0.01
mon client hunt interval = 0.3

rgw frontends = beast endpoint={host}:{port}
rgw dns name = {domain}
rgw data = {folder}/rgw
rgw run sync thread = false
rgw enable usage log = false
rgw enable quota threads = false
"""


class Rgw:
    """A cluster of one node, with a gateway that can be killed."""

    scheme = S3_SCHEME

    def __init__(self, folder: Path, host: str = HOST) -> None:
        self.port = free_port(host)
        self.host = host
        self._folder = folder
        self._mon_port = free_port(host)
        self._config = folder / "ceph.conf"
        self._others: list[Program] = []
        self._gateway: Program | None = None
        try:
            self._start_cluster()
            self.start_gateway()
            self._add_user()
        except BaseException:
            self.end()
            raise

    @staticmethod
    def missing() -> str:
        if all(find_program(name) for name in PROGRAMS):
            return ""
        return (
            "no Ceph RGW: apt-get install --no-install-recommends "
            "radosgw ceph-mon ceph-osd ceph-common"
        )

    def start_gateway(self) -> None:
        """Start the gateway, on the same port and the same data."""
        self._gateway = self._start("radosgw", "-n", "client.rgw", "-f")
        self._gateway.wait_for_port(self.port, self.host)

    def kill_gateway(self) -> None:
        """End the gateway in the middle of what it does."""
        assert self._gateway is not None
        self._gateway.kill()

    def start_tls_gateway(self, certificate: Path, key: Path) -> int:
        """Start one more gateway to the same data, which speaks TLS alone. Returns its port."""
        port = free_port(self.host)
        frontend = f"beast ssl_endpoint={self.host}:{port} ssl_certificate={certificate}"
        self._others.append(
            self._start(
                *("radosgw", "-n", "client.tls", "-f"),
                f"--rgw-frontends={frontend} ssl_private_key={key}",
            )
        )
        self._others[-1].wait_for_port(port, self.host)
        return port

    def end(self) -> None:
        """End all processes; nothing needs to be kept."""
        for program in (self._gateway, *reversed(self._others)):
            if program is not None:
                program.kill()

    def _start_cluster(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        fsid = str(uuid.uuid4())
        self._config.write_text(
            CONFIG.format(
                fsid=fsid,
                host=self.host,
                port=self.port,
                domain=DOMAIN,
                mon_port=self._mon_port,
                folder=self._folder,
                memory_bytes=MEMORY_BYTES,
            )
        )
        monmap = str(self._folder / "monmap")
        address = f"[v2:{self.host}:{self._mon_port}]"
        _command(["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap])
        self._command("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._others.append(self._start("ceph-mon", "-i", "a", "-f"))
        osd = str(uuid.uuid4())
        self._command("ceph", "osd", "new", osd)
        self._command("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._others.append(self._start("ceph-osd", "-i", "0", "-f"))

    def _add_user(self) -> None:
        self._command(
            *("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=tests"),
            *("--display-name=tests", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"),
        )

    def _start(self, program: str, *arguments: str) -> Program:
        command = [program, "-c", str(self._config), *arguments]
        return Program(command, log=self._folder / f"{program}.out")

    def _command(self, program: str, *arguments: str) -> None:
        _command([program, "-c", str(self._config), *arguments])


def _command(command: list[str]) -> None:
    # Ceph's Python programs must not find the packages of our own environment.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
