"""What may be deleted, and what must not be whatever the listing looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    SET_ASIDE_NAME,
    CheckpointStore,
    StepObjects,
    StepState,
    shard_name,
)
from perdure.storage.collect import (
    MIN_KEPT_STEPS,
    InUse,
    Listing,
    Removal,
    RemovalKind,
    Rules,
    abort_uploads,
    carry_out,
    decide,
    take_listing,
    totals,
)
from perdure.storage.local import LocalStore
from perdure.storage.objects import ObjectInfo
from perdure.storage.retention import Retention
from tests.unit.storage.conftest import Committer

NOW_S = 100_000.0
HOUR_S = 3600.0
OLD_S, YOUNG_S = 30 * HOUR_S, 0.5 * HOUR_S  # ages
DAY = Rules(garbage_after_s=24 * HOUR_S)
DEAD, ALIVE = InUse(is_living=False), InUse(is_living=True)
PROBE = "probe-0123456789abcdef0123456789abcdef"


def info(step: int, name: str, age_s: float) -> ObjectInfo:
    key = f"runs/run-1/checkpoints/step-{step:08d}/{name}"
    return ObjectInfo(key, 100, "etag", NOW_S - age_s)


def folder(step: int, *names: str, age_s: float = OLD_S) -> StepObjects:
    return StepObjects(step, {name: info(step, name, age_s) for name in names})


def committed(step: int, *more: str, age_s: float = OLD_S) -> StepObjects:
    return folder(step, MANIFEST_NAME, shard_name(1, 1, 0), *more, age_s=age_s)


def broken(step: int, *, age_s: float = OLD_S) -> StepObjects:
    return folder(step, shard_name(1, 1, 0), age_s=age_s)


def listing(*steps: StepObjects, probes: tuple[ObjectInfo, ...] = ()) -> Listing:
    named = {
        s.step: frozenset({shard_name(1, 1, 0)}) for s in steps if s.state is StepState.COMMITTED
    }
    return Listing(steps, named, probes)


def removed(found: Listing, *, rules: Rules = DAY, in_use: InUse = DEAD) -> list[tuple]:
    removals = decide(found, rules=rules, in_use=in_use, now_s=NOW_S)
    return [(removal.kind, removal.step) for removal in removals]


def only_removal(found: Listing, *, in_use: InUse = DEAD) -> tuple[Removal, list[str]]:
    """The removal, and the names of its objects."""
    (removal,) = decide(found, rules=DAY, in_use=in_use, now_s=NOW_S)
    return removal, [one.key.rpartition("/")[2] for one in removal.objects]


def test_a_save_that_broke_long_ago_is_garbage():
    found = removed(listing(broken(5), committed(10), broken(15)))
    assert found == [(RemovalKind.BROKEN_SAVE, 5), (RemovalKind.BROKEN_SAVE, 15)]


def test_a_step_that_was_touched_a_moment_ago_is_being_written():
    mixed = folder(5, shard_name(1, 1, 0))
    young = info(5, shard_name(1, 1, 1), YOUNG_S)
    touched = StepObjects(5, {**mixed.objects, shard_name(1, 1, 1): young})
    assert removed(listing(touched, committed(10), broken(15, age_s=YOUNG_S))) == []


def test_the_save_of_a_living_attempt_is_left_alone_however_long_it_takes():
    assert removed(listing(committed(10), broken(15)), in_use=ALIVE) == []
    assert removed(listing(broken(0)), in_use=ALIVE) == []


def test_the_shards_of_a_broken_save_go_after_the_records_that_vouch_for_them():
    records = [f"p0001-a0001-rank{rank:05d}.json" for rank in (0, 1)]
    shards = [shard_name(1, 1, rank) for rank in (0, 1)]
    save = folder(5, shards[0], records[0], shards[1], records[1])
    assert only_removal(listing(save))[1] == [*records, *shards]


def test_a_save_is_garbage_once_a_later_step_is_committed_and_it_is_old():
    found = removed(listing(broken(5), committed(10)), in_use=ALIVE)
    assert found == [(RemovalKind.BROKEN_SAVE, 5)]
    assert removed(listing(broken(5, age_s=YOUNG_S), committed(10)), in_use=ALIVE) == []


def test_a_damaged_step_that_was_set_aside_does_not_count_as_committed_and_stays():
    aside = folder(20, MANIFEST_NAME, SET_ASIDE_NAME, shard_name(1, 1, 0), shard_name(0, 1, 0))
    assert removed(listing(committed(10), broken(15), aside), in_use=ALIVE) == []


@pytest.mark.parametrize(
    ("stray", "in_use"), [(shard_name(1, 0, 7), DEAD), ("p0001-a0001-rank00000.json", ALIVE)]
)
def test_shards_and_records_that_the_manifest_does_not_name_are_garbage_in_a_committed_step(
    stray, in_use
):
    removal, names = only_removal(listing(committed(10, stray, "verified.json")), in_use=in_use)
    assert (removal.kind, removal.step, names) == (RemovalKind.STRAY_SHARD, 10, [stray])
    assert removed(listing(committed(10, stray, age_s=YOUNG_S))) == []


def test_a_step_whose_manifest_cannot_be_read_keeps_all_its_shards():
    unreadable = Listing((committed(10, shard_name(1, 0, 7)),), {})
    assert removed(unreadable) == []


def test_probes_of_checks_that_were_killed_are_garbage():
    old, young = (ObjectInfo(f"runs/run-1/{PROBE}", 9, "e", NOW_S - a) for a in (OLD_S, YOUNG_S))
    removal, _ = only_removal(listing(probes=(old, young)))
    assert (removal.kind, removal.objects) == (RemovalKind.PROBE, (old,))


def test_retention_gives_up_what_the_policy_does_not_keep():
    found = listing(*(committed(step, age_s=0) for step in (5, 10, 15, 20, 25)))
    rules = Rules(retention=Retention(3, keep_best=1, losses={5: 1.0, 10: 0.5}))
    assert removed(found, rules=rules) == [(RemovalKind.RETENTION, 5)]


def test_a_step_that_is_being_restored_is_kept():
    found = listing(*(committed(step) for step in (5, 10, 15, 20, 25)))
    rules = Rules(retention=Retention(1))
    using = InUse(is_living=True, reading=frozenset({10}))
    assert removed(found, rules=rules, in_use=using) == [
        (RemovalKind.RETENTION, 5),
        (RemovalKind.RETENTION, 15),
    ]


def test_while_an_attempt_looks_for_a_whole_step_none_is_given_up():
    found = listing(*(committed(step) for step in (5, 10, 15, 20, 25)), broken(7))
    rules = Rules(garbage_after_s=24 * HOUR_S, retention=Retention(1))
    using = InUse(is_living=True, is_restoring=True)
    assert removed(found, rules=rules, in_use=using) == [(RemovalKind.BROKEN_SAVE, 7)]


@pytest.mark.parametrize("age_s", [-1.0, float("nan")])
def test_an_age_is_not_negative(age_s):
    with pytest.raises(ValueError, match="garbage_after_s"):
        Rules(garbage_after_s=age_s)


NAMES = st.one_of(
    st.sampled_from([MANIFEST_NAME, SET_ASIDE_NAME, "verified.json", "anything"]),
    st.builds(shard_name, st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)),
)
FOLDERS = st.dictionaries(NAMES, st.floats(0, 2 * OLD_S), min_size=1, max_size=5)


@st.composite
def listings(draw: st.DrawFn) -> Listing:
    """Any folders of any age; a manifest names some of the shards, or cannot be read."""
    steps, named = [], {}
    for step in sorted(draw(st.sets(st.integers(0, 30), max_size=8))):
        ages = draw(FOLDERS)
        steps.append(StepObjects(step, {n: info(step, n, age) for n, age in ages.items()}))
        if MANIFEST_NAME in ages and draw(st.booleans()):
            named[step] = frozenset(n for n in ages if draw(st.booleans()))
    return Listing(tuple(steps), named)


USES = st.builds(
    InUse,
    is_living=st.booleans(),
    reading=st.frozensets(st.integers(0, 30), max_size=2),
    is_restoring=st.booleans(),
)
RULES = st.builds(
    Rules,
    garbage_after_s=st.floats(0, 2 * OLD_S),
    retention=st.none()
    | st.builds(
        Retention,
        st.none() | st.integers(1, 4),
        st.none() | st.integers(1, 9),
        st.none() | st.integers(1, 3),
        st.dictionaries(st.integers(0, 30), st.floats(0, 1)),
    ),
)


@given(found=listings(), rules=RULES, in_use=USES)
def test_whatever_lies_there_what_is_needed_stays(found, rules, in_use):
    removals = decide(found, rules=rules, in_use=in_use, now_s=NOW_S)
    gone = {one.key for removal in removals for one in removal.objects}
    newest = set(found.committed[-MIN_KEPT_STEPS:])
    policy = rules.retention.keep(found.committed) if rules.retention else set(found.committed)
    for step in found.steps:
        keys = {one.key for one in step.objects.values()}
        needed = step.step in newest | in_use.reading | policy or in_use.is_restoring
        if step.state is StepState.SET_ASIDE:
            assert not keys & gone
        elif step.state is StepState.COMMITTED and needed:
            named = found.named.get(step.step, frozenset(step.objects))
            assert not {step.objects[n].key for n in named if n in step.objects} & gone
            assert step.objects[MANIFEST_NAME].key not in gone
        elif step.state is StepState.UNCOMMITTED and keys & gone:
            assert keys <= gone
            assert not in_use.is_living or step.step < max(newest)
            assert step.modified_s <= NOW_S - rules.garbage_after_s


@given(found=listings(), rules=RULES, in_use=USES)
def test_each_object_is_removed_once_for_a_reason_and_then_nothing_is_left_to_remove(
    found, rules, in_use
):
    removals = decide(found, rules=rules, in_use=in_use, now_s=NOW_S)
    gone = [one.key for removal in removals for one in removal.objects]
    assert len(gone) == len(set(gone))
    assert all(removal.reason and removal.objects for removal in removals)
    left = [
        StepObjects(s.step, {n: one for n, one in s.objects.items() if one.key not in gone})
        for s in found.steps
    ]
    rest = Listing(tuple(s for s in left if s.objects), found.named)
    again = decide(rest, rules=Rules(rules.garbage_after_s), in_use=in_use, now_s=NOW_S)
    assert again == []


def test_a_listing_and_its_removal_in_every_kind_of_store(store, commit):
    checkpoints = CheckpointStore(store, "run-1")
    commit(checkpoints, 5, 10, 15, 20)
    checkpoints.put_shard(20, shard_name(0, 7, 9), b"stray")
    checkpoints.put_shard(12, shard_name(0, 0, 0), b"broken")
    store.put(f"runs/run-1/{PROBE}", b"probe")
    store.put("runs/run-10/checkpoints/step-00000012/x", b"another run")
    rules = Rules(garbage_after_s=0, retention=Retention(2))
    removals = decide(take_listing(checkpoints), rules=rules, in_use=DEAD, now_s=9e9)
    gone = carry_out(checkpoints, removals)
    assert [(one.kind, one.step) for one in gone] == [
        (RemovalKind.RETENTION, 5),
        (RemovalKind.RETENTION, 10),
        (RemovalKind.BROKEN_SAVE, 12),
        (RemovalKind.STRAY_SHARD, 20),
        (RemovalKind.PROBE, None),
    ]
    assert checkpoints.states() == {15: StepState.COMMITTED, 20: StepState.COMMITTED}
    assert checkpoints.verify(20) == []
    assert [one.key for one in store.list("runs/run-1/") if "checkpoints" not in one.key] == []
    assert store.get("runs/run-10/checkpoints/step-00000012/x") == b"another run"
    assert carry_out(checkpoints, removals[2:]) == []


@pytest.fixture
def decided(checkpoints: CheckpointStore, commit: Committer) -> list[Removal]:
    """A broken save of step 5 is to go."""
    checkpoints.put_shard(5, shard_name(0, 0, 0), b"\0\5" * 500)
    commit(checkpoints, 10)
    rules = Rules(garbage_after_s=0)
    return decide(take_listing(checkpoints), rules=rules, in_use=DEAD, now_s=9e9)


def test_a_step_that_is_committed_after_the_decision_stays(checkpoints, commit, decided):
    commit(checkpoints, 5)
    assert carry_out(checkpoints, decided) == []
    assert checkpoints.verify(5) == []


def test_an_object_that_is_written_anew_after_the_decision_stays(checkpoints, decided):
    checkpoints.put_shard(5, shard_name(0, 0, 0), b"new")
    assert carry_out(checkpoints, decided) == []
    assert checkpoints.store.get(checkpoints.key(5, shard_name(0, 0, 0))) == b"new"


def test_an_object_that_is_gone_after_the_decision_is_no_error(checkpoints, decided):
    checkpoints.delete(5)
    assert carry_out(checkpoints, decided) == []


def test_a_manifest_that_cannot_be_read_names_no_strays(checkpoints, commit):
    commit(checkpoints, 5)
    checkpoints.store.put(checkpoints.key(5, MANIFEST_NAME), b"{")
    found = take_listing(checkpoints)
    assert (found.committed, found.named) == ([5], {})


class UploadsStore(LocalStore):
    """Knows of three unfinished uploads."""

    request: tuple[str, float] | None = None

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        self.request = (prefix, older_than_s)
        return 3


def test_unfinished_uploads_are_aborted_where_the_store_knows_such(tmp_path, local):
    assert abort_uploads(CheckpointStore(local, "run-1"), 60.0) == 0
    store = UploadsStore(tmp_path)
    assert abort_uploads(CheckpointStore(store, "run-1"), 60.0) == 3
    assert store.request == ("runs/run-1/", 60.0)


def test_the_totals_are_plain_text():
    one = Removal(RemovalKind.PROBE, None, (info(1, "x", 0),), "why")
    assert totals([one]) == "1 object, 100 bytes"
    assert totals([one, one]) == "2 objects, 200 bytes"
    assert totals([]) == "0 objects, 0 bytes"
