"""How large a job's model is."""

from __future__ import annotations

from tests.jobs import small_job
from training.trainer.size import num_parameters, state_bytes


def job(**sections):
    return small_job(**{"data": {"sources": ["/corpus"]}, **sections})


def test_the_state_is_weights_and_both_moments():
    assert num_parameters(job()) == job().model.num_parameters(257)
    assert state_bytes(job()) == num_parameters(job()) * 12
    assert state_bytes(job(worker={"command": ["true"]})) is None
