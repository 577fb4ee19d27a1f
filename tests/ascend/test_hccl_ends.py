"""What HCCL on emulated NPUs says where ranks do not come, die, are stopped, or links fail."""

from __future__ import annotations

import pytest

from tests.ascend import hccl_ranks
from tests.ascend.hccl_ranks.library import REMOTE, SUCCESS, SUSPENDING, TIMEOUT

STREAM_ABORT = 107023
TASK_ABORT = 107022
LINK_ERROR = 507056
RETRY_FAILED = 507904
FFTS_PLUS_TIMEOUT = 507048

# In seconds: a busy machine starts a rank or an operation so much later than the others.
EXEC_TIMEOUT = {"HCCL_EXEC_TIMEOUT": "5"}
CONNECT_TIMEOUT = {"HCCL_CONNECT_TIMEOUT": "5"}
# A card that sends again once, after 131 us; and the servers of two ranks.
QUICK_NETWORK = {"HCCL_RDMA_TIMEOUT": "5", "HCCL_RDMA_RETRY_CNT": "1"}
TWO_SERVERS = {0: {"HCCL_IF_IP": "127.0.0.1"}, 1: {"HCCL_IF_IP": "127.0.0.2"}}
RETRY = {
    "HCCL_OP_RETRY_ENABLE": "L1:1,L2:1",
    "HCCL_OP_RETRY_PARAMS": "MaxCnt:2,HoldTime:300,IntervalTime:200",
}


def test_an_operation_that_a_rank_does_not_enter_times_out_on_the_stream(tmp_path):
    ended = hccl_ranks.run("ends", "late", size=3, folder=tmp_path, variables=EXEC_TIMEOUT)
    for result in hccl_ranks.results(ended)[:2]:
        assert (result["where"], result["code"]) == ("stream", FFTS_PLUS_TIMEOUT)
        assert result["text"].startswith("EI0002: [PID: ")
        assert "has not received the Notify record from remote rank [2]" in result["text"]
        assert "Heartbeat Lost" not in result["text"]
        assert result["duration_s"] >= 5.0
        assert result["async_error"] == SUCCESS


@pytest.mark.long
def test_a_rank_of_the_same_server_that_died_is_told_by_the_time_out(tmp_path):
    ended = hccl_ranks.run("ends", "dead", size=3, folder=tmp_path, variables=EXEC_TIMEOUT)
    assert ended[2].status == -9
    for one in ended[:2]:
        assert one.status == 0, one.output
        assert (one.result["where"], one.result["code"]) == ("stream", FFTS_PLUS_TIMEOUT)
        assert "Cluster Exception Location[IP/ID]:[127.0.0.1/2]" in one.result["text"]
        assert "ExceptionType:[Heartbeat Lost Occurred]" in one.result["text"]
        assert one.result["async_error"] == SUCCESS


def test_a_rank_of_another_server_that_died_is_a_remote_error(tmp_path):
    ended = hccl_ranks.run(
        "ends",
        "dead",
        size=2,
        folder=tmp_path,
        variables=EXEC_TIMEOUT | QUICK_NETWORK,
        of_rank=TWO_SERVERS,
    )
    assert ended[1].status == -9
    assert ended[0].status == 0, ended[0].output
    assert ended[0].result["async_error"] == REMOTE
    assert "EI0013: [PID: " in ended[0].result["async_text"]
    assert "Peer information: server 127.0.0.2, device ID 1" in ended[0].result["async_text"]


def test_a_rank_that_does_not_come_fails_the_initialization_of_the_others(tmp_path):
    ended = hccl_ranks.run("ends", "absent", size=3, folder=tmp_path, variables=CONNECT_TIMEOUT)
    for result in hccl_ranks.results(ended)[:2]:
        assert (result["where"], result["code"]) == ("call", TIMEOUT)
        assert result["text"].startswith("EI0015: ")
        assert "Failed to connect agent[2,]" in result["text"]


@pytest.mark.long
def test_a_rank_that_calls_no_operation_fails_the_first_call_of_the_others(tmp_path):
    ended = hccl_ranks.run("ends", "unlinked", size=2, folder=tmp_path, variables=CONNECT_TIMEOUT)
    result = hccl_ranks.results(ended)[0]
    assert (result["where"], result["code"]) == ("call", TIMEOUT)
    assert result["text"].startswith("EI0006: ")
    assert "Getting socket times out" in result["text"]


def test_destroying_a_communicator_ends_what_waits_in_it(tmp_path):
    result = hccl_ranks.results(hccl_ranks.run("ends", "destroyed", size=2, folder=tmp_path))[0]
    assert (result["where"], result["code"]) == ("stream", STREAM_ABORT)


def test_a_stopped_device_suspends_its_communicators_until_they_resume(tmp_path):
    results = hccl_ranks.results(hccl_ranks.run("ends", "stopped", size=3, folder=tmp_path))
    assert (results[0]["first"]["where"], results[0]["first"]["code"]) == ("stream", TASK_ABORT)
    for result in results:
        assert (result["suspended"]["where"], result["suspended"]["code"]) == ("call", SUSPENDING)
        assert result["total"] == [6.0]


def test_an_operation_is_retried_where_that_is_switched_on(tmp_path):
    ended = hccl_ranks.run("ends", "struck", "retry", size=2, folder=tmp_path, variables=RETRY)
    for result in hccl_ranks.results(ended):
        assert (result["where"], result["total"]) == ("nowhere", [3.0])
    assert ended[1].counts["(retry of an operation)"] == 1


def test_without_retry_a_link_that_flickers_is_a_link_error(tmp_path):
    ended = hccl_ranks.run(
        "ends", "struck", "retry", size=2, folder=tmp_path, variables=EXEC_TIMEOUT
    )
    waiting, hit = hccl_ranks.results(ended)
    assert (hit["where"], hit["code"]) == ("stream", LINK_ERROR)
    assert (waiting["where"], waiting["code"]) == ("stream", FFTS_PLUS_TIMEOUT)


@pytest.mark.long
def test_a_retry_in_vain_fails_the_operation_on_all_ranks(tmp_path):
    ended = hccl_ranks.run("ends", "struck", "retry-failed", size=3, folder=tmp_path)
    for result in hccl_ranks.results(ended):
        assert (result["where"], result["code"]) == ("stream", RETRY_FAILED)
        assert "reason=[hccl op retry failed]" in result["text"]


@pytest.mark.long
@pytest.mark.parametrize("is_retried", [False, True])
def test_a_network_that_is_down_is_a_remote_error_or_a_retry_in_vain(tmp_path, is_retried):
    ended = hccl_ranks.run(
        "ends",
        "struck",
        "network",
        size=2,
        folder=tmp_path,
        variables=QUICK_NETWORK | (RETRY if is_retried else EXEC_TIMEOUT),
        of_rank=TWO_SERVERS,
    )
    for result in hccl_ranks.results(ended):
        assert result["where"] == "stream"
        if is_retried:
            assert (result["code"], result["async_error"]) == (RETRY_FAILED, SUCCESS)
        else:
            assert (result["code"], result["async_error"]) == (FFTS_PLUS_TIMEOUT, REMOTE)


@pytest.mark.long
def test_within_a_server_no_network_is_used(tmp_path):
    ended = hccl_ranks.run("ends", "struck", "network", size=2, folder=tmp_path)
    for result in hccl_ranks.results(ended):
        assert (result["where"], result["total"]) == ("nowhere", [3.0])
