"""Who reads a step keeps it from being given up."""

from __future__ import annotations

import pytest

from storage.checkpoint import CheckpointStore
from storage.collect import InUse, Rules, carry_out, decide, take_listing
from storage.errors import AccessDenied
from storage.leases import LEASE_S, read_steps, reading
from storage.retention import Retention, apply_retention


@pytest.fixture(autouse=True)
def _four_steps(checkpoints, commit) -> None:
    for step in (10, 20, 30, 40):
        commit(checkpoints, step)


def read_now(checkpoints: CheckpointStore) -> frozenset[int]:
    """Steps that a listing shows a reader of."""
    return read_steps(checkpoints, checkpoints.list_steps())


def retain(checkpoints: CheckpointStore) -> list[int]:
    """As a checkpoint server does after a commit."""
    return apply_retention(checkpoints, Retention(1), protect=())


def collect(checkpoints: CheckpointStore, *, later_s: float = 0.0) -> list[int | None]:
    """As the scheduled retention does."""
    rules = Rules(retention=Retention(1))
    now_s = checkpoints.store.now_s() + later_s
    found = decide(take_listing(checkpoints), rules=rules, in_use=InUse(), now_s=now_s)
    return [removal.step for removal in carry_out(checkpoints, found)]


def test_a_step_that_is_read_stays_until_it_is_read(checkpoints):
    with reading(checkpoints, 20), reading(checkpoints, 20):
        assert retain(checkpoints) == [10, 30]
        assert checkpoints.verify(20) == []
    assert retain(checkpoints) == [20]
    assert checkpoints.steps() == [40]


def test_the_scheduled_retention_leaves_it_too(checkpoints):
    with reading(checkpoints, 10):
        assert collect(checkpoints) == [20]
    assert collect(checkpoints) == [10]


def test_a_reader_leaves_nothing_behind_though_it_fails(checkpoints):
    def read() -> None:
        with reading(checkpoints, 10):
            assert read_now(checkpoints) == {10}
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        read()
    assert read_now(checkpoints) == set()


def test_the_lease_of_a_killed_reader_ends(checkpoints):
    checkpoints.store.put(checkpoints.key(10, "reading-0.json"), b"{}")
    assert collect(checkpoints) == [20]
    assert collect(checkpoints, later_s=LEASE_S + 1) == [10]


def test_a_reader_that_may_not_write_reads_all_the_same(checkpoints, monkeypatch, caplog):
    def refuse(key: str, *_: object, **__: object) -> None:
        raise AccessDenied(f"{key}: read only")

    monkeypatch.setattr(checkpoints.store, "put", refuse)
    with reading(checkpoints, 10):
        assert checkpoints.verify(10) == []
    assert "step 10 may be deleted while it is read" in caplog.text
