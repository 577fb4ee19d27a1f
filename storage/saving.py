"""Saves of one attempt: a plan of who saves what, a share on each rank, one manifest of all.

`TieredSaver` copies a rank's share into the memory of its node's checkpoint server, which
publishes it while training goes on, and copies it to partner nodes where the job wants that.
`DirectSaver` puts it into the store before it returns, for ranks without a checkpoint server.
Sizes are bytes, times seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.checkpoint_server.client import CheckpointClient, ReservedSlot
from perdure.storage.errors import StorageError, TimedOut, describe, error_of
from perdure.storage.manifest import Manifest, ShardRecord
from perdure.storage.partner_copies import OWN_SLOTS, CopyPlan, CopyState, CopyTurn, agreed
from perdure.storage.partnering import Partnering
from perdure.storage.plans import Plans, Staging
from perdure.storage.share import SaveId, Share, WrittenShare, merge, named_ranks, put_share

_log = logging.getLogger("perdure.storage")

RESERVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class SaveHooks:
    """Called in the course of a save, for signs of life.

    Attributes:
        on_wait: called now and then while training waits for a slow store.
        on_agree: called when the ranks begin to agree: each answers at once, or is gone.
        on_copy: called when they have agreed: a rank takes as long as its share does.
    """

    on_wait: Callable[[], None] = lambda: None
    on_agree: Callable[[], None] = lambda: None
    on_copy: Callable[[], None] = lambda: None


class Saver(Protocol):
    """Saves of one attempt, one at a time, on every rank. Every method is collective.

    Attributes:
        copies: saves that partner nodes hold copies of, or are being sent.
    """

    copies: CopyPlan

    @property
    def is_behind(self) -> bool:
        """Whether `save` returns before the checkpoint is committed."""

    def prepare(self, state: Callable[[], Mapping[str, Any]]) -> str | None:
        """Have memory ready for the saves of a state. Returns why a rank has none, else None."""

    def meet_partners(self, restored: SaveId | None) -> None:
        """Agree on the nodes that hold copies.

        Args:
            restored: save that the nodes had in memory when training began.
        """

    def narrow(self, savers: Sequence[int]) -> None:
        """Save from now on with these ranks alone, into files with names of their own."""

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        extra: dict[str, Any],
        *,
        attachments: dict[str, str] | None = None,
    ) -> None:
        """Save a state; see the implementations for what holds when this returns."""

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was saved is committed."""

    def close(self) -> None:
        """Discard a save that is being copied, and release the memory."""


@dataclass(slots=True, kw_only=True)
class _Saver:
    """Settings and steps that both savers have in common.

    Attributes:
        plans: split of the state over the ranks.
        rank: number of this rank among those that save together.
        world_size: number of ranks that save together.
        hooks: signs of life.
        synchronize: waits for the device's copies.
        first_file: number in the name of the first rank's file.
        copies: saves that partner nodes hold copies of, or are being sent.
    """

    plans: Plans
    run_id: str
    placement: int
    attempt: int
    rank: int = 0
    world_size: int = 1
    hooks: SaveHooks = SaveHooks()
    synchronize: Callable[[], None] = lambda: None
    first_file: int = 0
    copies: CopyPlan = field(default_factory=CopyPlan)

    def _number_among(self, savers: Sequence[int]) -> None:
        self.first_file += self.world_size
        self.rank, self.world_size = savers.index(self.rank), len(savers)

    def _stage(self, state: Mapping[str, Any]) -> Staging:
        shard = shard_name(self.placement, self.attempt, self.first_file + self.rank)
        return self.plans.stage(state, shard)

    def _copy(self, staging: Staging, memory: mmap.mmap | bytearray) -> None:
        self.hooks.on_copy()
        staging.copy_into(memory)
        self.synchronize()

    def _share_of(
        self, staging: Staging, step: int, extra: dict[str, Any], attachments: dict[str, str] | None
    ) -> Share:
        save_id = SaveId(
            step=step,
            placement=self.placement,
            attempt=self.attempt,
            world_size=self.world_size,
            first_file=self.first_file,
        )
        return Share(
            run_id=self.run_id,
            save_id=save_id,
            rank=self.rank,
            size_bytes=staging.size_bytes,
            tensors=staging.parts(),
            extra=extra,
            attachments=attachments or {},
        )


