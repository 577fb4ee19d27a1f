"""Prefect as docs/prefect.md has it for a cluster: PostgreSQL, Redis and two servers, one machine.

The commands of the page are run as they stand there; only the addresses and passwords that it
leaves open come from here. All listens on the loopback interface.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx

from perdure.training.processes import free_port
from tests.process.harness import REPO
from tests.s3.programs import HOST, Program
from tests.waiting import wait_for

PAGE = REPO / "docs" / "prefect.md"
AUTH_STRING = "operator:not-a-secret-of-anyone"
DB_PASSWORD, REDIS_PASSWORD = "db-password-of-a-test", "redis-password-of-a-test"
POSTGRES_USER = "postgres"  # PostgreSQL refuses to run as root
POSTGRES_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
PROGRAMS_S = 240.0
SERVER_START_S = 240.0


def missing() -> str:
    """What to install before the servers can start, or ""."""
    there = bool(POSTGRES_PROGRAMS) and shutil.which("psql") and shutil.which("redis-server")
    return "" if there else "needs PostgreSQL and Redis: make .venv/.prefect-servers"


def commands(heading: str) -> list[str]:
    """The shell blocks below a heading of the page, up to the next one."""
    text = PAGE.read_text(encoding="utf-8")
    _, rest = re.split(rf"^#{{2,3}} {heading}\n", text, maxsplit=1, flags=re.MULTILINE)
    part = re.split(r"^#{2,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"```bash\n(.*?)```", part, flags=re.DOTALL)


class Postgres:
    """A PostgreSQL cluster of its own; what a power cut would lose is not kept."""

    def __init__(self) -> None:
        self.port = free_port()
        self._user = POSTGRES_USER if os.geteuid() == 0 else None
        # Not below pytest's folder, into which only the user of the tests may look.
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-postgres-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        password = self._folder / "password"
        password.write_text(DB_PASSWORD)
        password.chmod(0o644)
        data, programs = self._folder / "data", POSTGRES_PROGRAMS[-1]
        options = ["--username=postgres", "--auth=scram-sha-256", f"--pwfile={password}"]
        subprocess.run(
            [programs / "initdb", "--no-sync", "--encoding=UTF8", *options, data],
            check=True, capture_output=True, user=self._user, timeout=PROGRAMS_S, cwd="/",
        )  # fmt: skip
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": 200,
        }
        command = [str(programs / "postgres"), "-D", str(data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self._program = Program(command, log=self._folder / "log", user=self._user)
        self._program.wait_for_port(self.port)

    @property
    def administrator(self) -> dict[str, str]:
        """With which psql connects."""
        return {
            "PGHOST": HOST,
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGPASSWORD": DB_PASSWORD,
        }

    def end(self) -> None:
        self._program.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Redis:
    """A Redis server that keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start it, or start it again with nothing in it."""
        given = {
            "bind": HOST,
            "port": str(self.port),
            "requirepass": REDIS_PASSWORD,
            "save": "",
            "dir": str(self._folder),
        }
        command = ["redis-server"]
        for name, value in given.items():
            command += [f"--{name}", value]
        self._program = Program(command, log=self._folder / "redis.log")
        self._program.wait_for_port(self.port)

    def end(self) -> None:
        self._program.kill()


class Server:
    """One of the servers."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.log = cluster.home / f"server-{name}.log"
        self._cluster = cluster
        self._process = self._launch()

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.port}/api"

    def start(self) -> None:
        """Start it again, and wait until it answers."""
        self._process = self._launch()
        self.wait()

    def wait(self) -> None:
        """Return when it answers."""
        wait_for(self._answers, timeout_s=SERVER_START_S, what=f"server {self.name}: {self.log}")

    def _launch(self) -> subprocess.Popen[bytes]:
        folder = self._cluster.home / f"prefect-{self.name}"
        given = {"SERVER_PORT": str(self.port), "PREFECT_HOME": str(folder)}
        (start,) = commands("Start")[1:]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-euc", "\n".join([*commands("Settings of the servers"), start])],
                env={**self._cluster.environment, **given},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.api_url}/health", timeout=30).is_success
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Cluster:
    """Two servers, `first` and `second`, and what they stand on."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._postgres: Postgres | None = None
        self._redis: Redis | None = None
        self._servers: list[Server] = []
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self._postgres = postgres = Postgres()
        self._redis = redis = Redis(self.home)
        self.environment = {
            **os.environ,
            # Where the page's commands are found.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PERDURE_HOME": str(self.home),
            "AUTH_STRING": AUTH_STRING,
            "DB_HOST": HOST,
            "DB_PORT": str(postgres.port),
            "DB_PASSWORD": DB_PASSWORD,
            "REDIS_HOST": HOST,
            "REDIS_PORT": str(redis.port),
            "REDIS_PASSWORD": REDIS_PASSWORD,
            "SERVER_HOST": HOST,
            "SERVER_PORT": "0",
            # The scheduler looks once a minute by default; tests should not wait for that.
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "3",
        }
        for block in commands("Database"):
            self.shell(block, postgres.administrator)
        self.upgrade()
        for name in ("first", "second"):
            self._servers.append(Server(self, name))
            # Not both at once: on an empty database each registers the block types, and one fails.
            self._servers[-1].wait()

    @property
    def redis(self) -> Redis:
        assert self._redis is not None
        return self._redis

    @property
    def first(self) -> Server:
        return self._servers[0]

    @property
    def second(self) -> Server:
        return self._servers[1]

    def upgrade(self) -> None:
        """Bring the database to the schema of this Prefect."""
        self.shell("\n".join([*commands("Settings of the servers"), commands("Start")[0]]))

    def shell(self, block: str, env: Mapping[str, str] | None = None) -> str:
        """Run a block of the page to its end; what it printed."""
        done = subprocess.run(
            ["bash", "-euc", block],
            env={**self.environment, **(env or {})}, cwd=REPO, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PROGRAMS_S * 2, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout

    def end(self) -> None:
        for server in self._servers:
            server.kill()
        for one in (self._redis, self._postgres):
            if one is not None:
                one.end()
