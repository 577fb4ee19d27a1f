"""The job that drills run: a small decoder, a small corpus, four ranks on two nodes or more.

It is small enough for any machine and has all that a recovery could silently get wrong: dropout,
gradients accumulated over micro-batches, a learning rate that changes, an epoch that ends within
the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind

NUM_RANKS = 4
PACE_ENV = "DRILL_PACE_S"  # seconds added to every step
SAVE_EVERY_STEPS = 10
HANG_TIMEOUT_S = 4.0
NO_CHANGES: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
_MODEL: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "seq_len": 32,
    "dropout": 0.1,
}
_ENGINE: Mapping[str, Any] = {
    "nodes": 2,
    "slots_per_node": NUM_RANKS // 2,
    "spares": 2,
    "warm_spares": 0,  # most drills lose no node, and a container costs a second of a core
    "grace_s": 10,
}
_NUM_FILES = 6
_LINES = 60
_TEXT = "the quick brown fox jumps over the lazy dog, again and again and again"


def write_corpus(home: Path, num_ranks: int = NUM_RANKS) -> Path:
    """Write the corpus below a folder, once. Its size grows with the number of ranks."""
    folder = home / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    lines = _LINES * max(1, num_ranks // NUM_RANKS)
    for number in range(_NUM_FILES):
        path = folder / f"{number}.txt"
        if not path.exists():
            path.write_text("".join(f"{number} {n} {_TEXT}\n" for n in range(lines)))
    return folder


def drill_job(
    home: Path,
    run_id: str,
    *,
    kind: ParallelKind,
    steps: int,
    pace_s: float = 0.0,
    changes: Mapping[str, Any],
    target: Mapping[str, Mapping[str, Any]] = NO_CHANGES,
) -> Job:
    """Compose a job for this machine, or for the place of `target`.

    Store and corpus lie below `home`, `pace_s` is added to every step, and the fields of `target`
    and then of `changes` replace those of the job's sections.

    Raises:
        InputError: the job is invalid.
    """
    parallelism = {"kind": kind} | ({"replicas": 2} if kind is ParallelKind.HSDP else {})
    document: dict[str, Any] = {
        "run_id": run_id,
        "storage": {"address": f"file://{home / 'store'}"},
        "steps": steps,
        "seed": 11,
        "worker": {"recipe": "perdure.training.drill.recipe:main"},
        "data": {"sources": [str(home / "corpus")], "shard_size_bytes": 8192, "num_workers": 0},
        "model": _MODEL,
        "parallelism": parallelism,
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
        "checkpoint": {"every_steps": SAVE_EVERY_STEPS},
        "restart": {"pod_retries": 1, "spare_wait_s": 60},
        "preflight": {"nodes": False},  # the checks have nothing to find on this machine
        "engine": _ENGINE,
        "env": {PACE_ENV: f"{pace_s:g}"},
    }
    document = _changed(_changed(document, target), changes)
    num_ranks = document["engine"]["nodes"] * document["engine"]["slots_per_node"]
    batch = {"global_batch_size": 2 * num_ranks, "micro_batch_size": 1}
    return parse_job({"batch": batch, **document})


def _changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace some fields in the sections of a job's document."""
    changed = {name: {**document.get(name, {}), **fields} for name, fields in changes.items()}
    return {**document, **changed}