@dataclass(slots=True, kw_only=True)
class TieredSaver(_Saver):
    """Saves that block training for a copy in memory.

    Attributes:
        client: connection to the checkpoint server of this node.
        announce: file that gets a line once a save is committed.
        pin: makes a slot's memory fast to copy into; returns what undoes it.
        partnering: chooses the nodes that hold copies; None: there are none.
        memory_of: rank whose memory is used; None: that of `rank`.
    """

    client: CheckpointClient
    announce: str | None = None
    partnering: Partnering | None = None
    memory_of: int | None = None
    pin: Callable[[mmap.mmap], Callable[[], None]] = lambda _memory: lambda: None
    _pinned: dict[int, tuple[mmap.mmap, Callable[[], None]]] = field(default_factory=dict)

    @property
    def is_behind(self) -> bool:
        """See `Saver.is_behind`."""
        return True

    def close(self) -> None:
        """See `Saver.close`."""
        for _, unpin in self._pinned.values():
            unpin()
        self._pinned.clear()
        self.client.close()

    def prepare(self, state: Callable[[], Mapping[str, Any]]) -> str | None:
        """See `Saver.prepare`; the memory is that of the node's checkpoint server."""
        size_bytes = self._stage(state()).size_bytes
        refusals = [why for why in self.plans.gather_json(self._refusal(size_bytes)) if why]
        return refusals[0] if refusals else None

    def _refusal(self, size_bytes: int) -> str | None:
        """Why this node's checkpoint server cannot take saves, else None."""
        try:
            if self.partnering is None:
                return self.client.prepare(self.rank, size_bytes)
            return self.client.prepare(self.rank, size_bytes, num_slots=OWN_SLOTS)
        except StorageError as exc:
            return str(exc)

    def narrow(self, savers: Sequence[int]) -> None:
        """See `Saver.narrow`."""
        self.partnering = None  # the save is in the store before the processes end
        # Under the number among the savers it would take the place of another rank's copies.
        self.memory_of = self.rank
        self._number_among(savers)

    def meet_partners(self, restored: SaveId | None) -> None:
        """See `Saver.meet_partners`; new nodes lack the restored save, or the copies of it."""
        if self.partnering is None:
            return
        self.partnering.meet(self.client, self.plans, self.rank)
        self.copies = agreed(
            [_plan_of(plan) for plan in self.plans.gather_json(_document_of(self.copies))]
        )
        if restored is not None:
            with suppress(StorageError):  # its copies count as failed then, and the save goes on
                self.client.copy_again(restored, self.rank)
            self.copies = CopyPlan(self.copies.copied, restored)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        extra: dict[str, Any],
        *,
        attachments: dict[str, str] | None = None,
    ) -> None:
        """Copy `state` and return; the checkpoint server publishes it.

        Args:
            state: tensors by name.
            step: completed optimizer steps.
            extra: JSON state; that of the first rank is stored.
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
        self.copies = turn.plan_after(share.save_id)

    def _copy_turn(self) -> CopyTurn:
        """Decide, the same on every rank, whether this save is copied."""
        if self.partnering is None:
            return CopyTurn(CopyPlan(self.copies.copied), begins=False)
        begun = self.copies.begun
        states: list[CopyState] = []
        if begun is not None:
            state = CopyState.FAILED
            with suppress(StorageError):  # all ranks must answer; the next request raises it
                state = self.client.copy_state(begun, self.rank)
            states = [CopyState(rank_state) for rank_state in self.plans.gather_json(state)]
        turn = self.copies.next(states)
        if turn.has_failed:  # a checkpoint server that died is there again, elsewhere
            if self.rank == 0 and begun is not None:
                failed = [
                    rank for rank, rank_state in enumerate(states) if rank_state is CopyState.FAILED
                ]
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

    def _memory_of(self, slot: ReservedSlot) -> mmap.mmap:
        """The slot's memory, pinned; other memory under the same number is mapped anew."""
        memory = slot.memory
        pinned = self._pinned.get(slot.number)
        if pinned is None or pinned[0] is not memory:
            if pinned is not None:
                pinned[1]()
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
            problems = [answer[1] for answer in answers if answer[1]]
            if problems:
                raise StorageError(problems[0])
            if all(answer[0] for answer in answers):
                return
            self.hooks.on_wait()


