"""Publishing once by claims: writers interleaved request by request, killed, stalled, unanswered.

The store is in memory and its requests happen one by one in an order that the test chooses; the
time is the server's and passes only when the test moves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import pytest
from greenlet import GreenletExit, getcurrent, greenlet
from hypothesis import event, given, settings
from hypothesis import strategies as st

from perdure.storage.bakery_lock import (
    CLOCK_GRAIN_S,
    LAST_POLL_S,
    TICKET,
    BakeryLock,
    LockEntries,
    Target,
    publish_once,
)
from perdure.storage.errors import (
    PermanentError,
    ServerError,
    StorageError,
    Throttled,
    TimedOut,
    TransientError,
)
from perdure.storage.retry import Retry

LIFETIME_S = 20.0
REQUEST_S = LIFETIME_S / 2  # no put takes longer, from the listing that allowed it


class Writer:
    """One caller of `publish_once` that stops before each of its requests."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.data = f"by {number}"
        self.pending = "start"
        self.lands_by_s = math.inf  # a put that is sent next takes effect by then, or never
        self.asleep_until_s = 0.0
        self.outcome: bool | StorageError | None = None
        self.failures: list[type[StorageError]] = []  # of the next tries to publish
        self.is_killed = False
        self.sees_clock_ahead_s = 0.0  # of the times of the claims
        self.scheduler = getcurrent()
        self.identities = Random(self.data)  # noqa: S311 not a secret
        self.thread = greenlet(self._run)
        world.writers.append(self)
        self.retry = Retry(clock=lambda: world.now_s, sleep=self._sleep, rng=Random(self.data))  # noqa: S311 jitter

    @property
    def is_alive(self) -> bool:
        return self.outcome is None and not self.is_killed

    def step(self) -> None:
        """Let the pending request happen, and go on to the next."""
        self.world.pass_time(max(0.0, self.asleep_until_s - self.world.now_s))
        self.thread.switch()

    def run_to(self, what: str) -> None:
        """Go on until the next request is `what`, at least by one."""
        self.step()
        while self.is_alive and self.pending != what:
            self.step()

    def end(self) -> None:
        self.is_killed = True
        if self.thread:
            self.thread.throw(GreenletExit)

    def _run(self) -> None:
        room = BakeryLock(write=self._write, read=self._read, remove=self._remove)
        target = Target(exists=self._exists, is_ours=self._is_ours, publish=self._publish)
        try:
            self.outcome = publish_once(
                target,
                room,
                lifetime_s=LIFETIME_S,
                retry=self.retry,
                new_identity=lambda: f"{self.identities.getrandbits(64):016x}",
            )
        except StorageError as exc:
            self.outcome = exc

    def _stop(self, what: str) -> None:
        if self.is_killed:  # the dead send nothing, not even to tidy up
            raise GreenletExit
        self.pending = what
        self.scheduler.switch()

    def _sleep(self, pause_s: float) -> None:
        self.asleep_until_s = self.world.now_s + pause_s
        self._stop("sleep")

    def _write(self, name: str) -> None:
        self._stop("write")
        assert name not in self.world.claims
        self.world.claims[name] = self.world.now_s

    def _remove(self, name: str) -> None:
        self._stop("remove")
        self.world.claims.pop(name, None)

    def _read(self) -> LockEntries:
        """In two pieces, as stores read whose index has shards."""
        self._stop("read")
        now_s = float(math.floor(self.world.now_s))
        is_first = self.world.is_in_first_piece
        first = {name: at_s for name, at_s in self.world.claims.items() if is_first(name)}
        self._stop("read on")
        rest = {name: at_s for name, at_s in self.world.claims.items() if not is_first(name)}
        self.lands_by_s = self.world.now_s + REQUEST_S
        return LockEntries(now_s + self.sees_clock_ahead_s, {**first, **rest})

    def _exists(self) -> bool:
        self._stop("exists")
        return self.world.object is not None

    def _is_ours(self) -> bool:
        self._stop("get")
        return self.world.object == self.data

    def _publish(self) -> None:
        self._stop("publish")
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and issubclass(failure, TransientError):
            self.world.on_their_way.append((self.lands_by_s, self.data))
        if failure is not None:
            raise failure("no")
        self.world.publish(self.data)


