"""Slots of a checkpoint server: one whole share of every rank is always there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure.storage.checkpoint_server.slots import (
    SLOTS_PER_RANK,
    UNLIMITED,
    NoMemory,
    Slot,
    SlotState,
    SlotTable,
    cgroup_left_bytes,
)
from perdure.storage.manifest import digest
from tests.unit.storage.nodes import bytes_of, share_of

PLENTY = 1 << 40


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(lambda: PLENTY)


def reserve(table: SlotTable, rank: int = 0, *, writer: object, size_bytes: int = 64) -> Slot:
    slot = table.reserve(rank, size_bytes, writer=writer, timeout_s=0)
    assert slot is not None
    return slot


def fill(table: SlotTable, step: int, *, rank: int = 0, owner: tuple[int, int] = (1, 1)) -> Slot:
    """Copy a share into a slot, which is READY then, and not published."""
    writer = object()
    share = share_of(step, rank=rank, owner=owner)
    slot = reserve(table, rank, writer=writer)
    assert slot.memory is not None
    slot.memory[: share.size_bytes] = bytes_of(share)
    assert table.ready(slot.number, share, writer=writer) is slot
    return slot


def publish(table: SlotTable, step: int, *, owner: tuple[int, int] = (1, 1)) -> Slot:
    slot = fill(table, step, owner=owner)
    table.settle(slot)
    return slot


def test_a_slot_is_copied_into_and_then_handed_over_once_and_by_its_writer_alone(table):
    writer = object()
    slot = reserve(table, writer=writer)
    assert table.ready(slot.number, share_of(10), writer=object()) is None
    assert table.ready(99, share_of(10), writer=writer) is None
    assert (slot.state, slot.share) == (SlotState.COPYING, None)
    assert table.ready(slot.number, share_of(10), writer=writer) is slot
    assert (slot.state, slot.share) == (SlotState.READY, share_of(10))
    assert table.ready(slot.number, share_of(20), writer=writer) is None
    assert slot.share == share_of(10)


def test_a_share_is_found_by_its_own_number_in_whose_memory_it_may_be(table):
    writer, share = object(), share_of(10, rank=0)
    slot = reserve(table, 2, writer=writer)
    table.ready(slot.number, share, writer=writer)
    assert table.pin(share.save_id, 0) is slot
    assert table.pin(share.save_id, 2) is None


def test_the_record_is_the_hash_of_the_share_and_not_of_the_whole_memory(table):
    fill(table, 10)
    writer = object()
    slot = reserve(table, 1, writer=writer, size_bytes=5000)
    share = share_of(10, rank=1)
    assert slot.memory is not None
    slot.memory[:5000] = bytes_of(share)[:1] * 5000
    slot.memory[:64] = bytes_of(share)
    table.ready(slot.number, share, writer=writer)
    record = slot.written().record
    assert (record.size_bytes, record.xxh3_128) == (64, digest(bytes_of(share)))


def test_a_save_waits_while_the_one_before_the_last_is_not_published(table):
    first, second = fill(table, 10), fill(table, 20)
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is None
    table.settle(first)
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is first
    assert second.share == share_of(20)


def test_the_newest_whole_share_is_never_given_away_published_or_not(table):
    newest = publish(table, 10)
    assert reserve(table, writer=object()) is not newest
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is None


def test_after_going_back_the_newer_attempts_share_is_the_newest(table):
    old, new = publish(table, 500), publish(table, 60, owner=(1, 2))
    assert reserve(table, writer=object()) is old
    assert new.share == share_of(60, owner=(1, 2))


def test_ranks_do_not_take_each_others_slots(table):
    numbers = {reserve(table, rank, writer=object()).number for rank in range(3) for _ in range(2)}
    assert len(numbers) == 3 * SLOTS_PER_RANK
    assert table.reserve(1, 64, writer=object(), timeout_s=0) is None


def test_what_a_dead_writer_was_copying_is_discarded(table):
    whole, writer = publish(table, 10), object()
    copying = reserve(table, writer=writer)
    table.abandon(writer)
    assert (copying.state, copying.share) == (SlotState.EMPTY, None)
    assert (whole.state, whole.share) == (SlotState.READY, share_of(10))
    assert table.ready(copying.number, share_of(20), writer=writer) is None
    assert reserve(table, writer=object()) is copying


def test_saves_that_are_to_be_kept_stay_and_the_newest_may_go_instead(table):
    table.prepare(0, 64, num_slots=3)
    copied, begun, newest = publish(table, 10), publish(table, 20), publish(table, 30)
    keep = (share_of(10).save_id, share_of(20).save_id)
    assert table.reserve(0, 64, writer=object(), timeout_s=0, keep=keep) is newest
    assert (copied.share, begun.share) == (share_of(10), share_of(20))


def test_a_save_to_be_kept_that_is_not_here_does_not_cost_the_newest(table):
    old, newest = publish(table, 10), publish(table, 20)
    keep = (share_of(5).save_id,)
    assert table.reserve(0, 64, writer=object(), timeout_s=0, keep=keep) is old
    assert newest.share == share_of(20)


def test_memory_of_ranks_that_are_of_other_nodes_now_is_given_back_once_nobody_needs_it(table):
    publish(table, 10)
    foreign = fill(table, 10, rank=5)
    table.drop((0,), whole_save=share_of(20).save_id)
    assert foreign.memory is not None, "it is not published, nor taken over"
    table.settle(foreign)
    table.drop((0,), whole_save=share_of(10).save_id)
    assert foreign.memory is not None, "nothing newer is whole"
    table.drop((0,), whole_save=share_of(20).save_id)
    assert foreign.memory is None
    assert [slot.share for slot in table.pin_all()] == [share_of(10)]


def test_a_pinned_share_stays_until_the_last_reader_lets_go(table):
    pinned, other = publish(table, 10), publish(table, 20)
    assert table.pin(share_of(10).save_id, 0) is pinned
    assert table.pin(share_of(10).save_id, 0) is pinned
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is None
    table.unpin(pinned)
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is None
    assert bytes(pinned.view()) == bytes_of(share_of(10))
    table.unpin(pinned)
    assert reserve(table, writer=object()) is pinned
    assert other.state is SlotState.READY


def test_a_share_that_is_being_overwritten_cannot_be_pinned(table):
    publish(table, 10)
    publish(table, 20)
    reserve(table, writer=object())
    assert table.pin(share_of(10).save_id, 0) is None
    assert [slot.share for slot in table.pin_all()] == [share_of(20)]


def test_a_save_that_waits_goes_on_when_a_slot_is_settled(table):
    first = fill(table, 10)
    fill(table, 20)
    got: list[Slot | None] = []
    begun = Event()

    def wait() -> None:
        begun.set()
        got.append(table.reserve(0, 64, writer=object(), timeout_s=240))

    thread = Thread(target=wait)
    thread.start()
    begun.wait()
    table.settle(first)
    thread.join()
    assert got == [first]


def test_too_little_memory_is_refused_with_the_numbers():
    table = SlotTable(lambda: 1000)
    with pytest.raises(NoMemory, match=r"rank 3: a share of 4096 bytes, 1000 bytes are available"):
        table.prepare(3, 4096)
    with pytest.raises(NoMemory, match="4096 bytes, 1000 bytes"):
        table.reserve(3, 4096, writer=object(), timeout_s=0)


def test_memory_that_is_there_already_needs_no_more_of_it():
    free = [PLENTY]
    table = SlotTable(lambda: free[0])
    table.prepare(0, 4096)
    free[0] = 0
    first = reserve(table, writer=object(), size_bytes=4096)
    assert reserve(table, writer=object(), size_bytes=100) is not first


def test_a_slot_is_reused_and_grows_only_when_it_has_to(table):
    table.prepare(0, 4096)
    slot = reserve(table, writer=(writer := object()), size_bytes=100)
    known = slot.memory_id
    table.abandon(writer)
    again = reserve(table, writer=(writer := object()), size_bytes=4096)
    assert (again, again.memory_id) == (slot, known)
    table.abandon(writer)
    grown = reserve(table, writer=object(), size_bytes=8192)
    assert (grown, grown.size_bytes, grown.memory_id != known) == (slot, 8192, True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel gives this process no file, of memory or on disk, above a MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_the_kernel_refuses_costs_no_whole_share(table, small_files):
    publish(table, 10)
    publish(table, 20)
    with pytest.raises(NoMemory, match="2097152 bytes: File too large"):
        table.reserve(0, 2 * 2**20, writer=object(), timeout_s=0)
    shares = [slot.written().share for slot in table.pin_all()]
    assert shares[-1] == share_of(20), "the newest is there, and what is listed can be read"
    assert table.reserve(0, 64, writer=object(), timeout_s=0) is not None


@dataclass
class Modelled:
    """A slot as the model sees it."""

    state: SlotState = SlotState.EMPTY
    save: tuple[tuple[int, int], int] | None = None
    settled: bool = True
    readers: int = 0
    writer: object | None = None


class SlotMachine(RuleBasedStateMachine):
    """One rank's slots under any order of saves, restarts, publications, deaths and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(lambda: PLENTY)
        self.model: dict[int, Modelled] = {}
        self.slots: dict[int, Slot] = {}
        self.attempt, self.step = 1, 0

    def _free(self) -> bool:
        """Whether the model has a slot to give."""
        if len(self.model) < SLOTS_PER_RANK:
            return True
        return any(self._may_go(one) for one in self.model.values())

    def _may_go(self, one: Modelled) -> bool:
        if one.state is SlotState.READY:
            return one.save != self._newest() and one.settled and one.readers == 0
        return one.state is SlotState.EMPTY

    def _newest(self) -> tuple[tuple[int, int], int] | None:
        saves = [one.save for one in self.model.values() if one.state is SlotState.READY]
        return max((save for save in saves if save), default=None)

    def _numbers(self, state: SlotState) -> list[int]:
        return [number for number, one in self.model.items() if one.state is state]

    @rule(size_bytes=st.integers(1, 5000))
    def reserve(self, size_bytes: int) -> None:
        writer, may = object(), self._free()
        slot = self.table.reserve(0, size_bytes, writer=writer, timeout_s=0)
        assert (slot is not None) == may
        if slot is not None:
            assert self._may_go(self.model.get(slot.number, Modelled()))
            assert slot.size_bytes >= size_bytes
            self.slots[slot.number] = slot
            self.model[slot.number] = Modelled(SlotState.COPYING, writer=writer)

    @precondition(lambda self: self._numbers(SlotState.COPYING))
    @rule(data=st.data(), goes_back=st.booleans())
    def ready(self, data: st.DataObject, goes_back: bool) -> None:  # noqa: FBT001 hypothesis
        number = data.draw(st.sampled_from(self._numbers(SlotState.COPYING)))
        if goes_back:
            self.attempt, self.step = self.attempt + 1, max(0, self.step - 5)
        self.step += 1
        owner = (1, self.attempt)
        share = share_of(self.step, owner=owner, size_bytes=2)
        writer = self.model[number].writer
        assert self.table.ready(number, share, writer=object()) is None
        assert self.table.ready(number, share, writer=writer) is self.slots[number]
        self.model[number] = Modelled(SlotState.READY, (owner, self.step), settled=False)

    @precondition(lambda self: self._numbers(SlotState.COPYING))
    @rule(data=st.data())
    def writer_dies(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self._numbers(SlotState.COPYING)))
        self.table.abandon(self.model[number].writer)
        self.model[number] = Modelled()

    @precondition(lambda self: self._numbers(SlotState.READY))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self._numbers(SlotState.READY)))
        self.table.settle(self.slots[number])
        self.model[number].settled = True

    @precondition(lambda self: self._numbers(SlotState.READY))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self._numbers(SlotState.READY)))
        share = self.slots[number].share
        assert share is not None
        assert self.table.pin(share.save_id, 0) is self.slots[number]
        self.model[number].readers += 1

    @precondition(lambda self: any(one.readers for one in self.model.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        read = [number for number, one in self.model.items() if one.readers]
        number = data.draw(st.sampled_from(read))
        self.table.unpin(self.slots[number])
        self.model[number].readers -= 1

    @invariant()
    def table_is_as_the_model(self) -> None:
        for number, one in self.model.items():
            slot = self.slots[number]
            save = (slot.share.save_id.owner, slot.share.step) if slot.share else None
            assert (slot.state, save, slot.readers) == (one.state, one.save, one.readers)
            assert slot.settled == one.settled


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSlotMachine = SlotMachine.TestCase


V1 = "12:cpu,cpuacct:/pod\n11:memory:/pod/container\n1:name=systemd:/pod\n0::/elsewhere\n"


def belong(root: Path, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(groups)


def group_v2(root: Path, path: str, limit: str, used: int, cache: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def group_v1(root: Path, path: str, limit: int, used: int, cache: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {cache}\n")


def test_without_control_groups_nothing_is_limited(tmp_path):
    assert cgroup_left_bytes(tmp_path) == UNLIMITED
    belong(tmp_path, "0::/\n")
    assert cgroup_left_bytes(tmp_path) == UNLIMITED


@pytest.mark.parametrize(
    ("own", "groups", "left_bytes"),
    [
        ("/pod", {"pod": ("1000", 700, 200)}, 500),
        ("/pod", {"pod": ("1000", 1200, 0)}, 0),
        # The tightest of a group and those above it.
        ("/pod/in/step", {"pod": ("300", 0, 0), "pod/in": ("1000", 0, 0)}, 300),
        ("/pod/in/step", {"pod": ("1000", 0, 0), "pod/in": ("300", 0, 0)}, 300),
        ("/pod/in/step", {"pod": ("300", 0, 0), "pod/in": ("max", 0, 0)}, 300),
        # A container that sees its own group at the top.
        ("/", {"": ("1000", 400, 0)}, 600),
        ("/docker/as-the-host-sees-it", {"": ("1000", 400, 0)}, 600),
        ("/../..", {"": ("1000", 400, 0)}, 600),
    ],
)
def test_a_limit_of_version_2_leaves_what_is_not_used_and_the_page_cache(
    tmp_path, own, groups, left_bytes
):
    belong(tmp_path, f"0::{own}\n")
    for path, limits in groups.items():
        group_v2(tmp_path, path, *limits)
    assert cgroup_left_bytes(tmp_path) == left_bytes


def test_the_memory_controller_of_version_1_limits_too(tmp_path):
    belong(tmp_path, V1)
    group_v1(tmp_path, "", 9223372036854771712, 5000, 0)
    group_v1(tmp_path, "pod", 2000, 1800, 400)
    group_v1(tmp_path, "pod/container", 1000, 100, 0)
    assert cgroup_left_bytes(tmp_path) == 600
