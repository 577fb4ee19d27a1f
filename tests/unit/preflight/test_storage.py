"""Where checkpoints are kept, for a model of which size."""

from __future__ import annotations

import pytest

from perdure.storage.address import StorageSpec
from perdure.training.preflight.storage import MOUNTS, StoragePlace, check_place, place_of
from perdure.training.wire.node import CheckOutcome

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
        ("file:///data/store", StoragePlace.LOCAL_DISK),
        ("file:///run/store", StoragePlace.TEMPORARY),
        ("file:///tmp/store", StoragePlace.TEMPORARY),
        ("file:///lustre/not/yet/made", StoragePlace.PARALLEL_FILE_SYSTEM),
        ("file:///lustre/local/store", StoragePlace.LOCAL_DISK),
        ("file:///mnt/my share/store", StoragePlace.PARALLEL_FILE_SYSTEM),
        ("file:///jfs", StoragePlace.PARALLEL_FILE_SYSTEM),
        ("file:///twice/store", StoragePlace.PARALLEL_FILE_SYSTEM),
        ("s3://bucket/prefix", StoragePlace.OBJECT_STORE),
    ],
)
def test_the_place_of_a_store_is_that_of_the_deepest_mount(address, place):
    assert place_of(StorageSpec(address=address), TABLE) is place


def test_the_mounts_of_this_machine_can_be_read():
    spec = StorageSpec(address="file:///data/store")
    assert place_of(spec, MOUNTS.read_text()) in StoragePlace


@pytest.mark.parametrize(
    ("parameters", "least"),
    [
        (10**6, StoragePlace.LOCAL_DISK),
        (10**9 - 1, StoragePlace.LOCAL_DISK),
        (10**9, StoragePlace.PARALLEL_FILE_SYSTEM),
        (10**10, StoragePlace.PARALLEL_FILE_SYSTEM),
        (10**10 + 1, StoragePlace.OBJECT_STORE),
    ],
)
def test_a_lesser_place_than_the_size_asks_for_is_a_warning_and_a_better_one_is_not(
    parameters, least
):
    for place in StoragePlace:
        outcome = check_place(place, parameters).outcome
        assert (outcome is CheckOutcome.OK) is (place >= least)
        assert outcome in (CheckOutcome.OK, CheckOutcome.WARNING)


def test_of_a_model_that_is_not_known_only_a_temporary_place_is_judged():
    assert check_place(StoragePlace.TEMPORARY, None).outcome is CheckOutcome.WARNING
    assert check_place(StoragePlace.LOCAL_DISK, None).outcome is CheckOutcome.SKIPPED
