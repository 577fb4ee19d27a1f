"""Which rank failed first, by the summary that torchrun itself makes."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.ending import find_first_failed
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.recovery.faults import FaultClass

T = 1_700_000_000


def summary(*failed: tuple[int, int, int]) -> str:
    """Of ranks of node 1 of two with 8 each: local rank, exit code, and seconds after the first."""
    failures = {}
    for local_rank, exit_code, after_s in failed:
        failures[8 + local_rank] = ProcessFailure(local_rank, 4000 + local_rank, exit_code, "")
        failures[8 + local_rank].timestamp = T + after_s
    return f"step 5 loss 0.5\n{ChildFailedError('train.py', failures)}\n"


@pytest.mark.parametrize(
    ("failed", "rank"),
    [
        ([(3, -9, 0)], 11),
        ([(3, -9, 0), (1, 1, 0), (2, 1, 0)], 11),
        ([(3, -11, 0), (1, -6, 0), (2, -15, 0)], 11),
        ([(3, 1, 0), (1, 1, 2)], 11),
        ([(3, 1, 0), (1, 1, 0)], None),
        ([(3, -9, 0), (1, -9, 0)], None),
    ],
    ids=["alone", "peers raise", "peers abort", "earlier", "at once", "both killed"],
)
def test_the_rank_that_failed_first_is_known_where_exactly_one_did(failed, rank):
    failed_rank = find_first_failed(summary(*failed))
    assert (failed_rank.rank if failed_rank else None) == rank
    assert failed_rank is None or failed_rank.local_rank == rank - 8


def test_an_output_without_a_summary_or_with_a_cut_one_names_no_rank():
    assert find_first_failed("step 5 loss 0.5\n") is None
    text = summary((3, -9, 0))
    assert find_first_failed(text[: text.index("Root Cause") + 40]) is None


def test_a_prefix_of_the_launcher_before_each_line_changes_nothing():
    text = "".join(f"[default0]:{line}\n" for line in summary((3, -9, 0)).splitlines())
    rank = find_first_failed(text)
    assert rank is not None
    assert (rank.rank, rank.exit_code) == (11, -9)


def fault_of(log: str, *, oom: bool = False):
    end = WorkerEnd(None, "node-1", None, 1, 10.0, log=log)
    nodes = ("node-1",) if oom else ()
    return diagnose(Evidence(at_s=100.0, step=5, workers=[end], oom_nodes=nodes)).fault


def test_a_rank_under_torchrun_that_was_killed_is_named_with_what_may_have_killed_it():
    fault = fault_of(summary((3, -9, 0)))
    assert fault.fault_class is FaultClass.NATIVE_CRASH
    assert (fault.rank, fault.device, fault.node, fault.code) == (11, 3, "node-1", "SIGKILL")
    assert "a person, a script or the platform" in fault.explanation
    assert "core file" in fault.action
    assert "leaves neither" in fault.action
    oom = fault_of(summary((3, -9, 0)), oom=True)
    assert oom.fault_class is FaultClass.HOST_OOM
    assert oom.rank == 11
    assert "SIGKILL" not in oom.action


def test_a_crash_that_leaves_a_stack_still_says_where_to_read_it():
    fault = fault_of(summary((3, -11, 0)))
    assert fault.fault_class is FaultClass.NATIVE_CRASH
    assert "native stack or core file" in fault.action
