"""MA_PROC_START_CNT as processes see it, where one of them, all, or a container is made anew."""

from __future__ import annotations

import pytest

from tests.process.harness import RECIPES
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

COUNTED = {"recipe": "paced:counted", "cwd": str(RECIPES)}


def test_a_replaced_rank_sees_one_more_start_and_a_restart_more_than_any_rank_saw(bench):
    # Without a checkpoint in between, the fourth loss in a row is answered in place.
    job = bench.pair(
        "start-counts",
        worker=COUNTED,
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


def test_with_rsc_alone_a_process_that_dies_costs_its_container_and_the_other_one_stays(
    bench, undisturbed_pair
):
    restart = {"from_platform": {"MS_ENABLE_TFT": "{RSC:1}"}}
    running = bench.start(bench.apart("rsc", worker=COUNTED, restart=restart))
    running.reach(13)
    assert len(running.local.kill_rank(1)) == 1
    assert running.finish() == 0, running.out
    assert running.rungs() == ["pod_reschedule"]
    assert running.curve() == undisturbed_pair
    history = running.history
    assert history.isolated == (), "a crash says nothing about its node"
    members = [(m.node, m.schedule_cnt) for m in not_none(history.placement).members]
    assert members == [("node-0", 1), ("node-1", 2)]
    assert not_none(history.attempts[-1].ended).proc_start_cnt == {"node-0": 2, "node-1": 1}
    assert sorted(running.worker_lines("is start")) == [
        "rank 0 is start 1", "rank 0 is start 2", "rank 1 is start 1", "rank 1 is start 1",
    ]  # fmt: skip
    running.leave_nothing()


def test_with_rsc_a_container_is_next_once_the_processes_in_place_of_a_dead_one_have_failed(
    bench, undisturbed_pair, api
):
    restart = {"from_platform": {"MS_ENABLE_TFT": "{ARF:1,RSC:1}"}}
    worker = COUNTED | {"recipe": "paced:unlucky"}
    running = bench.start(bench.apart("rsc-next", worker=worker, restart=restart))
    running.reach(13)
    assert len(running.local.kill_rank(1)) == 1
    assert running.finish() == 0, running.out
    *replaced, last = running.rungs()
    assert set(replaced) == {"process_replace"}
    assert last == "pod_reschedule"
    history = running.history
    assert not any(recovery.succeeded for recovery in history.attempts[0].recoveries)
    assert history.isolated == (), "a crash says nothing about its node"
    members = [(m.node, m.schedule_cnt) for m in not_none(history.placement).members]
    assert members == [("node-0", 1), ("node-1", 2)]
    assert running.curve() == undisturbed_pair
    (task,) = [name for name in api.task_runs("rsc-next") if name.startswith("attempt 1.1 ")]
    api.wait_for_tasks("rsc-next", {task: "ReschedulePod"})
    running.leave_nothing()
