"""`perdure status` of real runs: supervised, abandoned, over; and where their time went."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from perdure.storage.address import open_store
from perdure.training.journal.steps import read_kept_steps
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = pytest.mark.process

IN_FAULTS = {"redone_step", "detection", "recovery_hang_restart", "recovery_in_place_restart"}


@pytest.mark.long
def test_the_status_of_a_run_whose_flow_is_dead_still_shows_its_ranks(bench, undisturbed_pair):
    document = bench.apart("abandoned", steps=60, env={"PACE_S": "0.5"})
    running = bench.start(document)
    running.reach(4)
    running.kill_supervisor()
    status = running.status()
    assert (status["state"], status["supervised"]) == ("running", False)
    assert [node["node"] for node in status["nodes"]] == ["node-0", "node-1"]
    assert {node["state"] for node in status["nodes"]} == {"running"}
    ranks = [rank for node in status["nodes"] for rank in node["ranks"]]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert status["step"] >= 4, "though no checkpoint covers it yet"
    assert status["eta_s"] > 0
    later = wait_for(
        lambda: (now := running.status())["step"] > status["step"] and now,
        what="a later step",
    )
    assert later["time_s"]["productive_step"] > status["time_s"]["productive_step"]
    plain = bench.perdure("status", "abandoned")
    assert "no process supervises it" in plain
    assert "node-0: running, ok; rank 0" in plain
    again = bench.start(document)
    assert again.finish() == 0, again.out
    assert again.curve() == undisturbed_pair
    done = again.status()
    assert (done["state"], done["step"], done["nodes"]) == ("completed", 60, [])
    assert done["checkpoints"]["store"]["newest"] == 60
    again.leave_nothing()


@pytest.mark.long
def test_every_second_of_a_run_that_is_restarted_in_place_has_an_owner(bench, undisturbed_pair):
    """A rank dies, later the other falls silent: with a fault's time known, and one unknown."""
    restart = {"hang_timeout_s": 12, "process_replace": False, "end_of_life_checkpoint": False}
    running = bench.start(bench.pair("accounted", restart=restart))
    running.reach(17)
    killed_s = time.time()
    assert running.local.kill_rank(1)
    wait_for(lambda: len(running.history.attempts) == 2, what="a second attempt")
    running.reach(25)
    (silent,) = running.local.rank(0)
    silent.suspend()
    silent_s = time.time()
    assert running.finish(hurry=False) == 0, running.out
    assert running.curve() == undisturbed_pair
    assert running.rungs() == ["in_place_restart", "hang_restart"]
    status = running.status()
    spent = status["time_s"]
    assert sum(spent.values()) == pytest.approx(status["wall_s"], abs=0.01)
    assert status["ettr"] == pytest.approx(spent["productive_step"] / status["wall_s"], abs=1e-3)
    assert set(spent) >= IN_FAULTS | {"productive_step", "save_block", "start_up", "ending"}
    assert "unknown" not in spent
    assert "unsupervised" not in spent
    assert spent["productive_step"] >= 60 * 0.1, "every kept step slept that long"
    assert spent["redone_step"] >= 5 * 0.1, "from step 10 on, and from step 20 on"
    first, second = (view.ended for view in running.history.attempts[:2])
    assert first.noticed_s >= killed_s
    assert second.noticed_s - silent_s > 10
    assert spent["detection"] > 10
    running.leave_nothing()


@pytest.mark.long
def test_a_threshold_is_proposed_from_the_norms_that_the_run_had(bench):
    running = bench.start(bench.pair("norms", steps=140, env={"PACE_S": "0"}))
    assert running.finish() == 0, running.out
    kept = read_kept_steps(open_store(running.job.storage), "norms")
    norms = [not_none(record.grad_norm) for record in kept.values()]
    proposal = json.loads(bench.perdure("status", "norms", "--norms", "--json"))
    assert min(norms) <= proposal["quantile"] <= max(norms)
    assert proposal["threshold"] > proposal["quantile"]
    assert Path(proposal["picture"]).read_bytes().startswith(b"\x89PNG")
    assert f"abnormal_grad_norm: {proposal['threshold']:g}" in bench.perdure(
        "status", "norms", "--norms"
    )
