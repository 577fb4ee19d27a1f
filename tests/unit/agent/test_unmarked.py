"""Processes that left their parents and their environment, found without their agent."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from perdure.training.agent.unmarked import UnmarkedRecord, read_unmarked
from perdure.training.processes import MARKER, kill_container


@pytest.mark.parametrize("variables", [["A=b"], []], ids=["others", "none at all"])
def test_a_process_without_the_mark_is_on_record_and_ended(tmp_path, variables):
    marker = str(tmp_path)
    command = ["env", "-i", *variables, "sleep", "600"]
    with subprocess.Popen(command, start_new_session=True) as process:
        record = UnmarkedRecord(tmp_path, marker)
        while not any(pid == process.pid for pid, _ in read_unmarked(tmp_path)):
            record._next_s = 0.0
            record.update()
        recorded = [entry for entry in read_unmarked(tmp_path) if entry[0] == process.pid]
        assert kill_container(marker, recorded=recorded)
        assert not psutil.pid_exists(process.pid)


def test_a_marked_process_is_found_by_its_mark_and_not_on_record(tmp_path):
    marker = str(tmp_path)
    with subprocess.Popen(["sleep", "600"], env={MARKER: marker}) as process:
        UnmarkedRecord(tmp_path, marker).update()
        assert process.pid not in [pid for pid, _ in read_unmarked(tmp_path)]
        assert kill_container(marker)


def test_a_number_that_another_process_has_by_now_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        assert kill_container(str(tmp_path), recorded=[(process.pid, 1.0)])
        assert process.poll() is None
        process.kill()


def test_a_container_without_a_record_has_none(tmp_path):
    assert read_unmarked(tmp_path) == []
    (tmp_path / "unmarked.json").write_text("[[1")
    assert read_unmarked(tmp_path) == []