@dataclass
class World:
    """What the server holds, and its clock."""

    now_s: float = 1000.25
    object: str | None = None
    claims: dict[str, float] = field(default_factory=dict)
    on_their_way: list[tuple[float, str]] = field(default_factory=list)  # (lands before, data)
    published: list[str] = field(default_factory=list)
    writers: list[Writer] = field(default_factory=list)
    is_in_first_piece: Callable[[str], bool] = lambda name: crc32(name.encode()) % 2 == 1

    def publish(self, data: str) -> None:
        if data not in self.published:
            self.published.append(data)
        self.object = data

    def pass_time(self, seconds: float) -> None:
        """As much of it as the writers that are about to publish allow; what is late is lost."""
        limits_s = [
            writer.lands_by_s
            for writer in self.writers
            if writer.pending == "publish" and writer.is_alive
        ]
        self.now_s = max(self.now_s, min([self.now_s + seconds, *limits_s]))
        self.on_their_way = [sent for sent in self.on_their_way if sent[0] >= self.now_s]


def finish(world: World, writers: list[Writer]) -> None:
    """Run what is left, in turns."""
    for _ in range(5000):
        living = [writer for writer in writers if writer.is_alive]
        if not living:
            return
        for writer in living:
            writer.step()
    raise AssertionError(f"writers wait for ever: {[writer.pending for writer in writers]}")


def check_one_winner(world: World, writers: list[Writer]) -> None:
    winners = [writer for writer in writers if writer.outcome is True]
    assert len(world.published) <= 1, "one object replaced another"
    assert len(winners) <= 1
    assert all(world.published == [writer.data] for writer in winners)
    if any(writer.outcome is False for writer in writers):
        assert world.object is not None, "a writer gave way to no other"


def identity(writer: Writer) -> int:
    """What decides between equal numbers."""
    return Random(writer.data).getrandbits(64)  # noqa: S311 not a secret


def meet(num_writers: int) -> tuple[World, list[Writer]]:
    world = World()
    return world, [Writer(world, number) for number in range(num_writers)]


def test_a_lone_writer_publishes_and_leaves_no_claim():
    world, (writer,) = meet(1)
    finish(world, [writer])
    assert writer.outcome is True
    assert world.object == "by 0"
    assert world.claims == {}


def test_what_is_there_is_seen_at_once():
    world, (writer,) = meet(1)
    world.object = "old"
    finish(world, [writer])
    assert writer.outcome is False
    assert world.object == "old"


def test_two_writers_have_one_winner_however_they_take_turns():
    """All interleavings with up to four changes of turn."""
    num_races = 0
    for changes in itertools.combinations(range(0, 36, 2), 4):
        world, writers = meet(2)
        for at in range(36):
            writer = writers[sum(change <= at for change in changes) % 2]
            if writer.is_alive:
                writer.step()
        finish(world, writers)
        check_one_winner(world, writers)
        assert sorted(writer.outcome is True for writer in writers) == [False, True]
        assert world.claims == {}
        num_races += 1
    assert num_races == 3060


def test_a_listing_read_in_pieces_hides_no_writer():
    """A ticket made after its piece was read, by a writer whose marker is gone in the other."""
    world, writers = meet(2)
    world.is_in_first_piece = lambda name: name.startswith(TICKET)
    early, late = sorted(writers, key=identity)
    for request in ("write", "read", "read on", "write"):
        early.run_to(request)  # it has read that there are no tickets, and holds none yet
    for request in ("write", "write", "remove", "read", "read on"):
        late.run_to(request)  # it awaits the other's choice, and is in the middle of a listing
    early.run_to("remove")
    early.run_to("read")
    late.run_to("exists" if late.pending != "exists" else "read")
    late.run_to("read")
    finish(world, [early])
    finish(world, [late])
    assert early.outcome is True
    assert late.outcome is False
    assert world.published == [early.data]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 3), st.integers(1, 14)),
        st.tuples(st.just("time"), st.integers(0, 3), st.sampled_from([1, 5, 9, 12, 22])),
        st.tuples(st.just("kill"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("land"), st.integers(0, 3), st.just(0)),
    ),
    max_size=60,
)
FAILURES = st.lists(st.sampled_from([TimedOut, ServerError, Throttled, PermanentError]), max_size=2)


