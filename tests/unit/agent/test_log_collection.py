"""Logs of an ended attempt, from a node into the store."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.errors import TransientError
from perdure.storage.local import LocalStore
from perdure.training.agent import log_collection
from perdure.training.agent.log_collection import (
    COLLECTED_FILE,
    Collector,
    Log,
    await_collected,
    compress,
    pack,
)
from perdure.training.agent.worker_output import ascend_folder
from perdure.training.agent.workers import WorkerGroup
from perdure.training.wire.agent import AgentConfig, ShutdownOrder
from perdure.training.wire.logs import Collected, CollectOrder, logs_prefix
from tests.unit.agent.conftest import TOKEN, agent_job
from tests.waiting import wait_for

PREFIX = "runs/run-1/logs/p0001-a0001/node-1/"
ORDER = CollectOrder(placement=1, attempt=1)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def collector(new_group, tmp_path) -> Collector:
    config: AgentConfig = new_group("true").config
    return Collector(config, tmp_path)


def text_of(store: LocalStore, name: str) -> str:
    return gzip.decompress(store.get(f"{PREFIX}{name}.gz")).decode()


def collected(collector: Collector, group: WorkerGroup) -> Collected:
    def state() -> Collected | None:
        state = collector.collect(ORDER, group.order, group)
        return state if state.is_done else None

    done: Collected = wait_for(state)
    return done


def collected_second(collector: Collector, group: WorkerGroup, store: LocalStore, name: str) -> str:
    """A log as the second attempt of the group has it in the store."""
    order = CollectOrder(placement=1, attempt=2)
    wait_for(lambda: collector.collect(order, group.order, group).is_done)
    key = f"{logs_prefix('run-1', 1, 2)}node-1/{name}.gz"
    return gzip.decompress(store.get(key)).decode()


def names(state: Collected) -> list[str]:
    return [file.key.removeprefix(PREFIX).removesuffix(".gz") for file in state.files]


def run(new_group: Any, *command: str, **changes: Any) -> WorkerGroup:
    group: WorkerGroup = new_group(*command, is_command=True, **changes)
    group.start({}, proc_start_cnt=1)
    wait_for(group.poll)
    return group


def test_all_logs_come_the_most_informative_first(new_group, collector, store, tmp_path):
    group = run(new_group, "sh", "-c", "echo out; echo err >&2; exit 3",
                job=agent_job(tmp_path))  # fmt: skip
    for name in ("coordinator.log", "agent.log", "fork-server.log"):
        (tmp_path / name).write_text(f"of {name}\n")
    (tmp_path / "checkpoint-server.log").write_text("")
    plog = ascend_folder(tmp_path, "command-00001") / "debug" / "plog"
    plog.mkdir(parents=True)
    (plog / "plog-7.log").write_text("of CANN\n")
    state = collected(collector, group)
    assert names(state) == [
        "command-00001.stderr.log",
        "command-00001.stdout.log",
        "coordinator.log",
        "agent.log",
        "fork-server.log",
        "command-00001.ascend/debug/plog/plog-7.log",
    ]
    assert state.problems == ()
    assert text_of(store, "command-00001.stderr.log") == "err\n"
    assert text_of(store, "command-00001.ascend/debug/plog/plog-7.log") == "of CANN\n"
    index = Collected.model_validate_json(store.get(PREFIX + COLLECTED_FILE))
    assert index == state


def test_an_attempt_that_is_gone_or_never_was_has_nothing(new_group, collector, tmp_path):
    group = run(new_group, "true", job=agent_job(tmp_path))
    for started in (None, group.order):
        state = collector.collect(CollectOrder(placement=1, attempt=2), started, group)
        assert state.is_done
        assert state.problems == ("node-1 has nothing of attempt 1.2",)


def test_with_a_limit_of_zero_nothing_is_collected(new_group, collector, store, tmp_path):
    group = run(new_group, "echo", "out", job=agent_job(tmp_path, watch={"log_limit_bytes": 0}))
    assert collected(collector, group).files == ()
    assert list(store.list("runs/")) == []


def test_what_the_container_wrote_before_the_attempt_is_not_the_attempts(
    new_group, collector, store, tmp_path
):
    log = tmp_path / "agent.log"
    log.write_text("first\n")
    collected(collector, run(new_group, "true", job=agent_job(tmp_path)))
    with log.open("a") as file:
        file.write("second\n")
    group = run(new_group, "true", job=agent_job(tmp_path), attempt=2)
    assert collected_second(collector, group, store, "agent.log") == "second\n"


def test_the_drivers_own_logs_come_last_as_far_as_they_are_of_the_attempt(
    new_group, collector, store, tmp_path
):
    folder = tmp_path / "slog"
    old, new = folder / "run/device-os/device-os_1.log", folder / "debug/device-0/device-0_2.log"
    for log in (old, new):
        log.parent.mkdir(parents=True)
        log.write_text("first\n")
    os.utime(old, (1.0, 1.0))
    job = agent_job(tmp_path, watch={"log_limit_bytes": 1 << 20, "system_logs": [str(folder)]})
    state = collected(collector, run(new_group, "echo", "out", job=job))
    assert names(state) == ["command-00001.stdout.log", "slog/debug/device-0/device-0_2.log"]
    with new.open("a") as file:
        file.write("second\n")
    group = run(new_group, "true", job=job, attempt=2)
    name = "slog/debug/device-0/device-0_2.log"
    assert collected_second(collector, group, store, name) == "second\n"


def test_a_log_that_was_rotated_is_new_from_its_beginning(new_group, collector, store, tmp_path):
    log = tmp_path / "agent.log"
    log.write_text("a long line of the first attempt\n")
    collected(collector, run(new_group, "true", job=agent_job(tmp_path)))
    log.write_text("second\n")
    group = run(new_group, "true", job=agent_job(tmp_path), attempt=2)
    assert collected_second(collector, group, store, "agent.log") == "second\n"


def test_secrets_are_masked_before_anything_leaves_the_node(
    new_group, collector, store, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from/the/environment")
    printed = f"{TOKEN}-x from/the/environment of-the-job-1 password=form"
    group = run(new_group, "echo", printed,
                job=agent_job(tmp_path, env={"HF_TOKEN": "of-the-job-1"}))  # fmt: skip
    collected(collector, group)
    assert text_of(store, "command-00001.stdout.log") == "***-x *** *** password=***\n"


def test_a_store_that_fails_is_reported_and_waited_for_once(
    new_group, collector, tmp_path, monkeypatch
):
    group = run(new_group, "sh", "-c", "echo out; echo err >&2", job=agent_job(tmp_path))
    tries = []

    class Down:
        def put(self, key, data):
            tries.append(key)
            raise TransientError("503")

    monkeypatch.setattr(log_collection, "open_store", lambda _spec: Down())
    state = collected(collector, group)
    assert len(tries) == 1
    assert state.problems == ("command-00001.stderr.log: 503",)


def test_a_slow_store_keeps_no_order_waiting(new_group, collector, tmp_path, monkeypatch):
    group = run(new_group, "echo", "out", job=agent_job(tmp_path))
    is_up = threading.Event()
    inner = LocalStore(tmp_path / "store")

    class Slow:
        def put(self, key, data):
            assert is_up.wait(240)
            inner.put(key, data)

    monkeypatch.setattr(log_collection, "open_store", lambda _spec: Slow())
    assert not collector.collect(ORDER, group.order, group).is_done
    assert not collector.collect(ORDER, group.order, group).is_done
    is_up.set()
    assert names(collected(collector, group)) == ["command-00001.stdout.log"]


def test_a_container_that_goes_away_waits_for_a_slow_store_only_so_long(
    new_group, collector, tmp_path, monkeypatch
):
    group = run(new_group, "echo", "out", job=agent_job(tmp_path))
    is_over = threading.Event()

    class Hung:
        def put(self, key, data):
            is_over.wait(240)

    monkeypatch.setattr(log_collection, "open_store", lambda _spec: Hung())
    monkeypatch.setattr(log_collection, "CLOSE_TIMEOUT_S", 0.1)
    collector.close(group.order, group)
    assert not collector.collect(ORDER, group.order, group).is_done
    is_over.set()


def test_an_agent_that_shuts_down_collects_what_was_not_requested(new_container, store, tmp_path):
    container = new_container()
    container.finish("echo", "hello", job=agent_job(tmp_path), attempt=1)
    container.call(ShutdownOrder(grace_s=1))
    container.process.wait(240)
    keys = [info.key for info in store.list(logs_prefix("run-1"))]
    assert "runs/run-1/logs/p0003-a0001/node-1/command-00001.stdout.log.gz" in keys


def test_an_agent_answers_while_it_collects_and_reports_how_far_it_is(new_container, tmp_path):
    container = new_container()
    order = container.start("echo", "hello", job=agent_job(tmp_path))
    container.until("ended")
    wanted = CollectOrder(placement=order.placement, attempt=order.attempt)
    assert container.call(wanted).collected is not None
    done = wait_for(lambda: (c := container.call(wanted).collected).is_done and c)
    assert "command-00001.stdout.log.gz" in {Path(file.key).name for file in done.files}


def log_of(path: Path, text: bytes) -> Log:
    path.write_bytes(text)
    return Log(path, path.name, 0, len(text))


def noise(lines: int) -> list[str]:
    return [f"{index:06d} {hashlib.sha256(b'%d' % index).hexdigest()}\n" for index in range(lines)]


def test_of_a_log_that_is_cut_the_newest_whole_lines_are_kept(tmp_path):
    lines = noise(4000)
    log = log_of(tmp_path / "log", "".join(lines).encode())
    packed = pack(log, frozenset(), limit_bytes=50_000)
    assert packed is not None
    assert 20_000 < len(packed.data) <= 50_000
    tail = gzip.decompress(packed.data).decode().splitlines(keepends=True)
    assert tail == lines[-len(tail) :]
    assert packed.cut_bytes >= log.size_bytes - sum(map(len, tail)) - len(lines[0])


def test_a_cut_in_the_middle_of_a_secret_shows_no_part_of_it(tmp_path):
    secret = "S" * 60 + "-end-of-the-secret"
    text = "".join(f"{line[:-1]} {secret}\n" for line in noise(3000)).encode()
    packed = pack(log_of(tmp_path / "log", text), frozenset({secret}), limit_bytes=40_000)
    assert packed is not None
    text = gzip.decompress(packed.data)
    assert b"***" in text
    assert b"end-of" not in text


def test_where_there_is_no_room_a_log_is_left_out(tmp_path):
    log = log_of(tmp_path / "log", os.urandom(100_000))
    assert pack(log, frozenset(), limit_bytes=1000) is None


def test_compressing_ends_as_soon_as_the_limit_is_passed():
    consumed = []

    def pieces():
        for _ in range(100):
            consumed.append(1)
            yield os.urandom(10_000)

    assert compress(pieces(), limit_bytes=50_000)[0] is None
    assert len(consumed) < 20


def test_the_wait_for_the_logs_has_a_limit():
    state = Collected(placement=1, attempt=1, is_done=False)
    slept: list[float] = []
    states = await_collected(lambda: [("node-0", state)], timeout_s=0.0, sleep=slept.append)
    assert states == [("node-0", state)]
    assert slept == []
