"""How large a job's model is."""

from __future__ import annotations

from perdure.training.trainer.size import num_parameters, state_bytes
from tests.jobs import small_job


def job(**sections):
    return small_job(**{"data": {"sources": ["/corpus"]}, **sections})


def test_the_state_is_weights_and_both_moments():
    assert num_parameters(job()) == job().model.num_parameters(257)
    assert state_bytes(job()) == 12 * job().model.num_parameters(257)
    assert state_bytes(job(worker={"command": ["true"]})) is None


def test_the_size_of_a_program_of_the_user_s_own_is_not_known():
    own = job(worker={"recipe": "mine:main"})
    assert (num_parameters(own), state_bytes(own)) == (None, None)
    named = job(worker={"recipe": "perdure.training.trainer.pretrain:main"})
    assert num_parameters(named) == num_parameters(job())
