"""Saves that stop training for a memory copy, and the choice of what to restore from.

A save copies this rank's share into its checkpoint server's memory; the checkpoint server does the
rest. The nodes can restore a save of which every rank's share lies on one of them. Sizes are bytes,
times seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from storage.checkpoint import Tier, shard_name
from storage.checkpoint_server.client import CheckpointClient, ReservedSlot
from storage.errors import StorageError, TimedOut
from storage.gather import gather_json
from storage.model import FrozenModel
from storage.share import SaveId, Share
from storage.staging import SavePlans

RESERVE_TIMEOUT_S = 1800.0


class Held(FrozenModel):
    """One share that a node can give, as the ranks tell each other."""

    save: SaveId
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Assembled:
    """A save of which the nodes together hold every share.

    Attributes:
        holders: by rank of the share, the lowest rank of today that has it at hand.
        local: by rank of today, the shares that its node holds, with the nearest tier.
    """

    save: SaveId
    holders: Mapping[int, int]
    local: Mapping[int, Mapping[int, Tier]]


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life that a save gives.

    Attributes:
        waits: called now and then while the store is behind and training has to wait.
        agrees: called where the ranks begin to agree: each of them answers at once, or is gone.
        copies: called where they have agreed: a rank takes as long as its share does.
    """

    waits: Callable[[], None] = lambda: None
    agrees: Callable[[], None] = lambda: None
    copies: Callable[[], None] = lambda: None


@dataclass(slots=True)
class TieredSaver:
    """Saves of one attempt, one at a time, on every rank. Collective.

    Attributes:
        signs: of life.
        synchronize: waits for the device's copies.
        pin: makes a slot's memory fast to copy into; returns what undoes it.
        first_file: number in the name of the first rank's file.
    """

    client: CheckpointClient
    plans: SavePlans
    run_id: str
    placement: int
    attempt: int
    rank: int
    world_size: int
    signs: Signs = Signs()
    synchronize: Callable[[], None] = lambda: None
    pin: Callable[[Tensor], Callable[[], None]] = lambda _memory: lambda: None
    first_file: int = 0
    _pinned: dict[int, tuple[Tensor, Callable[[], None]]] = field(default_factory=dict)

    def close(self) -> None:
        """Discard what was being copied, and let go of the memory."""
        for _, unpin in self._pinned.values():
            unpin()
        self._pinned.clear()
        self.client.close()

    def prepare(self, state: Mapping[str, Tensor]) -> str | None:
        """Have memory ready for states like this one. Returns why there is none, else None."""
        return self.client.prepare(self.rank, self.plans.stage(state, self._shard).size_bytes)

    def save(
        self,
        state: Mapping[str, Tensor],
        step: int,
        extra: dict[str, Any],
        *,
        attachments: dict[str, str] | None = None,
        announce: str | None = None,
    ) -> None:
        """Copy `state` and go on; it is published behind the caller's back.

        Args:
            state: tensors by name.
            step: completed optimizer steps.
            extra: JSON; the first rank's counts.
            attachments: objects that the store gets before the checkpoint, by key; they stay
                with the share, so that whoever publishes it publishes them.
            announce: file that gets a line once it is committed.

        Raises:
            StorageError: an earlier save failed for good, or the checkpoint server is gone.
        """
        self.signs.agrees()
        staging = self.plans.stage(state, self._shard)
        slot = self._reserve(staging.size_bytes)
        self.signs.copies()
        staging.copy_into(self._memory_of(slot))
        self.synchronize()
        share = Share(
            run_id=self.run_id,
            placement=self.placement,
            attempt=self.attempt,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            size_bytes=staging.size_bytes,
            tensors=staging.parts(),
            extra=extra,
            attachments=attachments or {},
            first_file=self.first_file,
        )
        self.client.ready(slot, share, announce=announce)

    def _memory_of(self, slot: ReservedSlot) -> Tensor:
        """The slot's memory, pinned; whoever maps other memory for it unpins what it had."""
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        known = self._pinned.get(slot.number)
        if known is None or known[0].data_ptr() != memory.data_ptr():
            if known is not None:
                known[1]()
            self._pinned[slot.number] = (memory, self.pin(memory))
        return memory

    def _reserve(self, size_bytes: int) -> ReservedSlot:
        """A slot on every rank, once the save before the last one is published everywhere.

        NoHook goes on before: a rank that waited alone would look like one that hangs.
        """
        deadline_s = time.monotonic() + RESERVE_TIMEOUT_S
        slot: ReservedSlot | None = None
        while True:
            problem = None
            try:
                slot = slot or self.client.try_reserve(self.rank, size_bytes)
            except StorageError as exc:
                problem = f"{type(exc).__name__}: {exc}"
            own = [slot is not None, problem]
            told = [own] if self.plans.is_alone else self._told(own)
            problems = [one[1] for one in told if one[1]]
            if problems:
                raise StorageError(problems[0])
            if slot is not None and all(has_slot for has_slot, _ in told):
                return slot
            self.signs.waits()
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"no slot for a save within {RESERVE_TIMEOUT_S:g} s: the store is too slow"
                )

    def _told(self, own: Any) -> list[Any]:
        return gather_json(own, self.plans.device, self.plans.group)

    @property
    def _shard(self) -> str:
        return shard_name(self.placement, self.attempt, self.first_file + self.rank)


def assemble(held: Mapping[int, Sequence[Held]], *, before: tuple[int, int]) -> list[Assembled]:
    """The saves that the nodes hold whole, newest step first. Pure.

    Args:
        held: by rank of today, what its node holds.
        before: (placement, attempt) of now; what is not older belongs to another life of the run.
    """
    by_save: defaultdict[SaveId, dict[int, dict[int, Tier]]] = defaultdict(dict)
    for reader, shares in held.items():
        for one in shares:
            if one.save.owner >= before:
                continue
            tiers = by_save[one.save].setdefault(reader, {})
            tiers[one.rank] = min(tiers.get(one.rank, one.tier), one.tier, key=_nearness)
    whole = [
        Assembled(save, holders, local)
        for save, local in by_save.items()
        if len(holders := _holders(local)) == save.world_size
    ]
    return sorted(whole, key=lambda one: (one.save.step, one.save.owner), reverse=True)


def _holders(local: Mapping[int, Mapping[int, Tier]]) -> dict[int, int]:
    """By rank of the share, who gives it: memory before disk, then the lowest rank."""
    best: dict[int, tuple[int, int]] = {}
    for reader, tiers in local.items():
        for rank, tier in tiers.items():
            offer = (_nearness(tier), reader)
            best[rank] = min(best.get(rank, offer), offer)
    return {rank: reader for rank, (_, reader) in best.items()}


def _nearness(tier: Tier) -> int:
    return list(Tier).index(tier)
