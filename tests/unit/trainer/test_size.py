"""How large a job's model is."""

from __future__ import annotations

from training.job import parse_job
from training.trainer.size import num_parameters, state_bytes


def job(**sections):
    document = {"run_id": "r", "storage": {"address": "file:///store"}, **sections}
    return parse_job({"data": {"sources": ["/corpus"]}, **document})


def test_the_state_is_weights_and_both_moments():
    assert num_parameters(job()) == job().model.num_parameters(257)
    assert state_bytes(job()) == num_parameters(job()) * 12
    assert state_bytes(job(worker={"command": ["true"]})) is None
