"""Restoring: the choice between what the nodes hold and what the store has, and its repair.

Collective: every rank takes the same steps, on the first rank's answers. Steps are completed
optimizer steps.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.errors import Corrupt, NotFound, StorageError
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Manifest
from perdure.storage.node_saves import NodeSaves, NodeShares
from perdure.storage.ranks import Ranks, from_first
from perdure.storage.restorable import RestorableSave
from perdure.storage.share import SaveId
from perdure.training.journal.attempt_log import AttemptLog
from perdure.training.journal.events import CheckpointDamaged, CheckpointRestored
from perdure.training.runtime.context import WorkerContext

_log = logging.getLogger("perdure.runtime")

PARTNER_MEMORY = "memory of a partner"
# The tensors to fill, by name, for a checkpoint that holds what its manifest says.
StateOf = Callable[[Manifest], Mapping[str, Any]]


class StateReader(Protocol):
    """Reads what a program's state is made of: torch tensors, or numpy arrays."""

    def nodes(
        self,
        shares: NodeShares,
        checkpoints: CheckpointStore,
        owner: tuple[int, int],
        name: str | None,
        announce: str,
    ) -> NodeSaves:
        """Make what restores from the nodes; the arguments are the attributes of `NodeSaves`."""

    def load(
        self,
        state: Mapping[str, Any],
        manifest: Manifest,
        *,
        checkpoints: CheckpointStore,
        held: Mapping[str, Any],
        verify: frozenset[str],
    ) -> int:
        """Fill a state from a committed checkpoint; collective. Returns the shards fetched."""


