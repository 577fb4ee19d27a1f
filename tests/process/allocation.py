"""Nodes that somebody has given, on this machine: one `perdure launch` each, started by hand."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from perdure.storage.address import open_store
from perdure.training.config.job import parse_job
from perdure.training.journal.ledger import Ledger
from perdure.training.processes import is_tracker, list_descendants, signal_all
from tests.process.harness import Running, Workbench
from tests.waiting import PATIENCE_S


def launched(bench: Workbench, run_id: str, **changes: Any) -> dict[str, Any]:
    """The job of two ranks on two nodes of an allocation, with a warm spare."""
    engine = {
        "kind": "launched",
        "nodes": 2,
        "spares": 1,
        "warm_spares": 1,
        "slots_per_node": 1,
        "grace_s": 10,
    }
    section = {**engine, **changes.pop("engine", {})}
    restart = {"pod_retries": 1, "node_replace": True}
    every = {"checkpoint": {"every_steps": 1000}, "restart": restart}
    return bench.pair(run_id, **{**every, **changes, "engine": section})


@dataclass
class Allocation:
    """The nodes of a run, by rank.

    Attributes:
        document: the job.
        num_nodes: of the allocation, whether they have been started or not.
        suffix: of the files with the nodes' output.
    """

    bench: Workbench
    document: dict[str, Any]
    num_nodes: int
    suffix: str = ""
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def running(self) -> Running:
        """The run, from outside."""
        return Running(self.bench, parse_job(self.document), None)

    def out(self, rank: int) -> str:
        """What a node has printed."""
        return self._out(rank).read_text()

    def _out(self, rank: int) -> Path:
        return self.bench.home / f"{self.document['run_id']}-{rank}{self.suffix}.out"

    def start(
        self,
        ranks: Sequence[int] | None = None,
        *options: str,
        env: Mapping[str, str] | None = None,
    ) -> Allocation:
        """`perdure launch` on these nodes; None: on all."""
        path = self.bench.home / f"{self.document['run_id']}{self.suffix}.yaml"
        path.write_text(yaml.safe_dump(self.document))
        for rank in range(self.num_nodes) if ranks is None else ranks:
            place = ("--nodes", str(self.num_nodes), "--node-rank", str(rank))
            with self._out(rank).open("ab") as log:
                self.nodes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "perdure", "launch", str(path), *place, *options],
                    env={**self.bench.environment, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return self

    def power_off(self, rank: int) -> None:
        """SIGKILL everything on a node; nothing of it reacts to the end of anything else."""
        launch = psutil.Process(self.nodes[rank].pid)
        tree = [launch, *list_descendants(launch), *self.running.local.processes(f"node-{rank}")]
        victims = [process for process in tree if not is_tracker(process)]
        signal_all(victims, signal.SIGSTOP)
        signal_all(victims, signal.SIGKILL)
        self.nodes.pop(rank).wait()

    def supervisor(self) -> int | None:
        """Rank of the node whose supervisor has the run; None: it is none of these nodes."""
        lease = Ledger(open_store(self.running.job.storage), self.running.job.run_id).lease()
        if lease is None or not psutil.pid_exists(lease.pid):
            return None
        family = {process.pid for process in psutil.Process(lease.pid).parents()}
        return next((r for r, p in self.nodes.items() if p.pid in family), None)

    def finish(self) -> dict[int, int]:
        """Wait for the end of all nodes that are left. Returns their exit codes."""
        self.running.pace(0)
        codes = {}
        for rank, process in self.nodes.items():
            try:
                codes[rank] = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {rank} did not end:\n{self.out(rank)}") from None
        return codes

    def stop(self) -> None:
        """End what a failed test has left."""
        for rank in list(self.nodes):
            if self.nodes[rank].poll() is None:
                self.power_off(rank)