@given(actions=ACTIONS, failures=st.lists(FAILURES, min_size=4, max_size=4))
@settings(max_examples=400)
def test_no_fault_makes_two_winners_or_blocks_the_others(actions, failures):
    world, writers = meet(4)
    for writer, theirs in zip(writers, failures, strict=True):
        writer.failures = list(theirs)
    try:
        for action, number, amount in actions:
            act(world, writers, action, number, amount)
        land_all(world)
        finish(world, writers)
        check_one_winner(world, writers)
        event(f"{sum(writer.is_killed for writer in writers)} killed")
        event(f"{len(world.published)} published")
    finally:
        for writer in writers:
            writer.end()


def act(world: World, writers: list[Writer], action: str, number: int, amount: int) -> None:
    writer = writers[number]
    if action == "time":
        world.pass_time(amount)
    elif action == "land":
        land_all(world)
    elif action == "kill" and writer.is_alive:
        if writer.pending == "publish":
            world.on_their_way.append((writer.lands_by_s, writer.data))
        writer.end()
    elif action == "run":
        for _ in range(amount):
            if writer.is_alive:
                writer.step()


def land_all(world: World) -> None:
    while world.on_their_way:
        world.publish(world.on_their_way.pop()[1])


@pytest.mark.parametrize("num_steps", range(1, 14))
def test_a_writer_killed_anywhere_blocks_for_a_lifetime_at_most(num_steps):
    world, (dead, other) = meet(2)
    for _ in range(num_steps):
        dead.step()
    began_s = world.now_s
    dead.end()
    finish(world, [other])
    assert other.outcome is (world.published == [other.data])
    assert world.now_s - began_s < LIFETIME_S + 2 * (CLOCK_GRAIN_S + LAST_POLL_S)
    assert world.claims == {}, "the claims of the dead are removed"


def test_a_writer_that_stalled_takes_a_new_number():
    world, (writer,) = meet(1)
    while not any(name.startswith(TICKET) for name in world.claims):
        writer.step()
    (before,) = [name for name in world.claims if name.startswith(TICKET)]
    world.now_s += 100 * LIFETIME_S
    finish(world, [writer])
    assert writer.outcome is True
    assert before not in world.claims


def test_a_writer_whose_turn_came_late_does_not_publish():
    world, (slow, other) = meet(2)
    slow.run_to("remove")
    slow.run_to("read")
    slow.run_to("exists")
    slow.run_to("read")
    world.pass_time(0.75 * LIFETIME_S)
    slow.run_to("read on")
    slow.step()  # it is first, but others may soon take it for dead
    world.pass_time(0.4 * LIFETIME_S)
    finish(world, [other])
    finish(world, [slow])
    assert (slow.outcome, other.outcome) == (False, True)
    assert world.published == [other.data]


def test_a_writer_taken_for_dead_while_it_chose_gets_a_new_number():
    world, writers = meet(2)
    slow, other = sorted(writers, key=identity)  # with equal numbers, the slow one is first
    for request in ("write", "read", "write"):
        slow.run_to(request)
    world.pass_time(1.2 * LIFETIME_S)
    other.run_to("publish")
    for _ in range(10):
        slow.step()
    finish(world, [other])
    finish(world, [slow])
    assert (slow.outcome, other.outcome) == (False, True)
    assert world.published == [other.data]


def test_a_put_without_an_answer_keeps_its_claim_until_it_cannot_land():
    world, (first, second) = meet(2)
    first.failures = [TimedOut] * Retry().max_tries
    finish(world, [first])
    assert isinstance(first.outcome, TimedOut)
    assert world.claims, "no writer may publish while the put may still land"
    began_s = world.now_s
    finish(world, [second])
    assert second.outcome is True
    assert world.now_s - began_s > LIFETIME_S / 2


def test_a_put_that_landed_without_an_answer_is_a_success():
    world, (writer,) = meet(1)
    writer.failures = [TimedOut]
    while not world.on_their_way:
        writer.step()
    land_all(world)
    finish(world, [writer])
    assert writer.outcome is True
    assert world.claims == {}


def test_claims_that_are_old_when_they_are_made_are_an_error_not_a_loop():
    world, (writer,) = meet(1)
    writer.sees_clock_ahead_s = LIFETIME_S
    writer.retry = Retry(max_tries=1, sleep=writer._sleep)
    finish(world, [writer])
    assert isinstance(writer.outcome, TimedOut)
    assert world.claims == {}
