from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.trainer.data.loader import ResumableLoader, SampleOrder, TokenDataset, permute
from perdure.training.trainer.data.manifest import CorpusManifest

MakeDataset = Callable[..., tuple[tuple[Path, ...], CorpusManifest]]

SEQ_LEN = 32
BATCH = 8
# Given a manifest, its fate and the shards: prints its workers' ids and meets its fate.
TRAINER = """
import multiprocessing, os, signal, sys
from pathlib import Path
from perdure.training.trainer.data.loader import ResumableLoader, TokenDataset
from perdure.training.trainer.data.manifest import CorpusManifest

def main():
    manifest = CorpusManifest.model_validate_json(Path(sys.argv[1]).read_bytes())
    dataset = TokenDataset([Path(path) for path in sys.argv[3:]], manifest, 32)
    loader = ResumableLoader(dataset, global_batch_size=4, micro_batch_size=2, rank=0,
                             world_size=1, seed=1, num_workers=2)
    loader.next_step()
    pids = [worker.pid for worker in multiprocessing.active_children()]
    print(*pids, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "stuck workers":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        loader.keep = loader  # not collected before exit
    if sys.argv[2] == "terminated":
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for _ in range(50):
            loader.next_step()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def dataset(make_dataset: MakeDataset) -> TokenDataset:
    paths, manifest = make_dataset()
    return TokenDataset(paths, manifest, SEQ_LEN)


def make(dataset: TokenDataset, *, num_workers: int = 0, **changes: Any) -> ResumableLoader:
    settings: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": 5, "prefetch_factor": 2}
    sizes = {"global_batch_size": BATCH, "micro_batch_size": 2, "num_workers": num_workers}
    return ResumableLoader(dataset, **{**settings, **sizes, **changes})


def take(loader: ResumableLoader, num_steps: int) -> torch.Tensor:
    """Inputs and last targets of steps, [steps, samples, S + 1]."""
    steps = []
    for _ in range(num_steps):
        micro = loader.next_step()
        whole = [torch.cat((inputs, targets[:, -1:]), dim=1) for inputs, targets in micro]
        steps.append(torch.cat(whole))
    return torch.stack(steps)


@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_once(n: int, seed: int, epoch: int) -> None:
    out = permute(np.arange(n), num_items=n, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(out), np.arange(n))


@given(n=st.integers(20, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    items = np.arange(n)
    one = permute(items, num_items=n, seed=seed, epoch=epoch)
    assert not np.array_equal(one, permute(items, num_items=n, seed=seed, epoch=epoch + 1))
    assert not np.array_equal(one, permute(items, num_items=n, seed=seed + 1, epoch=epoch))


@given(
    n=st.integers(1, 50),
    start=st.integers(0, 500),
    counts=st.lists(st.integers(0, 40), max_size=4),
    shuffle=st.booleans(),
)
def test_pieces_make_the_whole_across_epochs(
    n: int, start: int, counts: list[int], *, shuffle: bool
) -> None:
    order = SampleOrder(n, 7, shuffle)
    pieces, position = [], start
    for count in counts:
        pieces += order.indices(position, count).tolist()
        position += count
    assert pieces == order.indices(start, sum(counts)).tolist()


def test_without_shuffle_samples_come_as_they_lie() -> None:
    assert SampleOrder(3, 0, shuffle=False).indices(1, 5).tolist() == [1, 2, 0, 1, 2]


def test_huge_corpora_need_no_list() -> None:
    n = 10**15
    out = SampleOrder(n, 1).indices(n - 1000, 1000)
    assert len(set(out.tolist())) == 1000
    assert 0 <= out.min() < n // 50
    assert n - n // 50 < out.max() < n


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        SampleOrder(0, 1)


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # Another order would make saved positions mean other samples.
    assert SampleOrder(10, 1234).indices(0, 20).tolist() == [
        *(3, 8, 4, 7, 1, 0, 6, 9, 2, 5),
        *(3, 8, 9, 7, 4, 5, 0, 6, 2, 1),
    ]


def test_samples_span_shard_borders(make_dataset: MakeDataset) -> None:
    paths, manifest = make_dataset()
    assert len(paths) > 3
    flat = np.concatenate([np.fromfile(path, manifest.numpy_dtype) for path in paths])
    for seq_len in (1, 31, 5000):
        dataset = TokenDataset(paths, manifest, seq_len)
        assert len(dataset) == dataset.num_samples == (flat.size - 1) // seq_len
        for index in {0, len(dataset) // 2, len(dataset) - 1}:
            inputs, targets = dataset[index]
            wanted = flat[index * seq_len : (index + 1) * seq_len + 1]
            assert inputs.tolist() == wanted[:-1].tolist()
            assert targets.tolist() == wanted[1:].tolist()
            assert inputs.dtype == targets.dtype == torch.int64


def test_a_corpus_shorter_than_a_sample_is_an_error(make_dataset: MakeDataset) -> None:
    paths, manifest = make_dataset()
    with pytest.raises(ValueError, match=f"the corpus has {manifest.num_tokens}"):
        TokenDataset(paths, manifest, manifest.num_tokens)
    assert len(TokenDataset(paths, manifest, manifest.num_tokens - 1)) == 1


def test_a_file_of_another_size_is_named(make_dataset: MakeDataset) -> None:
    paths, manifest = make_dataset()
    paths[1].write_bytes(b"xx")
    with pytest.raises(ValueError, match=f"{paths[1].name}: size_bytes=2"):
        TokenDataset(paths, manifest, 8)


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_follow_the_global_order(dataset: TokenDataset, *, shuffle: bool) -> None:
    loader = make(dataset, shuffle=shuffle)
    order = SampleOrder(len(dataset), 5, shuffle)
    for step in range(3):
        micro = loader.next_step()
        assert [tuple(inputs.shape) for inputs, _ in micro] == [(2, SEQ_LEN)] * 4
        wanted = [dataset[index] for index in order.indices(step * BATCH, BATCH).tolist()]
        assert torch.equal(torch.cat([i for i, _ in micro]), torch.stack([i for i, _ in wanted]))
        assert torch.equal(torch.cat([t for _, t in micro]), torch.stack([t for _, t in wanted]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_take_what_one_takes(dataset: TokenDataset, world_size: int) -> None:
    ranks = [make(dataset, rank=rank, world_size=world_size) for rank in range(world_size)]
    together = torch.cat([take(loader, 5) for loader in ranks], dim=1)
    assert torch.equal(together, take(make(dataset), 5))
    assert {loader.position for loader in ranks} == {5 * BATCH}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_anywhere_gives_the_batches_of_an_undisturbed_run(
    dataset: TokenDataset, num_workers: int
) -> None:
    num_steps = dataset.num_samples // BATCH + 4
    undisturbed = take(make(dataset), num_steps)
    loader = make(dataset, num_workers=num_workers)
    for stop in (1, num_steps // 2, num_steps - 2, num_steps):
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        loader = make(dataset, num_workers=num_workers)
        loader.load_state_dict(state)
        done = state["position"] // BATCH
        assert torch.equal(take(loader, stop - done), undisturbed[done:stop])
    loader.load_state_dict({**state, "position": 3 * BATCH})
    assert torch.equal(take(loader, 2), undisturbed[3:5])
    loader.close()
    assert loader.epoch == 0


def test_position_counts_steps_handed_out_not_prefetched(dataset: TokenDataset) -> None:
    loader = make(dataset, num_workers=2, prefetch_factor=4)
    assert (loader.position, loader.epoch) == (0, 0)
    loader.next_step()
    assert loader.position == BATCH
    loader.load_state_dict({**loader.state_dict(), "position": len(dataset)})
    assert loader.epoch == 1
    loader.close()


def test_another_order_or_corpus_is_not_resumed(
    dataset: TokenDataset, make_dataset: MakeDataset
) -> None:
    state = make(dataset).state_dict()
    with pytest.raises(ValueError, match="seed was 5 when it was saved, and is 6 now"):
        make(dataset, seed=6).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle was True"):
        make(dataset, shuffle=False).load_state_dict(state)
    paths, manifest = make_dataset(900)
    with pytest.raises(ValueError, match=f"num_samples was {len(dataset)}"):
        make(TokenDataset(paths, manifest, SEQ_LEN)).load_state_dict(state)
    with pytest.raises(ValueError, match="position=-1"):
        make(dataset).load_state_dict({**state, "position": -1})


def test_sizes_that_do_not_divide_are_named(dataset: TokenDataset) -> None:
    with pytest.raises(ValueError, match="global_batch_size=8 must be a multiple"):
        make(dataset, world_size=3)
    with pytest.raises(ValueError, match="rank=2"):
        make(dataset, rank=2, world_size=2)


def test_the_trainers_random_state_is_left_alone(dataset: TokenDataset) -> None:
    before = torch.random.get_rng_state()
    take(make(dataset), 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_workers_start_at_the_first_step_and_end_with_close(dataset: TokenDataset) -> None:
    before = set(multiprocessing.active_children())
    loader = make(dataset, num_workers=2)
    assert set(multiprocessing.active_children()) == before
    loader.next_step()
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    loader.close()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.process
def test_workers_never_outlive_the_trainer_nor_hold_it(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    paths, manifest = make_dataset()
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER)
    fates = ("killed", "not closed", "stuck workers", "terminated")
    trainers = {
        fate: subprocess.Popen(
            [sys.executable, program, tmp_path / "manifest.json", fate, *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for fate in fates
    }
    for fate, trainer in trainers.items():
        out, err = trainer.communicate(timeout=240)
        assert trainer.returncode == (-signal.SIGKILL if fate == "killed" else 0), err
        pids = [int(pid) for pid in out.split()]
        assert len(pids) == 2
        workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(workers, timeout=240)
        assert (fate, alive) == (fate, [])


@pytest.mark.parametrize("keeps", [True, False])
def test_workers_are_kept_from_epoch_to_epoch_unless_each_is_to_have_its_own(
    dataset: TokenDataset, *, keeps: bool
) -> None:
    def pids() -> set[int | None]:
        return {worker.pid for worker in multiprocessing.active_children()} - before

    before = {worker.pid for worker in multiprocessing.active_children()}
    num_steps = dataset.num_samples // BATCH + 2
    loader = make(dataset, num_workers=1, persistent_workers=keeps)
    taken = [take(loader, 1)]
    first = pids()
    assert len(first) == 1
    taken.append(take(loader, num_steps - 1))
    assert loader.epoch == 1
    assert (pids() == first) is keeps
    assert torch.equal(torch.cat(taken), take(make(dataset), num_steps))
    loader.close()
