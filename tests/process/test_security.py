"""What a peer in the network, and a reader of files, gets of a living run."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.storage.address import open_store
from perdure.tasks.env_secrets import BlockSecrets, check_blocks
from perdure.training.config.secrets import SecretSource
from perdure.training.errors import EngineError, InputError
from perdure.training.processes import free_port
from perdure.training.wire.logs import logs_prefix
from tests.process.harness import Running

pytestmark = [pytest.mark.process, pytest.mark.prefect]

HOST = "127.0.0.1"


SECRETS = {
    "FROM_BLOCK": "the-value-in-a-block-of-prefect",
    "FROM_FIELD": "value/in+a 'field'",
    "FROM_FILE": "the-value-in-a-mounted-file",
    "FROM_CONTAINER": "the-value-in-the-containers-environment",
}


@pytest.fixture(scope="module")
def living(bench, tmp_path_factory) -> Iterator[Running]:
    """A run of two ranks that trains, after a first attempt that failed; it was given secrets."""
    mounted = tmp_path_factory.mktemp("mounted") / "token"
    mounted.write_text(SECRETS["FROM_FILE"] + "\n")
    keep = (
        "from prefect.blocks.system import Secret;"
        f"Secret(value={SECRETS['FROM_BLOCK']!r}).save('sealed');"
        f"Secret(value={{'deep': {{'er': {SECRETS['FROM_FIELD']!r}}}}}).save('sealed-fields')"
    )
    kept = bench.python("-c", keep)
    assert kept.returncode == 0, kept.stderr
    job = bench.pair(
        "sealed",
        steps=2000,
        env={"GIVEN": ",".join(SECRETS)},
        env_from={
            "FROM_BLOCK": {"block": "sealed"},
            "FROM_FIELD": {"block": "sealed-fields", "field": "deep.er"},
            "FROM_FILE": {"file": str(mounted)},
            "FROM_CONTAINER": {"secret": "OF_THE_CONTAINER"},
        },
    )
    job["worker"] = {**job["worker"], "recipe": "paced:sealed"}
    bench.env["OF_THE_CONTAINER"] = SECRETS["FROM_CONTAINER"]
    running: Running = bench.start(job)
    del bench.env["OF_THE_CONTAINER"]
    running.reach(3)
    yield running
    running.kill_supervisor()
    for process in running.local.processes():
        process.kill()


def listening(running: Running) -> dict[int, str]:
    """Ports and addresses that processes of a run listen on."""
    found = {}
    for process in running.local.processes():
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                found[one.laddr.port] = one.laddr.ip
    return found


def test_every_socket_of_a_run_listens_on_its_nodes_own_address_alone(living):
    folder = living.folder
    (agent,) = (json.loads(path.read_text()) for path in folder.glob("nodes/*/*/address.json"))
    newest = max(folder.glob("nodes/*/*/attempts/*/coordinator-address.json"))
    coordinator = json.loads(newest.read_text())
    ports = listening(living)
    assert {agent["port"], coordinator["port"], coordinator["store_port"]} <= ports.keys()
    assert len(ports) >= 6, "the metrics and each rank's process groups listen, too"
    assert set(ports.values()) == {HOST}
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_files_that_hold_a_job_or_a_token_are_their_owners_alone(living):
    files = [
        *living.folder.glob("*.json"),
        *living.folder.glob("nodes/*/*/*.json"),
        *living.folder.glob("nodes/*/*/attempts/*/*.json"),
        *(living.bench.home / "prefect").glob("*.json"),
    ]
    names = {path.name for path in files}
    assert {"job.json", "containers.json", "agent.json", "coordinator-config.json"} <= names
    assert {"coordinator-address.json", "server.json"} <= names
    open_to_others = [path for path in files if path.stat().st_mode & 0o077]
    assert {path.name for path in open_to_others} <= {"held.json", "metrics-address.json"}
    (container,) = living.folder.glob("nodes/*/p*")
    for folder in (living.folder, container, living.bench.home / "prefect"):
        assert not folder.stat().st_mode & 0o077, folder


def holding(texts: Iterable[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Which texts hold which secret, as it is or as JSON and Python print it."""
    forms = {
        form.encode(): name
        for name, value in SECRETS.items()
        for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])
    }
    return [(where, name) for where, text in texts for form, name in forms.items() if form in text]


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            yield str(path), gzip.decompress(data) if path.suffix == ".gz" else data


def test_secrets_reach_the_workers_and_are_in_no_file_no_record_and_no_output(living, api):
    bench, store = living.bench, open_store(living.job.storage)
    collected = bench.perdure("logs", "sealed", "--rank", "1", "--attempt", "1.1")
    for name, value in SECRETS.items():
        line = f"{name} is ***, its digest {hashlib.sha256(value.encode()).hexdigest()}"
        assert line in collected
        assert len(living.worker_lines(line)) == 4, "of two ranks, in two attempts"
    (failed,) = [view.ended for view in living.history.attempts if view.ended is not None]
    assert failed.fault is not None
    assert "login with *** *** *** *** failed" in failed.fault.evidence
    assert any("***" in log for log in api.logs("sealed"))

    outputs = [
        *[("prefect logs", line.encode()) for line in api.logs("sealed")],
        ("prefect flow run", json.dumps(api.flow_runs("sealed")).encode()),
        ("prefect artifacts", json.dumps(api.artifacts("sealed%")).encode()),
        ("perdure run", living.out.encode()),
        *[
            (" ".join(command), bench.perdure(*command).encode())
            for command in (
                ("status", "sealed", "--json"),
                ("show", str(bench.home / "sealed.yaml")),
            )
        ],
    ]
    assert holding(outputs) == []
    kept = [info.key for info in store.list(logs_prefix("sealed"))]
    assert any(key.endswith("rank-00001.stdout.log.gz") for key in kept)
    # PERDURE_HOME holds the store and the database of the Prefect server, too.
    assert living.job.storage.folder.is_relative_to(bench.home)
    assert holding(files_below(bench.home)) == []


def test_secrets_are_no_argument_of_a_process(living):
    commands = [" ".join(process.cmdline()).encode() for process in living.local.processes()]
    assert commands
    assert holding(("a command line", command) for command in commands) == []


def test_a_block_is_read_anew_for_each_attempt_and_remembered_while_the_server_is_away(
    living, prefect_server
):
    job = living.job.model_copy(update={"env_from": {"X": SecretSource(block="sealed-renewed")}})
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}):
        with pytest.raises(
            InputError, match=r"env_from\.X: no Secret block named 'sealed-renewed'"
        ):
            check_blocks(job)
        read = BlockSecrets(job)
        for value in ("the-first-value", "the-renewed-value"):
            Secret(value=value).save("sealed-renewed", overwrite=True)
            check_blocks(job)
            assert read()["X"].get_secret_value() == value
    with temporary_settings({PREFECT_API_URL: f"http://{HOST}:{free_port()}/api"}):
        assert read()["X"].get_secret_value() == "the-renewed-value"
        with pytest.raises(EngineError, match=r"env_from\.X"):
            BlockSecrets(job)()
