"""Where the checkpoints of a run lie on this machine's nodes, beside the store.

For people: a restore asks the checkpoint servers themselves. Steps are completed optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from storage.checkpoint import CheckpointStore
from storage.checkpoint_server.protocol import Tier
from storage.checkpoint_server.publish import shares_on_disk
from storage.local import LocalStore
from storage.share import SaveId
from training.agent.checkpoint_server import HELD_FILE, HeldInMemory
from training.processes import is_alive


def node_tiers(home: Path, run_id: str) -> dict[int, list[Tier]]:
    """By step, the tiers that hold the share of every rank.

    Args:
        home: Perdure's folder on this machine.
        run_id: of the run.
    """
    nodes = home / "runs" / run_id / "nodes"
    found: defaultdict[int, list[Tier]] = defaultdict(list)
    for tier, held in ((Tier.MEMORY, _in_memory(nodes)), (Tier.DISK, _on_disk(nodes, run_id))):
        for step in _whole(held):
            found[step].append(tier)
    return dict(found)


def _whole(held: Iterable[tuple[SaveId, int]]) -> set[int]:
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    for save, rank in held:
        ranks[save].add(rank)
    return {save.step for save, here in ranks.items() if len(here) == save.world_size}


def _in_memory(nodes: Path) -> Iterator[tuple[SaveId, int]]:
    for path in nodes.glob(f"*/*/{HELD_FILE}"):
        try:
            held = HeldInMemory.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            continue  # its container is just going away
        if is_alive(held.pid, held.process_started_s):
            yield from held.saves


def _on_disk(nodes: Path, run_id: str) -> Iterator[tuple[SaveId, int]]:
    for folder in nodes.glob("*/*/checkpoints"):
        for written in shares_on_disk(CheckpointStore(LocalStore(folder), run_id)):
            yield written.share.save_id, written.share.rank
