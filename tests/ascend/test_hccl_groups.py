"""ProcessGroupHCCL of torch_npu, over emulated NPUs, where collectives fail and groups end."""

from __future__ import annotations

import signal

import pytest

from tests.ascend import hccl_ranks

NO_WATCHDOG = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}
WATCHDOG = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "1"}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("link", "HCCS LINK ERROR"),
        pytest.param("suspect-remote", "SUSPECT REMOTE ERROR", marks=pytest.mark.long),
        pytest.param("retry-failed", "HCCL OP RETRY FAILED", marks=pytest.mark.long),
    ],
)
def test_torch_npu_makes_the_exception_of_a_failed_collective(tmp_path, fault, text):
    # The other rank waits in vain for one that is struck, but hears of a retry that has failed.
    timeout_s = "30" if fault == "retry-failed" else "6"
    ended = hccl_ranks.run(
        "groups",
        "struck",
        fault,
        size=2,
        folder=tmp_path,
        variables=NO_WATCHDOG | {"HCCL_EXEC_TIMEOUT": timeout_s},
    )
    results = hccl_ranks.results(ended)
    assert results[1]["before"] == [2.0] * 3
    assert text in results[1]["text"]  # with a code only where a call sees it, not the queue
    if fault == "retry-failed":
        assert text in results[0]["text"]


def test_torch_npu_reports_a_collective_that_timed_out(tmp_path):
    ended = hccl_ranks.run(
        "groups",
        "late",
        size=2,
        folder=tmp_path,
        variables=NO_WATCHDOG | {"HCCL_EXEC_TIMEOUT": "5"},
    )
    text = hccl_ranks.results(ended)[0]["text"]
    assert "507048" in text
    assert "EI0002" in text


def test_groups_are_destroyed_and_made_anew(tmp_path):
    ended = hccl_ranks.run("groups", "generations", size=4, folder=tmp_path)
    for result in hccl_ranks.results(ended):
        assert result == [[4.0] * 3, 0, [4.0] * 3, 1, [4.0] * 3, 2]


@pytest.mark.parametrize(
    ("way", "watchdog"),
    [
        pytest.param("rebuild", NO_WATCHDOG, id="rebuild"),
        pytest.param("rebuild", WATCHDOG, id="rebuild, watchdog", marks=pytest.mark.long),
        pytest.param("resume", NO_WATCHDOG, id="resume", marks=pytest.mark.long),
        pytest.param("resume", WATCHDOG, id="resume, watchdog", marks=pytest.mark.long),
    ],
)
def test_a_stopped_collective_is_followed_by_one_on_new_or_resumed_links(tmp_path, way, watchdog):
    ended = hccl_ranks.run("groups", "stopped", way, size=2, folder=tmp_path, variables=watchdog)
    results = hccl_ranks.results(ended)
    assert "FORCE STOP" in results[0]["text"]
    for one, result in zip(ended, results, strict=True):
        assert result["before"] == result["after"] == [2.0] * 3
        assert one.counts.get("HcclCommResume", 0) == (1 if way == "resume" else 0)


@pytest.mark.long
def test_an_aborted_communicator_ends_the_collective_that_waits_in_it(tmp_path):
    ended = hccl_ranks.run("groups", "aborted", size=2, folder=tmp_path, variables=NO_WATCHDOG)
    assert "107023" in hccl_ranks.results(ended)[0]["text"]


def test_the_watchdog_ends_a_process_whose_communicator_is_aborted_under_a_collective(tmp_path):
    ended = hccl_ranks.run("groups", "aborted", size=2, folder=tmp_path, variables=WATCHDOG)
    assert ended[0].status == -signal.SIGABRT, ended[0].output
