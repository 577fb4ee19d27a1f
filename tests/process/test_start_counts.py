"""MA_PROC_START_CNT as the processes see it, over replaced processes and a restart in place."""

from __future__ import annotations

import pytest

from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]


def test_a_replaced_rank_sees_one_more_start_and_a_restart_more_than_any_rank_saw(bench):
    # Without a checkpoint in between, the fourth loss in a row is answered in place.
    job = bench.pair(
        "start-counts",
        worker={**bench.job("")["worker"], "recipe": "paced:counted"},
        checkpoint={"every_steps": 1000},
    )
    running = bench.start(job)
    for replaced in range(4):
        running.reach(5 + 10 * replaced)
        assert len(running.local.kill_rank(1)) == 1
    assert running.finish() == 0, running.out
    assert running.rungs() == ["process_replace"] * 3 + ["in_place_restart"]
    lines = running.worker_lines("is start")
    assert [line for line in lines if "rank 0" in line] == [f"rank 0 is start {n}" for n in (1, 5)]
    assert [line for line in lines if "rank 1" in line] == [
        f"rank 1 is start {start}" for start in range(1, 6)
    ]
    counts = [not_none(view.ended).proc_start_cnt for view in running.history.attempts]
    assert counts == [{"node-0": 4}, {"node-0": 5}]
    running.leave_nothing()
