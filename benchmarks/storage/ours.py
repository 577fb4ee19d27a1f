"""Our side: a checkpoint server process, saves into it, restores from it and the store.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.storage.measuring import BUCKET, Action, Setting
from benchmarks.storage.state import check, clear
from perdure.storage.address import StorageSpec, open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.loading import load
from perdure.storage.manifest import Manifest
from perdure.storage.node_saves import NodeShares
from perdure.storage.restoring import NodeRestore
from perdure.storage.saving import DirectSaver, TieredSaver
from perdure.storage.staging import GroupRanks, SavePlans
from perdure.training.config.job import Job

RUN_ID = "bench"
PLACEMENT = 1
ATTEMPT = 1
SETTLE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Saves:
    """Saves of one worker, each of a new step; what is committed is deleted again."""

    saver: TieredSaver
    checkpoints: CheckpointStore
    setting: Setting
    step: int = 0

    def save(self) -> float:
        """Seconds that training is held up."""
        self.step += 1
        began_s = time.perf_counter()
        self.saver.save(self.setting.state, self.step, {})
        return time.perf_counter() - began_s

    def publish(self) -> float:
        """Seconds from handing a save over to its being committed."""
        self.save()
        began_s = time.perf_counter()
        self.saver.settle(SETTLE_TIMEOUT_S)
        return time.perf_counter() - began_s

    def forget(self) -> None:
        """Wait for what is on its way, and make room in the store."""
        self.saver.settle(SETTLE_TIMEOUT_S)
        for step in self.checkpoints.steps():
            self.checkpoints.delete(step)


@contextmanager
def blocking(setting: Setting) -> Iterator[Action]:
    """How long a save blocks training; both slots of the checkpoint server are warm."""
    with _saves(setting) as saves:
        saves.save()
        yield Action(saves.save, before=saves.forget, after=saves.forget)


@contextmanager
def publishing(setting: Setting) -> Iterator[Action]:
    """From handing a save over to its commit in the store; both slots have been used before."""
    with _saves(setting) as saves:
        saves.save()
        yield Action(saves.publish, before=saves.forget, after=saves.forget)


@contextmanager
def from_memory(setting: Setting) -> Iterator[Action]:
    """A new worker's restore from the memory of its node's checkpoint server."""
    with _saves(setting) as saves:
        saves.publish()
        restores = _Restores(setting, saves.checkpoints)
        checkpoint_server = saves.saver.client.name

        def run() -> float:
            began_s = time.perf_counter()
            client = CheckpointClient(checkpoint_server)
            node = NodeShares(client, None)
            now = (PLACEMENT, ATTEMPT + 1)
            nodes = NodeRestore(node, saves.checkpoints, now, GroupRanks())
            if nodes.load(nodes.candidates()[0], lambda _manifest: setting.state) is None:
                raise RuntimeError("the checkpoint server has no whole share")
            client.close()
            return time.perf_counter() - began_s

        yield Action(run, before=restores.clear, after=restores.check)
        saves.forget()


@contextmanager
def from_store(setting: Setting) -> Iterator[Action]:
    """A restore from the store, every byte compared with its hash."""
    checkpoints = _checkpoints(setting)
    saver = DirectSaver(
        checkpoints=checkpoints,
        plans=SavePlans(),
        run_id=RUN_ID,
        placement=PLACEMENT,
        attempt=ATTEMPT,
    )
    saver.save(setting.state, 1, {})
    restores = _Restores(setting, checkpoints, saver.newest)
    yield Action(restores.load, before=restores.clear, after=restores.check)
    checkpoints.delete(1)


@dataclass(slots=True)
class _Restores:
    setting: Setting
    checkpoints: CheckpointStore
    manifest: Manifest | None = None

    def clear(self) -> None:
        clear(self.setting.state)

    def check(self) -> None:
        check(self.setting.state)

    def load(self) -> float:
        assert self.manifest is not None  # noqa: S101 given where this is used
        every = frozenset(self.manifest.shards)
        began_s = time.perf_counter()
        load(self.setting.state, self.manifest, checkpoints=self.checkpoints, verify=every)
        return time.perf_counter() - began_s


@contextmanager
def _saves(setting: Setting) -> Iterator[Saves]:
    with ExitStack() as stack:
        name = stack.enter_context(_checkpoint_server(setting))
        client = stack.enter_context(CheckpointClient(name))
        saver = TieredSaver(
            client=client,
            plans=SavePlans(),
            run_id=RUN_ID,
            placement=PLACEMENT,
            attempt=ATTEMPT,
        )
        refused = saver.prepare(lambda: setting.state)
        if refused is not None:
            raise RuntimeError(refused)
        yield Saves(saver, _checkpoints(setting), setting)


@contextmanager
def _checkpoint_server(setting: Setting) -> Iterator[str]:
    """A checkpoint server without a disk tier, started as by an agent; yields its socket."""
    job = Job.model_validate(
        {
            "run_id": RUN_ID,
            "storage": _spec(setting),
            "worker": {"command": ["true"]},
            "checkpoint": {"keep_last": 1},
        }
    )
    job_file = setting.folder / "job.json"
    job_file.write_text(job.model_dump_json(), encoding="utf-8")
    name = f"perdure-bench-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure.training.agent.checkpoint_server", str(job_file), name],
        cwd=setting.folder,  # where it notes what it holds
        stdout=sys.stderr,
    )
    try:
        yield name
    finally:
        process.terminate()
        process.wait()


def _checkpoints(setting: Setting) -> CheckpointStore:
    return CheckpointStore(open_store(_spec(setting)), RUN_ID)


def _spec(setting: Setting) -> StorageSpec:
    return StorageSpec.model_validate(
        {
            "address": f"s3://{BUCKET}/ours",
            "endpoint": setting.endpoint,
            "addressing_style": "path",
        }
    )
