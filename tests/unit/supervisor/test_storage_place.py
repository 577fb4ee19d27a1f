"""Where checkpoints are kept, for a model of which size."""

from __future__ import annotations

import pytest

from storage.address import StorageSpec
from training.supervisor.storage_place import MOUNTS, Place, check_place, place_of
from training.wire.node import CheckOutcome

TABLE = r"""
/dev/sda / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
10.0.0.1@tcp:/fs /lustre lustre rw 0 0
/dev/sdb /lustre/local xfs rw 0 0
10.0.0.2:/share /mnt/my\040share nfs4 rw 0 0
juice /jfs fuse.juicefs rw 0 0
/dev/sdc /twice ext4 rw 0 0
server:/fs /twice nfs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("file:///data/store", Place.LOCAL_DISK),
        ("file:///run/store", Place.TEMPORARY),
        ("file:///tmp/store", Place.TEMPORARY),
        ("file:///lustre/not/yet/made", Place.PARALLEL_FILE_SYSTEM),
        ("file:///lustre/local/store", Place.LOCAL_DISK),
        ("file:///mnt/my share/store", Place.PARALLEL_FILE_SYSTEM),
        ("file:///jfs", Place.PARALLEL_FILE_SYSTEM),
        ("file:///twice/store", Place.PARALLEL_FILE_SYSTEM),
        ("s3://bucket/prefix", Place.OBJECT_STORE),
    ],
)
def test_the_place_of_a_store_is_that_of_the_deepest_mount(address, place):
    assert place_of(StorageSpec(address=address), TABLE) is place


def test_the_mounts_of_this_machine_can_be_read():
    spec = StorageSpec(address="file:///data/store")
    assert place_of(spec, MOUNTS.read_text()) in Place


@pytest.mark.parametrize(
    ("parameters", "least"),
    [
        (10**6, Place.LOCAL_DISK),
        (10**9 - 1, Place.LOCAL_DISK),
        (10**9, Place.PARALLEL_FILE_SYSTEM),
        (10**10, Place.PARALLEL_FILE_SYSTEM),
        (10**10 + 1, Place.OBJECT_STORE),
    ],
)
def test_a_lesser_place_than_the_size_asks_for_is_a_warning_and_a_better_one_is_not(
    parameters, least
):
    for place in Place:
        outcome = check_place(place, parameters).outcome
        assert (outcome is CheckOutcome.OK) is (place >= least)
        assert outcome in (CheckOutcome.OK, CheckOutcome.WARNING)


def test_of_a_model_that_is_not_known_only_a_temporary_place_is_judged():
    assert check_place(Place.TEMPORARY, None).outcome is CheckOutcome.WARNING
    assert check_place(Place.LOCAL_DISK, None).outcome is CheckOutcome.SKIPPED
