"""The ledger: one supervisor at a time, and nothing lost between two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.local import LocalStore
from perdure.training.errors import AlreadySupervised, RunConflict
from perdure.training.journal.ledger import LEASE_S, Identity, Ledger
from perdure.training.journal.records import (
    AnyRecord,
    AttemptRecord,
    NodeReleased,
    Record,
    RunCreated,
    RunEnded,
)
from tests.values import not_none
from tests.waiting import BEYOND_A_TEST_S, PATIENCE_S

ELSEWHERE = Identity(
    supervisor="other", host="another-host", boot_id="another-boot", pid=4711, process_started_s=0.0
)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(store):
    """The time, at which a supervisor elsewhere has taken the run."""
    clock = Clock()
    Ledger(store, "run", clock=clock).take(ELSEWHERE)
    return clock


def test_what_one_supervisor_appends_the_next_one_reads(store):
    first = Ledger(store, "run")
    first.take(Identity.of_this_process())
    first.append(RunCreated, job={"run_id": "run"})
    first.release()
    history = Ledger(store, "run").take(Identity.of_this_process())
    assert history.job == {"run_id": "run"}
    assert history.epoch == 2


def test_a_second_supervisor_is_refused_while_the_first_lives_on_another_host(store, clock):
    clock.now_s += LEASE_S / 2
    with pytest.raises(RunConflict, match="another-host"):
        Ledger(store, "run", clock=clock).take(Identity.of_this_process())


def test_a_supervisor_whose_lease_ran_out_is_succeeded(store, clock):
    clock.now_s += LEASE_S + 1
    assert Ledger(store, "run", clock=clock).take(Identity.of_this_process()).epoch == 2


def test_a_lease_lasts_as_long_as_its_holder_says(store):
    clock = Clock()
    holder = Ledger(store, "run", clock=clock, lease_s=10.0)
    holder.take(ELSEWHERE)
    assert holder.renew_s == 2.0
    clock.now_s += 9.0
    with pytest.raises(RunConflict, match="another-host"):
        Ledger(store, "run", clock=clock).take(Identity.of_this_process())
    clock.now_s += 2.0
    assert Ledger(store, "run", clock=clock).take(Identity.of_this_process()).epoch == 2


@pytest.mark.parametrize(("namespace", "is_here"), [("", True), ("another", False)])
def test_the_pid_of_another_container_of_this_host_says_nothing(store, namespace, is_here):
    clock, own = Clock(), Identity.of_this_process()
    dead = {"supervisor": "other", "pid": 2**22 + 1, "pid_namespace": namespace}
    Ledger(store, "run", clock=clock).take(own.model_copy(update=dead))
    clock.now_s += LEASE_S / 2
    assert Ledger(store, "run", clock=clock).is_supervised() is not is_here


def test_a_dead_supervisor_of_this_host_is_succeeded_at_once(store):
    identity = Identity.of_this_process()
    Ledger(store, "run").take(identity.model_copy(update={"pid": 2**22 + 1}))
    assert Ledger(store, "run").take(identity).epoch == 2


def test_a_superseded_supervisor_cannot_append_and_learns_by_whom(store):
    clock = Clock()
    old = Ledger(store, "run", clock=clock)
    old.take(ELSEWHERE)
    clock.now_s += LEASE_S + 1
    Ledger(store, "run", clock=clock).take(Identity.of_this_process())
    with pytest.raises(RunConflict, match="now supervised by process"):
        old.append(RunEnded, outcome="failed", message="too late")
    with pytest.raises(RunConflict):
        old.renew()


def test_a_run_taken_a_moment_ago_is_not_taken_again_before_its_lease_is_there(store, clock):
    store.delete("runs/run/supervisor.json")
    with pytest.raises(RunConflict, match="a moment ago"):
        Ledger(store, "run", clock=clock).take(Identity.of_this_process())
    clock.now_s += LEASE_S
    assert Ledger(store, "run", clock=clock).take(Identity.of_this_process()).epoch == 2


class LeaseBetween(LocalStore):
    """Shows the holder's lease only from the second look on, as one that is just being put."""

    looks = 0

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        if key.endswith("supervisor.json"):
            self.looks += 1
            if self.looks == 1:
                raise NotFound(key)
        return super().get(key, start=start, length=length)


def test_a_lease_that_comes_between_two_looks_is_not_overlooked(tmp_path, clock):
    with pytest.raises(RunConflict):
        Ledger(LeaseBetween(tmp_path), "run", clock=clock).take(Identity.of_this_process())


def test_of_many_that_take_a_run_at_once_exactly_one_wins(store):
    barrier = threading.Barrier(8)
    won: list[int] = []

    def take(index: int) -> None:
        ledger = Ledger(store, "run", clock=lambda: 1000.0)
        barrier.wait()
        try:
            # Each on a host of its own: a lease then shows by its time that its holder lives.
            host = {"supervisor": str(index), "host": f"host-{index}"}
            ledger.take(ELSEWHERE.model_copy(update=host))
        except RunConflict:
            return
        won.append(index)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


