"""Saves of one attempt: a plan of who saves what, a share on each rank, one manifest of all.

`TieredSaver` copies a rank's share into the memory of its node's checkpoint server, which
publishes it while training goes on, and copies it to partner nodes where the job wants that.
`DirectSaver` puts it into the store before it returns, for ranks without a checkpoint server.
Sizes are bytes, times seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.checkpoint_server.client import CheckpointClient, ReservedSlot
from perdure.storage.errors import StorageError, TimedOut, describe, error_of
from perdure.storage.manifest import Manifest, ShardRecord
from perdure.storage.partner_copies import OWN_SLOTS, CopyPlan, CopyState, CopyTurn, agreed
from perdure.storage.partnering import Partnering
from perdure.storage.share import SaveId, Share, WrittenShare, merge, named_ranks, put_share
from perdure.storage.staging import SavePlans, Staging, raw

_log = logging.getLogger("perdure.storage")

RESERVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class SaveHooks:
    """Called in the course of a save, for signs of life.

    Attributes:
        on_wait: now and then while the store is behind and training has to wait.
        on_agree: where the ranks begin to agree: each of them answers at once, or is gone.
        on_copy: where they have agreed: a rank takes as long as its share does.
    """

    on_wait: Callable[[], None] = lambda: None
    on_agree: Callable[[], None] = lambda: None
    on_copy: Callable[[], None] = lambda: None


@dataclass(slots=True, kw_only=True)
class _Saver:
    """Saves of one attempt, one at a time, on every rank. Collective.

    Attributes:
        plans: who saves what.
        rank: among those that save together.
        world_size: how many save together.
        hooks: for signs of life.
        synchronize: waits for the device's copies.
        first_file: number in the name of the first rank's file.
    """

    plans: SavePlans
    run_id: str
    placement: int
    attempt: int
    rank: int = 0
    world_size: int = 1
    hooks: SaveHooks = SaveHooks()
    synchronize: Callable[[], None] = lambda: None
    first_file: int = 0

    def _stage(self, state: Mapping[str, Tensor]) -> Staging:
        shard = shard_name(self.placement, self.attempt, self.first_file + self.rank)
        return self.plans.stage(state, shard)

    def _copy(self, staging: Staging, memory: Tensor) -> None:
        self.hooks.on_copy()
        staging.copy_into(memory)
        self.synchronize()

    def _share_of(
        self, staging: Staging, step: int, extra: dict[str, Any], attachments: dict[str, str] | None
    ) -> Share:
        return Share(
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


@dataclass(slots=True, kw_only=True)
class TieredSaver(_Saver):
    """Saves that block training for a copy in memory.

    Attributes:
        client: to the checkpoint server of this node.
        announce: file that gets a line once a save is committed.
        pin: makes a slot's memory fast to copy into; returns what undoes it.
        partnering: chooses the nodes that hold copies; None: there are none.
        copies: which saves are copied, or were before.
        memory_of: rank whose memory is used; None: that of `rank`.
    """

    client: CheckpointClient
    announce: str | None = None
    partnering: Partnering | None = None
    copies: CopyPlan = field(default_factory=CopyPlan)
    memory_of: int | None = None
    pin: Callable[[Tensor], Callable[[], None]] = lambda _memory: lambda: None
    _pinned: dict[int, tuple[Tensor, Callable[[], None]]] = field(default_factory=dict)

    def close(self) -> None:
        """Discard what was being copied, and release the memory."""
        for _, unpin in self._pinned.values():
            unpin()
        self._pinned.clear()
        self.client.close()

    def prepare(self, state: Mapping[str, Tensor]) -> str | None:
        """Have memory ready for states like this one. Returns why there is none, else None."""
        size_bytes = self._stage(state).size_bytes
        if self.partnering is None:
            return self.client.prepare(self.rank, size_bytes)
        return self.client.prepare(self.rank, size_bytes, num_slots=OWN_SLOTS)

    def meet_partners(self, restored: SaveId | None) -> None:
        """Agree on the nodes that hold copies; collective. Without effect where there are none.

        Args:
            restored: save that the nodes had in memory when training began: those that are new
                lack it, or the copies of it.
        """
        if self.partnering is None:
            return
        self.partnering.meet(self.client, self.plans, self.rank)
        self.copies = agreed(
            [_plan_of(one) for one in self.plans.gather_json(_document_of(self.copies))]
        )
        if restored is not None:
            with suppress(StorageError):  # its copies count as failed then, and the save goes on
                self.client.copy_again(restored, self.rank)
            self.copies = CopyPlan(self.copies.copied, restored)

    def save(
        self,
        state: Mapping[str, Tensor],
        step: int,
        extra: dict[str, Any],
        *,
        attachments: dict[str, str] | None = None,
    ) -> None:
        """Copy `state` and return; the checkpoint server publishes it.

        Args:
            state: tensors by name.
            step: completed optimizer steps.
            extra: JSON; the first rank's counts.
            attachments: objects that the store gets before the checkpoint, by key; they stay
                with the share, so that its publisher publishes them, too.

        Raises:
            StorageError: an earlier save failed for good, or the checkpoint server is gone.
        """
        self.hooks.on_agree()
        staging = self._stage(state)
        turn = self._copy_turn()
        slot = self._reserve(staging.size_bytes, turn)
        self._copy(staging, self._memory_of(slot))
        share = self._share_of(staging, step, extra, attachments)
        keep = turn.keep if turn.begins else None
        self.client.ready(slot, share, announce=self.announce, keep=keep)
        self.copies = turn.after(share.save_id)

    def _copy_turn(self) -> CopyTurn:
        """What this save has to do with copies, the same on every rank."""
        if self.partnering is None:
            return CopyTurn(CopyPlan(self.copies.copied), begins=False)
        begun = self.copies.begun
        states: list[CopyState] = []
        if begun is not None:
            own = CopyState.FAILED
            with suppress(StorageError):  # all ranks must answer; the next request raises it
                own = self.client.copy_state(begun, self.rank)
            states = [CopyState(one) for one in self.plans.gather_json(own)]
        turn = self.copies.next(states)
        if turn.has_failed:  # a checkpoint server that died is there again, elsewhere
            if self.rank == 0 and begun is not None:
                failed = [rank for rank, one in enumerate(states) if one is CopyState.FAILED]
                _log.warning(
                    f"step {begun.step}: the saves of ranks {named_ranks(failed)} were not copied "
                    "to their partners; the logs of the checkpoint servers have the reason"
                )
            self.partnering.meet(self.client, self.plans, self.rank)
        return turn

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was saved is committed.

        Raises:
            StorageError: on every rank, when one of them could not publish in time.
        """
        self.hooks.on_agree()
        self._in_turns(
            lambda: not self.client.is_busy(),
            timeout_s=timeout_s,
            late="saves are not in the store yet, and there is no more time",
        )

    def _memory_of(self, slot: ReservedSlot) -> Tensor:
        """The slot's memory, pinned; other memory under the same number was unmapped."""
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        known = self._pinned.get(slot.number)
        if known is None or known[0].data_ptr() != memory.data_ptr():
            if known is not None:
                known[1]()
            self._pinned[slot.number] = (memory, self.pin(memory))
        return memory

    def _reserve(self, size_bytes: int, turn: CopyTurn) -> ReservedSlot:
        """A slot on every rank, once the save before the last one is published everywhere."""
        slots: list[ReservedSlot] = []
        rank = self.rank if self.memory_of is None else self.memory_of
        wanted = partial(
            self.client.reserve, rank, size_bytes, keep=turn.keep, copied=turn.plan.copied
        )

        def has_slot() -> bool:
            slot = slots[0] if slots else wanted()
            slots[:] = [slot] if slot is not None else []
            return bool(slots)

        late = f"no slot for a save within {RESERVE_TIMEOUT_S:g} s: the store is too slow"
        self._in_turns(has_slot, timeout_s=RESERVE_TIMEOUT_S, late=late)
        return slots[0]

    def _in_turns(self, is_done: Callable[[], bool], *, timeout_s: float, late: str) -> None:
        """Try on every rank, a moment each time, until it is done on all.

        A rank that waited alone would look like one that hangs, and would exceed the time limit
        of a collective.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            done, problem = False, None
            try:
                done = is_done()
            except StorageError as exc:
                problem = f"{type(exc).__name__}: {exc}"
            if not done and problem is None and time.monotonic() > deadline_s:
                problem = f"{TimedOut.__name__}: {late}"
            answers = self.plans.gather_json([done, problem])
            problems = [one[1] for one in answers if one[1]]
            if problems:
                raise StorageError(problems[0])
            if all(one[0] for one in answers):
                return
            self.hooks.on_wait()


def _document_of(plan: CopyPlan) -> list[Any]:
    return [one and one.model_dump(mode="json") for one in (plan.copied, plan.begun)]


def _plan_of(document: list[Any]) -> CopyPlan:
    copied, begun = (one and SaveId.model_validate(one) for one in document)
    return CopyPlan(copied, begun)


@dataclass(slots=True, kw_only=True)
class DirectSaver(_Saver):
    """Saves that are committed when they return; training waits meanwhile.

    Attributes:
        checkpoints: of the run, in the store.
        newest: manifest of the newest save, on the first rank.
    """

    checkpoints: CheckpointStore
    newest: Manifest | None = None

    def save(
        self,
        state: Mapping[str, Tensor],
        step: int,
        extra: dict[str, Any],
        *,
        attachments: dict[str, str] | None = None,
    ) -> None:
        """Save `state` and commit it.

        Args:
            state: tensors by name; replicated ones are written once, spread over the ranks, and
                a name that only one rank has is written by that one.
            step: completed optimizer steps.
            extra: JSON; the first rank's counts.
            attachments: objects that the store gets before the checkpoint, by key.

        Raises:
            StorageError: on every rank, when one of them failed; nothing is committed.
            ValueError: on every rank, when something cannot be saved.
        """
        staging = self._stage(state)
        written: WrittenShare | None = None
        problem: Exception | None = None
        try:
            # Before anything is written: the files of a committed step may have these names.
            self.checkpoints.check_may_commit(step, self.placement, self.attempt)
            file = torch.empty(staging.size_bytes, dtype=torch.uint8)
            self._copy(staging, file)
            share = self._share_of(staging, step, extra, attachments)
            written = WrittenShare(share=share, record=ShardRecord.of(raw(file)))
            put_share(self.checkpoints, written, raw(file))
        except Exception as exc:  # noqa: BLE001 or the other ranks would wait for this one
            problem = exc
        self._commit(written, problem)

    def _commit(self, written: WrittenShare | None, problem: Exception | None) -> None:
        """Commit on the first rank what all have written. Raises the lowest rank's failure."""
        gathered = self.plans.gather_to_first((written, problem and describe(problem)))
        failure: tuple[int, str, str] | None = None
        if gathered is not None:
            failures = [(rank, *why) for rank, (_, why) in enumerate(gathered) if why is not None]
            failure = failures[0] if failures else self._commit_shares([w for w, _ in gathered])
        (failure, *_) = self.plans.gather_json(failure)
        if failure is not None:
            rank, kind, text = failure
            raise error_of(kind, f"rank {rank}: {text}") from problem

    def _commit_shares(self, shares: list[WrittenShare]) -> tuple[int, str, str] | None:
        """Returns what failed, else None."""
        owner = (self.placement, self.attempt)
        try:
            manifest = merge(shares, owner=owner, written_at_s=self.checkpoints.clock())
            self.checkpoints.commit(manifest)
        except Exception as exc:  # noqa: BLE001 or the other ranks would wait for this one
            kind, text = describe(exc)
            return 0, kind, text
        self.newest = manifest
        return None
