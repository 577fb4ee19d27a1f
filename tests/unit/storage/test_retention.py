"""What to keep, and what stays because it is being read."""

from __future__ import annotations

import math

import pytest

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.collect import InUse, Rules, carry_out, decide, take_listing
from perdure.storage.errors import AccessDenied
from perdure.storage.retention import LEASE_S, Retention, apply_retention, read_steps, reading

STEPS = [5, 10, 15, 20, 25]
LOSSES = dict(zip(STEPS, [5.0, 1.0, 3.0, 2.0, 4.0], strict=True))


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(2), {20, 25}),
        (Retention(99), set(STEPS)),
        (Retention(keep_every_steps=10), {10, 20}),
        (Retention(keep_best=2, losses=LOSSES), {10, 20}),
        (Retention(keep_best=99, losses=dict.fromkeys(STEPS, 1.0)), set(STEPS)),
        (Retention(1, keep_every_steps=10), {10, 20, 25}),
        (Retention(), set()),
    ],
)
def test_a_step_is_kept_when_a_rule_wants_it(retention, kept):
    assert retention.keep(STEPS) == kept
    assert retention.keep([]) == set()


def test_among_equally_good_steps_the_newer_is_kept():
    assert Retention(keep_best=2, losses=dict.fromkeys(STEPS, 1.0)).keep(STEPS) == {20, 25}


def test_a_step_whose_loss_is_not_known_is_kept_beside_the_best():
    assert Retention(keep_best=1, losses={5: 2.0, 10: 1.0, 15: 3.0, 99: 0.0}).keep(STEPS) == {
        10,
        20,
        25,
    }
    assert Retention(keep_best=1, losses={}).keep(STEPS) == set(STEPS)


def test_a_loss_that_is_no_number_is_the_worst():
    losses = dict(zip(STEPS, [math.nan, math.inf, 3.0, 9.0, math.nan], strict=True))
    assert Retention(keep_best=1, losses=losses).keep(STEPS) == {15}
    assert Retention(keep_best=3, losses=losses).keep(STEPS) == {10, 15, 20}


@pytest.mark.parametrize("name", ["keep_last", "keep_every_steps", "keep_best"])
@pytest.mark.parametrize("value", [0, -1])
def test_intervals_and_numbers_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be above 0"):
        Retention(**{name: value})


def test_retention_deletes_the_rest_oldest_first_and_nothing_of_an_empty_run(checkpoints, commit):
    assert apply_retention(checkpoints, Retention(2), protect=()) == []
    commit(checkpoints, *STEPS)
    assert apply_retention(checkpoints, Retention(2), protect={10}) == [5, 15]
    assert checkpoints.steps() == [10, 20, 25]
    assert apply_retention(checkpoints, Retention(2), protect=()) == [10]


def test_the_newest_is_never_deleted(checkpoints, commit):
    commit(checkpoints, *STEPS)
    assert apply_retention(checkpoints, Retention(), protect=()) == STEPS[:-1]
    assert apply_retention(checkpoints, Retention(keep_every_steps=1000), protect=()) == []
    assert checkpoints.steps() == [25]
    assert checkpoints.verify(25) == []


def test_a_newer_damaged_step_does_not_count_as_the_newest(checkpoints, commit):
    commit(checkpoints, *STEPS)
    checkpoints.set_aside(25, "test")
    apply_retention(checkpoints, Retention(), protect=())
    assert checkpoints.steps() == [20]


@pytest.fixture
def four_steps(checkpoints, commit) -> CheckpointStore:
    commit(checkpoints, 10, 20, 30, 40)
    return checkpoints


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


def test_a_step_that_is_read_stays_until_it_is_read(four_steps):
    with reading(four_steps, 20), reading(four_steps, 20):
        assert retain(four_steps) == [10, 30]
        assert four_steps.verify(20) == []
    assert retain(four_steps) == [20]
    assert four_steps.steps() == [40]


def test_the_scheduled_retention_leaves_it_too(four_steps):
    with reading(four_steps, 10):
        assert collect(four_steps) == [20]
    assert collect(four_steps) == [10]


def test_a_reader_leaves_nothing_behind_though_it_fails(four_steps):
    def read() -> None:
        with reading(four_steps, 10):
            assert read_now(four_steps) == {10}
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        read()
    assert read_now(four_steps) == set()


def test_the_lease_of_a_killed_reader_ends(four_steps):
    four_steps.store.put(four_steps.key(10, "reading-0.json"), b"{}")
    assert collect(four_steps) == [20]
    assert collect(four_steps, later_s=LEASE_S + 1) == [10]


def test_a_reader_that_may_not_write_reads_all_the_same(four_steps, monkeypatch, caplog):
    def refuse(key: str, *_: object, **__: object) -> None:
        raise AccessDenied(f"{key}: read only")

    monkeypatch.setattr(four_steps.store, "put", refuse)
    with reading(four_steps, 10):
        assert four_steps.verify(10) == []
    assert "step 10 may be deleted while it is read" in caplog.text