class SilentFor(LocalStore):
    """A store that does not answer one thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.thread: threading.Thread | None = None
        self.is_asked = threading.Event()
        self.answers = threading.Event()

    def list(self, prefix):
        if threading.current_thread() is self.thread:
            self.is_asked.set()
            assert self.answers.wait(BEYOND_A_TEST_S)
        return super().list(prefix)


def test_a_renewal_that_waits_for_the_store_holds_up_no_other_thread(tmp_path):
    store = SilentFor(tmp_path)
    ledger = Ledger(store, "run")
    ledger.take(Identity.of_this_process())
    store.thread = threading.Thread(target=ledger.renew, daemon=True)
    store.thread.start()
    assert store.is_asked.wait(BEYOND_A_TEST_S)
    appended = threading.Thread(target=lambda: ledger.append(RunCreated, job={}), daemon=True)
    appended.start()
    appended.join(PATIENCE_S)
    assert not appended.is_alive()
    store.answers.set()
    store.thread.join()
    # Both threads have read the record; it is kept once.
    assert Ledger(store, "run").read() == ledger.read()
    ledger.append(RunEnded, outcome="completed", message="", target_step=1, command=None)
    assert not_none(Ledger(store, "run").read().ended).outcome == "completed"


def test_a_supervisor_whose_renewal_has_read_of_a_successor_appends_nothing(store, clock):
    first = Ledger(store, "run", clock=clock)
    clock.now_s += LEASE_S + 1
    first.take(Identity.of_this_process())
    clock.now_s += LEASE_S + 1
    Ledger(store, "run", clock=clock).take(ELSEWHERE)
    with pytest.raises(AlreadySupervised):
        first.renew()
    before = Ledger(store, "run").read()
    with pytest.raises(AlreadySupervised):
        first.append(RunCreated, job={})
    assert Ledger(store, "run").read() == before


def test_a_missing_record_is_corruption_not_a_shorter_history(store):
    ledger = Ledger(store, "run")
    ledger.take(Identity.of_this_process())
    ledger.append(RunCreated, job={})
    store.delete("runs/run/ledger/00000000.json")
    with pytest.raises(Corrupt, match="record 0 is missing"):
        Ledger(store, "run").read()


def test_a_record_of_an_unknown_kind_is_refused(store):
    store.put("runs/run/ledger/00000000.json", b'{"kind": "mystery", "at_s": 1, "epoch": 1}')
    with pytest.raises(Corrupt):
        Ledger(store, "run").read()


def test_every_record_is_in_the_union_that_a_ledger_reads():
    kinds = {kind for base in (Record, AttemptRecord) for kind in base.__subclasses__()}
    members = set(get_args(get_args(AnyRecord)[0]))
    missing = "training/journal/records.py: AnyRecord needs every record"
    assert kinds - {AttemptRecord} == members, missing


def test_a_users_note_needs_no_lease_and_costs_the_supervisor_none_of_its_records(store):
    supervisor, user = Ledger(store, "run"), Ledger(store, "run")
    supervisor.take(Identity.of_this_process())
    supervisor.append(RunCreated, job={"run_id": "run"})
    user.read()
    supervisor.append(RunEnded, outcome="failed", message="x")
    user.note(NodeReleased, node="node-1")
    supervisor.append(RunEnded, outcome="completed", message="y")
    history = Ledger(store, "run").read()
    assert history.ended_well
    assert list(history.released) == ["node-1"]
    assert history.epoch == 1


class BetweenReadAndPut(LocalStore):
    """Something else gets into the ledger right before a supervisor's first record does."""

    act: Callable[[], object] | None = None

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()
        super().put(key, data, if_absent=if_absent)


def test_a_users_note_at_the_moment_of_a_takeover_is_no_other_supervisor(tmp_path):
    store = BetweenReadAndPut(tmp_path)
    user = Ledger(LocalStore(tmp_path), "run")
    store.act = lambda: user.note(NodeReleased, node="node-1")
    ledger = Ledger(store, "run")
    history = ledger.take(Identity.of_this_process())
    assert list(history.released) == ["node-1"], "the note was not between"
    assert (history.epoch, ledger.epoch) == (2, 2)
    ledger.append(RunCreated, job={"run_id": "run"})


def test_another_supervisor_at_the_moment_of_a_takeover_wins(tmp_path):
    store = BetweenReadAndPut(tmp_path)
    other = Ledger(LocalStore(tmp_path), "run")
    store.act = lambda: other.take(ELSEWHERE.model_copy(update={"flow_run": "first"}))
    with pytest.raises(AlreadySupervised, match="at the same moment") as refused:
        Ledger(store, "run").take(Identity.of_this_process())
    assert refused.value.flow_run == "first"


def test_who_is_refused_learns_which_flow_run_supervises(store):
    clock = Clock()
    Ledger(store, "run", clock=clock).take(ELSEWHERE.model_copy(update={"flow_run": "first"}))
    with pytest.raises(AlreadySupervised) as refused:
        Ledger(store, "run", clock=clock).take(Identity.of_this_process(flow_run="second"))
    assert refused.value.flow_run == "first"
    superseded = Ledger(store, "run", clock=clock)
    clock.now_s += LEASE_S + 1
    superseded.take(ELSEWHERE)
    clock.now_s += LEASE_S + 1
    history = Ledger(store, "run", clock=clock).take(Identity.of_this_process(flow_run="second"))
    assert history.supervisor is not None
    assert history.supervisor.flow_run == "second"
    with pytest.raises(AlreadySupervised) as refused:
        superseded.renew()
    assert refused.value.flow_run == "second"
