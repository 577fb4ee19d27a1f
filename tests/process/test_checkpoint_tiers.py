"""Whole runs, without Prefect: what faults leave is restored from the nearest tier."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.checkpoint import StepState
from tests.process.harness import RECIPES, TEXT
from training.injection.processes import Injection, Injector, LocalRun
from training.job import parse_job
from training.journal.attempt_log import kept_steps
from training.recovery.ladder import Rung
from training.supervisor.run import Run
from training.supervisor.watch import EndKind, Progress
from training.trainer.data.prepare import prepare
from training.trainer.data.tokenizer import open_tokenizer

pytestmark = pytest.mark.process

STEPS = 24
EVERY = 6


@dataclass
class Driven:
    """One run, driven to its end in this process."""

    home: Path
    document: dict[str, Any]
    restored: list[str] = field(default_factory=list)
    rungs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = Run(parse_job(self.document), home=self.home)
        self.local = LocalRun(self.home, self.run.job.run_id)

    def drive(self, *injections: Injection) -> Driven:
        """Take the run to its end, with faults on the way."""
        injector, run = Injector(list(injections)), self.run
        run.take()
        assert run.job.data is not None
        run.record_data(
            prepare(run.job.data, open_tokenizer(run.job.tokenizer), run.store, log=print)
        )
        key = run.refresh().data[-1].manifest_key

        def on_progress(progress: Progress) -> None:
            for step in progress.steps:
                injector.on_step(step.step)

        kind = EndKind.FAILED
        try:
            while kind is EndKind.FAILED:
                verdict = run.attempt(
                    run.place(),
                    data_manifest_key=key,
                    stop_wanted=lambda: False,
                    on_progress=on_progress,
                )
                kind = verdict.kind
                if verdict.decision is not None:
                    self.rungs.append(verdict.decision.rung.value)
                    assert verdict.decision.rung != "stop", verdict
        finally:
            run.end("completed" if kind is EndKind.COMPLETED else "failed", "driven by a test")
        assert kind is EndKind.COMPLETED
        assert all(injector.fired[one.name] for one in injections), "every fault really fired"
        self.restored = self._restored()
        return self

    def _restored(self) -> list[str]:
        """Where each attempt restored from, as its first rank said."""
        said = [
            (path.parent.name, line)
            for path in self._nodes().glob("*/*/attempts/*/rank-00000.stdout.log")
            for line in path.read_text().splitlines()
            if "restored from" in line
        ]
        return [re.sub(r".*perdure: ", "", line) for _, line in sorted(said)]

    def _nodes(self) -> Path:
        return self.home / "runs" / self.run.job.run_id / "nodes"

    def curve(self) -> dict[int, float]:
        """Loss of every kept step, all digits."""
        kept = kept_steps(self.run.store, self.run.job.run_id)
        return {step: record.loss for step, record in kept.items()}

    def checkpoint_server(self, node: str) -> psutil.Process:
        """The checkpoint server of a node."""
        (checkpoint_server,) = [
            process
            for process in self.local.processes(node)
            if "training.agent.checkpoint_server" in process.cmdline()
        ]
        return checkpoint_server

    def kill_checkpoint_server(self, node: str) -> list[int]:
        """SIGKILL a checkpoint server: its memory is gone; workers notice at the next save."""
        checkpoint_server = self.checkpoint_server(node)
        checkpoint_server.send_signal(signal.SIGKILL)
        return [checkpoint_server.pid]


@pytest.fixture(scope="module")
def drive(tmp_path_factory) -> Callable[..., Driven]:
    home = tmp_path_factory.mktemp("tiers")
    corpus = home / "corpus"
    corpus.mkdir()
    for index in range(6):
        (corpus / f"{index}.txt").write_text((f"{index} " + TEXT) * 80)

    def drive(
        run_id: str,
        *,
        pace_s: float = 0.1,
        restart: dict[str, Any] | None = None,
        **checkpoint: Any,
    ) -> Driven:
        document = {
            "run_id": run_id,
            "storage": {"address": f"file://{home}/store"},
            "steps": STEPS,
            "seed": 11,
            "worker": {"recipe": "paced:main", "cwd": str(RECIPES)},
            "data": {"sources": [str(corpus)], "shard_size_bytes": 8192, "num_workers": 0},
            "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_len": 16},
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
            "checkpoint": {"every_steps": EVERY, "keep_last": 2, **checkpoint},
            "restart": {"pod_retries": 1, **(restart or {})},
            "engine": {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10},
            "env": {"PACE_S": str(pace_s)},
        }
        return Driven(home, document)

    return drive


@pytest.fixture(scope="module")
def undisturbed(drive) -> Driven:
    driven: Driven = drive("undisturbed-tiers", pace_s=0).drive()
    return driven


def test_a_run_saves_through_its_checkpoint_servers_and_leaves_only_what_it_keeps(undisturbed):
    assert list(undisturbed.curve()) == list(range(1, STEPS + 1))
    checkpoints = undisturbed.run.checkpoints
    assert checkpoints.states() == dict.fromkeys((STEPS - EVERY, STEPS), StepState.COMMITTED)
    assert checkpoints.verify(STEPS) == []
    assert undisturbed.local.processes() == []


@pytest.mark.long
def test_workers_checkpoint_servers_and_nodes_may_die_and_the_loss_curve_stays(drive, undisturbed):
    # With either of the two on, nothing would be left to restore from the tiers.
    restart = {"process_replace": False, "end_of_life_checkpoint": False}
    driven = drive("faulty-tiers", node_disk=True, restart=restart)
    driven.drive(
        Injection(8, "a worker", lambda: driven.local.kill_rank(1)),
        Injection(14, "a checkpoint server", lambda: driven.kill_checkpoint_server("node-1")),
        Injection(20, "a node", lambda: driven.local.kill_node("node-1")),
    )
    assert driven.curve() == undisturbed.curve()
    assert driven.rungs == ["in_place_restart", "in_place_restart", "pod_reschedule"]
    assert driven.restored[:2] == [
        "step 6 restored from the nodes' memory or disks",
        "step 12 restored from the nodes' memory or disks",
    ]
    assert re.fullmatch(r"step 18 restored from the store", driven.restored[2])
    assert driven.run.checkpoints.steps() == [STEPS - EVERY, STEPS]
    assert driven.run.checkpoints.verify(STEPS) == []
    assert driven.local.processes() == []


@pytest.mark.long
def test_a_checkpoint_server_that_died_is_there_again_for_those_who_ask_after_a_recovery(
    drive, undisturbed
):
    driven = drive("checkpoint-server-again", pace_s=0.5)
    driven.drive(
        Injection(7, "a checkpoint server", lambda: driven.kill_checkpoint_server("node-1")),
        Injection(9, "a worker", lambda: driven.local.kill_rank(1)),
    )
    assert driven.curve() == undisturbed.curve()
    assert driven.rungs == []
    (first, *_) = driven.run.refresh().attempts
    assert [one.began.rung for one in first.recoveries] == [Rung.PROCESS_REPLACE]
    logs = [path.read_text() for path in driven._nodes().glob("*/*/attempts/*/rank-*.stdout.log")]
    assert len(logs) == 2
    assert not any("saves go to the store while training waits" in text for text in logs)


def test_what_survivors_save_at_the_end_of_their_life_is_what_the_next_attempt_begins_with(
    drive, undisturbed
):
    driven = drive("end-of-life-tiers", node_disk=True, restart={"process_replace": False})
    driven.drive(Injection(8, "a worker", lambda: driven.local.kill_rank(1)))
    assert driven.curve() == undisturbed.curve()
    assert driven.rungs == ["in_place_restart"]
    saved = driven.run.refresh().attempts[0].last_save
    assert saved is not None
    assert saved.step is not None
    assert saved.step >= 8, "later than any save that was due"
    assert driven.restored == [f"step {saved.step} restored from the nodes' memory or disks"]
    assert driven.local.processes() == []


def test_announcements_of_commits_are_lines_of_the_first_ranks_records(undisturbed):
    (path,) = undisturbed._nodes().glob("node-0/*/attempts/*/metrics.jsonl")
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    announced = [one["step"] for one in documents if one["kind"] == "checkpoint"]
    assert sorted(announced) == list(range(EVERY, STEPS + 1, EVERY))