class Restorer:
    """Restores one training, once.

    Args:
        context: rank, job and folders of this process.
        checkpoints: the run's checkpoints in the store.
        ranks: the ranks of this attempt.
        reader: fills what the program's state is made of.
        load: fills the training by the function it is given, which fills tensors.
        on_wait: called now and then while something takes long.

    Attributes:
        from_memory: save that the memory of the nodes had whole, for as many ranks; None when
            the state came from elsewhere.
    """

    def __init__(
        self,
        context: WorkerContext,
        checkpoints: CheckpointStore,
        ranks: Ranks,
        reader: StateReader,
        load: Callable[[Callable[[StateOf], Manifest | None]], Manifest | None],
        on_wait: Callable[[], None],
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._ranks, self._reader = ranks, reader
        self._load = load
        self._on_wait = on_wait
        self._is_touched = False
        self._num_damaged = 0
        self._num_fetched = 0
        self._why = ""
        self.from_memory: SaveId | None = None

    def restore(self) -> int:
        """Restore the newest step that the nodes or the store have whole.

        Returns:
            Its step, 0 when there is none.

        Raises:
            Corrupt: every checkpoint is damaged, and the state was touched on the way: new
                processes start from nothing.
        """
        committed = from_first(self._checkpoints.latest, self._ranks)
        nodes = self._nodes()
        if nodes is not None:
            step = self._restore_from_nodes(nodes, committed)
            if step is not None:
                return step
        return self._restore_from_store(nodes)

    def _nodes(self) -> NodeSaves | None:
        checkpoint_server, disk = self._context.checkpoint_server, self._context.disk_tier
        if checkpoint_server is None:
            return None
        on_disk = CheckpointStore(LocalStore(disk), self._context.job.run_id) if disk else None
        now = (self._context.placement, self._context.attempt)
        shares = NodeShares(CheckpointClient(checkpoint_server), on_disk)
        name = self._context.node if self._context.job.checkpoint.partner_copies else None
        announce = str(self._context.metrics_path)
        return self._reader.nodes(shares, self._checkpoints, now, name, announce)

    def _restore_from_nodes(self, nodes: NodeSaves, committed: int | None) -> int | None:
        while True:
            chosen = next(iter(nodes.candidates()), None)
            self._why = nodes.lacking
            if chosen is None:
                self._why = self._why or "no node holds a save"
                return None
            if chosen.save.step < (committed or 0):
                self._why = joined(
                    self._why, f"the nodes have no newer step than {chosen.save.step}"
                )
                return None
            chosen = nodes.bring(chosen)
            if chosen is None:
                continue
            try:
                manifest = self._fill(partial(nodes.load, chosen))
            except Corrupt as exc:
                problem = f"step {chosen.save.step} cannot be restored from the nodes: {exc}"
                self._log(problem)
                self._why = joined(self._why, problem)
                return None
            if manifest is not None:
                break
        if manifest.step != committed:
            nodes.publish(chosen)
        self._finish_nodes(nodes, chosen, manifest.step)
        return manifest.step

    def _finish_nodes(self, nodes: NodeSaves, chosen: RestorableSave, step: int) -> None:
        """Record where the restored state came from. Collective."""
        nodes.node.client.close()
        in_memory = all(chosen.local[h][r] is Tier.MEMORY for r, h in chosen.holders.items())
        are_same = chosen.save.world_size == self._context.world_size
        if in_memory and are_same:
            self.from_memory = chosen.save
        self._log(f"step {step} restored from the nodes' memory or disks")
        fetched = sum(self._ranks.gather(nodes.num_fetched))
        partners = self._partner_nodes(nodes)
        self._record_restored(
            CheckpointRestored(
                at_s=time.time(),
                number=1,
                step=step,
                shares=places_of(
                    chosen, nodes.brought, has_partners=nodes.name is not None and are_same
                ),
                partners=partners,
                num_fetched=fetched,
                why=self._why,
            )
        )

    def _partner_nodes(self, nodes: NodeSaves) -> dict[str, str]:
        """Map nodes that got shares from a partner to it. Collective where there are copies."""
        if nodes.name is None:
            return {}
        names = self._ranks.gather(nodes.name)
        return {names[rank]: partner for rank, partner in nodes.brought.items()}

    def _record_restored(self, event: CheckpointRestored) -> None:
        """Record it in the attempt's log, and through that in the run's ledger."""
        if self._context.rank != 0:
            return
        _log.info(event.text)
        try:
            with AttemptLog(self._context.metrics_path) as log:
                log.append(event)
        except OSError as exc:
            _log.info(f"where the state came from is not on record: {exc}")

    def _restore_from_store(self, nodes: NodeSaves | None) -> int:
        """Restore the newest committed step; shards that a node holds are taken from there."""
        tried: set[int] = set()
        while (newest := from_first(self._newest_manifest, self._ranks)) is not None:
            step, text, problem = newest
            if text is not None:
                manifest = Manifest.model_validate_json(text)
                problem = self._read_committed(manifest, None if step in tried else nodes)
                if problem is None:
                    self._log(f"step {step} restored from the store")
                    self._record_from_store(manifest, nodes)
                    return int(step)
            assert problem is not None  # noqa: S101 there is no manifest without a problem
            self._repair(step, text, nodes, problem, is_again=step in tried)
            tried.add(step)
        if self._is_touched:
            raise Corrupt("no whole checkpoint is left; new processes start from step 0")
        return 0

    def _record_from_store(self, manifest: Manifest, nodes: NodeSaves | None) -> None:
        fetched = sum(self._ranks.gather(self._num_fetched))
        self._record_restored(
            CheckpointRestored(
                at_s=time.time(),
                number=1,
                step=manifest.step,
                shares={"store": len(manifest.shards)},
                num_fetched=fetched,
                why=self._why if nodes is not None else "",
            )
        )

    def _newest_manifest(self) -> tuple[int, str | None, str | None] | None:
        """Find the newest committed step with its manifest, or with the fault of that."""
        step = self._checkpoints.latest()
        if step is None:
            return None
        try:
            return step, self._checkpoints.manifest(step).model_dump_json(), None
        except (Corrupt, NotFound) as exc:
            return step, None, str(exc)

    def _read_committed(self, manifest: Manifest, nodes: NodeSaves | None) -> str | None:
        """Load a committed checkpoint. Returns what is wrong with it, else None."""
        try:
            self._fill(partial(self._load_committed, manifest, nodes))
        except (Corrupt, NotFound) as exc:
            return str(exc)
        if nodes is not None:
            nodes.node.client.close()
        return None

    def _load_committed(
        self, manifest: Manifest, nodes: NodeSaves | None, wanted: StateOf
    ) -> Manifest:
        state = wanted(manifest)
        held = nodes.held_of(manifest, state) if nodes is not None else {}
        # Every shard that is read is hashed by one rank, and not by one that has it at hand.
        at_hand = [frozenset(names) for names in self._ranks.gather(sorted(held))]
        hashing = readers_of(sorted(manifest.shards), at_hand)
        verify = frozenset(s for s, rank in hashing.items() if rank == self._context.rank)
        self._num_fetched = self._reader.load(
            state, manifest, checkpoints=self._checkpoints, held=held, verify=verify
        )
        return manifest

    def _repair(
        self, step: int, text: str | None, nodes: NodeSaves | None, why: str, *, is_again: bool
    ) -> None:
        """Have damaged shards replaced from a node, or stop offering the step. Collective.

        Raises:
            StorageError: the store has it whole, and yet some rank cannot read it.
        """
        damaged: list[str] = []
        if text is not None:
            damaged = self._damaged_shards(Manifest.model_validate_json(text))
            if not damaged and is_again:
                raise StorageError(f"step {step} is whole in the store, and cannot be read: {why}")
            if not damaged:
                self._log(f"step {step} is read again, it is whole in the store: {why}")
                return
        damage = "; ".join(damaged) or why
        if nodes is not None and text is not None and not is_again:
            nodes.node.refresh()
            names = [line.partition(" ")[0] for line in damaged]
            if nodes.repair(Manifest.model_validate_json(text), names):
                self._log_damage(step, damage, is_repaired=True)
                return
        if self._context.rank == 0:
            self._checkpoints.set_aside(step, damage)
        self._log_damage(step, damage, is_repaired=False)
        from_first(lambda: None, self._ranks)  # the others look for the next one after that

    def _damaged_shards(self, manifest: Manifest) -> list[str]:
        """Describe the damage of each shard; every rank hashes its part of them."""
        shards = sorted(manifest.shards)[self._context.rank :: self._context.world_size]
        damages = self._checkpoints.verify_shards(
            manifest.step, {name: manifest.shards[name] for name in shards}
        )
        self._on_wait()
        lines = [f"{damage.file} {damage.kind}: {damage.detail}" for damage in damages]
        return [line for of_rank in self._ranks.gather(lines) for line in of_rank]

    def _log_damage(self, step: int, text: str, *, is_repaired: bool) -> None:
        """Write to the rank's log, and through the attempt's log to the run's ledger."""
        self._log(f"checkpoint of step {step} {'repaired' if is_repaired else 'set aside'}: {text}")
        if self._context.rank != 0:
            return
        self._num_damaged += 1
        event = CheckpointDamaged(
            at_s=time.time(),
            number=self._num_damaged,
            step=step,
            text=text[:1000],
            is_repaired=is_repaired,
        )
        try:
            with AttemptLog(self._context.metrics_path) as log:
                log.append(event)
        except OSError as exc:
            _log.info(f"the damage is not on record: {exc}")

    def _log(self, text: str) -> None:
        if self._context.rank == 0:
            _log.info(text)

    def _fill(self, read: Callable[[StateOf], Manifest | None]) -> Manifest | None:
        self._is_touched = True  # torch counts a step when it makes the optimizer's state
        return self._load(read)


def places_of(
    chosen: RestorableSave, brought: Mapping[int, str], *, has_partners: bool
) -> dict[str, int]:
    """Count the shares of a save by the name of their place. Pure.

    Args:
        chosen: save that was restored.
        brought: by rank whose node had a partner's copy brought, that partner.
        has_partners: whether ranks are as many as saved it, with copies on other nodes: what the
            node of a rank lacks in its memory was a copy there.
    """

    def place(rank: int, holder: int) -> str:
        tier = chosen.local[holder][rank]
        is_elsewhere = has_partners and rank not in chosen.local.get(rank, {})
        is_copy = rank in brought or (is_elsewhere and tier is Tier.MEMORY)
        return PARTNER_MEMORY if is_copy else tier.value

    return dict(sorted(Counter(place(*item) for item in chosen.holders.items()).items()))


def joined(*reasons: str) -> str:
    """Join reasons on a line, without the empty ones."""
    return "; ".join(reason for reason in reasons if reason)


def readers_of(shards: Sequence[str], at_hand: Sequence[frozenset[str]]) -> dict[str, int]:
    """Choose for every shard a rank that does not have it at hand, spread over the ranks."""
    readers: dict[str, int] = {}
    for number, shard in enumerate(shards):
        ranks = ((number + i) % len(at_hand) for i in range(len(at_hand)))
        reader = next((rank for rank in ranks if shard not in at_hand[rank]), None)
        if reader is not None:
            readers[shard] = reader
    return readers
