"""Retries of HCCL that succeeded, from a run log to a node that is sub-healthy."""

from __future__ import annotations

from itertools import pairwise

import pytest

from perdure.training.config.watch import WatchSpec
from perdure.training.journal.events import AlertKind
from perdure.training.supervisor.sub_health import MACHINE_ALERTS
from perdure.training.telemetry.alerts import AlertMonitor, RunSample
from perdure.training.telemetry.hccl_retries import RetryLog, RetryLogs


def changes(*states: str, machine: str = "Agent") -> bytes:
    """A run log: the states that one rank passes through."""
    head = "[INFO] HCCL(7,python):2026-11-21-13:18:47.639.860 [opretry_base.h:246] [9]"
    return "".join(
        f"{head}[OpRetry][{machine}]State Transfer, cur state RETRY_STATE_{old}, "
        f"next state RETRY_STATE_{new}\n"
        for old, new in pairwise(states)
    ).encode()


FOUND = ("AGENT_RUNNING", "RESP_AICPU_ERR", "WAIT_CMD_STOP_AICPU", "POLL_AICPU_STOPED")
MENDED = ("WAIT_CMD_CAN_RETRY", "POLL_AICPU_RETRYEND", "RESP_AICPU_RETRYEND", "AGENT_RUNNING")
FAILED = ("WAIT_CMD_RETRY_FAIL", "AGENT_RETRY_FAIL", "AGENT_RUNNING")


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (changes(*FOUND, *MENDED), 1),
        (changes(*FOUND, *MENDED) * 2, 2),
        (changes(*FOUND, *MENDED, machine="\x02"), 1),
        (changes("AGENT_RUNNING", "POLL_AICPU_STOPED", *MENDED), 0),  # a peer of the rank
        (changes(*FOUND, *FAILED), 0),
        (changes(*FOUND, *FAILED) + changes("AGENT_RUNNING", "POLL_AICPU_STOPED", *MENDED), 0),
        (changes(*FOUND), 0),
        (b"[ERROR] HCCL(7,python): [OpRetry]wait timeout\n", 0),
    ],
)
def test_only_an_error_of_the_rank_that_was_mended_counts(text, mended):
    log = RetryLog()
    log.parse(text)
    assert log.num_mended == mended


def test_a_log_is_read_on_and_a_line_that_is_not_whole_waits(tmp_path):
    plog = tmp_path / "run" / "plog"
    plog.mkdir(parents=True)
    text = changes(*FOUND, *MENDED)
    logs = RetryLogs()
    assert logs.count_mended(tmp_path) == 0
    for end in range(0, len(text), 100):
        (plog / "plog-7.log").write_bytes(text[:end])
        assert logs.count_mended(tmp_path) == 0
    (plog / "plog-7.log").write_bytes(text)
    assert [logs.count_mended(tmp_path) for _ in range(2)] == [1, 1]
    (plog / "plog-7.log").unlink()
    (plog / "plog-8.log").write_bytes(text)
    assert logs.count_mended(tmp_path) == 2


def test_a_mended_retry_is_an_alert_of_its_node_for_the_rest_of_the_attempt():
    points = AlertMonitor(WatchSpec())
    assert points.update(RunSample(at_s=0)).raised == ()
    (raised,) = points.update(RunSample(at_s=1, retries={("node-1", 3): 1})).raised
    assert (raised.point, raised.node, raised.rank) == (AlertKind.LINK_RETRIED, "node-1", 3)
    assert raised.point in MACHINE_ALERTS
    later = points.update(RunSample(at_s=1000, retries={("node-1", 3): 2}))
    assert (later.raised, later.cleared) == ((), ())
