"""Saves of numpy arrays: spread over replicas, read back bit-exact, all ranks or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_with_the_library

from perdure.storage.arrays import DTYPES, ArrayPlans, ArrayReader
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt
from perdure.storage.local import LocalStore
from perdure.storage.saving import DirectSaver

OWN = "random/"
SHARD = "p0001-a0001-rank00000.safetensors"


class Meeting:
    """Ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self._said: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=60)

    def exchange(self, rank: int, document: Any) -> list[Any]:
        self._said[rank] = document
        self._barrier.wait()
        gathered = list(self._said)
        self._barrier.wait()
        return gathered


class Rank:
    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self._meeting, self.rank, self.world_size = meeting, rank, world_size

    def gather(self, document: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, document)


def on_ranks(world_size: int, act: Callable[[Rank], Any]) -> list[Any]:
    meeting = Meeting(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [Rank(meeting, rank, world_size) for rank in range(world_size)]
        return list(pool.map(act, ranks))


def state_of(seed: int = 1) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    plain = {
        f"kind/{code}": generator.integers(0, 2, (3, 2)).astype(dtype)
        for code, dtype in DTYPES.items()
    }
    return {
        **plain,
        "transposed": generator.standard_normal((5, 3)).T,
        "scalar": np.array(2.5, np.float32),
        "empty": np.empty((0, 4), np.float32),
        "odd": np.array([0.0, -0.0, np.nan, np.inf, 1e-45], np.float32),
    }


def own_state(rank: int) -> dict[str, np.ndarray]:
    return {f"{OWN}rank{rank}": np.full(8, rank, np.uint8)}


def saver_of(rank: Rank, folder: Any) -> DirectSaver:
    everyone = [range(rank.world_size)]
    return DirectSaver(
        plans=ArrayPlans(rank, everyone, OWN),
        run_id="run", placement=1, attempt=1, rank=rank.rank, world_size=rank.world_size,
        checkpoints=CheckpointStore(LocalStore(folder), "run"),
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_reads_back_each_bit_that_all_have_saved(tmp_path, world_size):
    state = state_of()

    def save(rank: Rank) -> None:
        saver_of(rank, tmp_path).save(state | own_state(rank.rank), 10, {"note": rank.rank})

    def load(rank: Rank) -> dict[str, np.ndarray]:
        checkpoints = CheckpointStore(LocalStore(tmp_path), "run")
        manifest = checkpoints.manifest(10)
        own = own_state(rank.rank)
        room = {name: np.empty_like(array) for name, array in (state | own).items()}
        fetched = ArrayReader(rank).load(
            room, manifest, checkpoints=checkpoints, held={}, verify=frozenset()
        )
        assert fetched == world_size
        return room

    on_ranks(world_size, save)
    for rank, read in enumerate(on_ranks(world_size, load)):
        for name, array in (state | own_state(rank)).items():
            assert read[name].tobytes() == array.tobytes(), name


def test_a_share_is_a_safetensors_file_and_no_array_is_in_two():
    state = state_of()

    def file_of(rank: Rank) -> dict[str, np.ndarray]:
        staging = ArrayPlans(rank, [(0, 1)], OWN).stage(state, f"rank-{rank.rank}")
        memory = bytearray(staging.size_bytes)
        staging.copy_into(memory)
        return load_with_the_library(bytes(memory))

    first, second = on_ranks(2, file_of)
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == state.keys()
    assert all(first.get(n, second.get(n)).tobytes() == a.tobytes() for n, a in state.items())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"odd": np.zeros(4, np.float32)}, "other names, types or shapes"),
        ({"more": np.zeros(1, np.float32)}, "other names, types or shapes"),
        ({"odd": np.zeros(5, np.float64)}, "other names, types or shapes"),
        ({"odd": np.zeros(5, np.complex64)}, "odd: complex64 cannot be saved"),
    ],
)
def test_no_rank_saves_where_replicas_differ_or_an_array_cannot_be_saved(changed, why):
    def refuse(rank: Rank) -> None:
        state = state_of() | (changed if rank.rank == 1 else {})
        with pytest.raises(ValueError, match=why):
            ArrayPlans(rank, [(0, 1)], OWN).stage(state, "file")

    on_ranks(2, refuse)


def test_ranks_that_are_no_replicas_save_what_each_has():
    def names(rank: Rank) -> set[str]:
        state = {f"part{rank.rank}/weight": np.zeros(3, np.float32)}
        return set(ArrayPlans(rank, [(0,), (1,)], OWN).stage(state, SHARD).parts())

    assert on_ranks(2, names) == [{"part0/weight"}, {"part1/weight"}]


@pytest.mark.parametrize("damage", [b"\0", b"\xff" * 9])
def test_a_file_that_rotted_fails_on_every_rank(tmp_path, damage):
    state = {"weight": np.arange(1000, dtype=np.float32)}
    on_ranks(2, lambda rank: saver_of(rank, tmp_path).save(state, 10, {}))
    file = max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-len(damage) - 40 : -40] = damage
    file.write_bytes(content)

    def load(rank: Rank) -> None:
        checkpoints = CheckpointStore(LocalStore(tmp_path), "run")
        manifest = checkpoints.manifest(10)
        room = {"weight": np.empty(1000, np.float32)}
        with pytest.raises(Corrupt, match="rank 0"):
            ArrayReader(rank).load(
                room, manifest, checkpoints=checkpoints, held={}, verify=frozenset()
            )

    on_ranks(2, load)