def _document_of(plan: CopyPlan) -> list[Any]:
    return [save and save.model_dump(mode="json") for save in (plan.copied, plan.begun)]


def _plan_of(document: list[Any]) -> CopyPlan:
    copied, begun = (save and SaveId.model_validate(save) for save in document)
    return CopyPlan(copied, begun)


@dataclass(slots=True, kw_only=True)
class DirectSaver(_Saver):
    """Saves that are committed when they return; training waits meanwhile.

    Attributes:
        checkpoints: checkpoints of the run, in the store.
        newest: manifest of the newest save, on the first rank.
    """

    checkpoints: CheckpointStore
    newest: Manifest | None = None

    @property
    def is_behind(self) -> bool:
        """See `Saver.is_behind`."""
        return False

    def prepare(self, state: Callable[[], Mapping[str, Any]]) -> str | None:  # noqa: ARG002 the protocol's
        """See `Saver.prepare`; memory is allocated by each save."""
        return None

    def meet_partners(self, restored: SaveId | None) -> None:
        """See `Saver.meet_partners`; without checkpoint servers there are no copies."""

    def narrow(self, savers: Sequence[int]) -> None:
        """See `Saver.narrow`."""
        self._number_among(savers)

    def settle(self, timeout_s: float) -> None:
        """See `Saver.settle`; every save is committed when it returns."""

    def close(self) -> None:
        """See `Saver.close`; a save holds no memory once it returns."""

    def save(
        self,
        state: Mapping[str, Any],
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
            extra: JSON state; that of the first rank is stored.
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
            file = bytearray(staging.size_bytes)
            self._copy(staging, file)
            share = self._share_of(staging, step, extra, attachments)
            written = WrittenShare(share=share, record=ShardRecord.of(memoryview(file)))
            put_share(self.checkpoints, written, memoryview(file))
        except Exception as exc:  # noqa: BLE001 or the other ranks would wait for this one
            problem = exc
        self._commit(written, problem)

    def _commit(self, written: WrittenShare | None, problem: Exception | None) -> None:
        """Commit on the first rank what all have written. Raises the lowest rank's failure."""
        document = None if written is None else written.model_dump_json()
        gathered = self.plans.gather_to_first([document, problem and describe(problem)])
        failure: tuple[int, str, str] | None = None
        if gathered is not None:
            failures = [(rank, *why) for rank, (_, why) in enumerate(gathered) if why is not None]
            failure = failures[0] if failures else self._commit_shares([w for w, _ in gathered])
        (failure, *_) = self.plans.gather_json(failure)
        if failure is not None:
            rank, kind, text = failure
            raise error_of(kind, f"rank {rank}: {text}") from problem

    def _commit_shares(self, documents: Sequence[str]) -> tuple[int, str, str] | None:
        """Returns what failed, else None."""
        owner = (self.placement, self.attempt)
        try:
            shares = [WrittenShare.model_validate_json(document) for document in documents]
            manifest = merge(shares, owner=owner, written_at_s=self.checkpoints.clock())
            self.checkpoints.commit(manifest)
        except Exception as exc:  # noqa: BLE001 or the other ranks would wait for this one
            kind, text = describe(exc)
            return 0, kind, text
        self.newest = manifest
        return None
