"""A node asks Slurm whether a person has cancelled its job; tests/slurm asks the real one."""

from __future__ import annotations

import pytest

from perdure.training.engines.launched.identity import NodeIdentity
from perdure.training.engines.launched.platforms import Platform
from perdure.training.engines.launched.slurm import is_cancelled


def node_of(platform: Platform, allocation: str = "71") -> NodeIdentity:
    return NodeIdentity(platform, 0, 2, "n1", allocation=allocation)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A stand-in for Slurm's command, which keeps its arguments."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(answer: str) -> None:
        program = tmp_path / "squeue"
        program.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n{answer}\n")
        program.chmod(0o755)

    return install


@pytest.mark.parametrize("platform", [Platform.SLURM, Platform.MPI])
def test_a_job_that_slurm_lists_as_cancelled_is_cancelled(squeue, tmp_path, platform):
    squeue("echo 71")
    assert is_cancelled(node_of(platform))
    assert (tmp_path / "asked").read_text() == "-h -t CANCELLED -o %A -j 71\n"


@pytest.mark.parametrize(
    "answer",
    [
        "",  # its time is over, it is requeued, or another job has preempted it
        "echo 7",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "echo 71; exit 1",
    ],
)
def test_every_other_answer_is_no_cancellation(squeue, answer):
    squeue(answer)
    assert not is_cancelled(node_of(Platform.SLURM))


def test_a_node_without_the_command_knows_of_no_cancellation(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_cancelled(node_of(Platform.SLURM))
    assert "does not tell whether the job was cancelled" in caplog.text


@pytest.mark.parametrize(
    ("platform", "allocation"),
    [(Platform.MODELARTS, "71"), (Platform.BY_HAND, ""), (Platform.MPI, "")],
)
def test_no_other_platform_is_asked(squeue, tmp_path, platform, allocation):
    squeue("echo 71")
    assert not is_cancelled(node_of(platform, allocation))
    assert not (tmp_path / "asked").exists()
