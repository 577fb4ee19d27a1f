"""TensorBoard's event files: written when wanted and possible, and never a fault."""

from __future__ import annotations

import sys

import pytest

from training.journal.events import StepRecord
from training.runtime.step_loop.step_records import EventFiles


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(step, loss, 1.0, 1e-3, 1000.0, None, 100.0 + step, 0.5, step, 0, 1, 1)


def test_without_a_folder_there_are_none():
    assert EventFiles.of(None, "run-1") is None


def test_without_the_package_there_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert EventFiles.of(str(tmp_path), "run-1") is None
    assert "install perdure[tensorboard]" in caplog.text


def test_a_full_disk_is_logged_once_and_training_goes_on(tmp_path, caplog):
    def open_writer(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    files = EventFiles(tmp_path, open_writer)
    files.step(record(1, 1.0))
    files.step(record(2, 1.0))
    files.close()
    assert caplog.text.count("No space left") == 1


def test_a_later_attempt_goes_on_where_it_began_again(tmp_path):
    reason = "needs TensorBoard: pip install perdure[tensorboard]"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, loss in ((1, 9.0), (3, 5.0)):
        files = EventFiles.of(str(tmp_path), "run-1")
        assert files is not None
        for step in range(first, first + 4):
            files.step(record(step, loss))
        files.close()
    read = EventAccumulator(str(tmp_path / "run-1"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [
        (1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0), (5, 5.0), (6, 5.0),
    ]  # fmt: skip
    assert "mfu" not in read.Tags()["scalars"], "what is not known has no record"
