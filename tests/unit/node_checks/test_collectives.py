"""CANN's own all-reduce over the devices of a node; what it prints is in HCCL's own form."""

from __future__ import annotations

import os

import pytest

from perdure.training.node_checks.collectives import check_links, judge_links
from perdure.training.node_checks.runner import check_this_machine
from perdure.training.telemetry.vendor_tools import NoAnswer
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job
from tests.unit.telemetry.driver_tools import install, only_tools_of

TABLE = """\
the minbytes is 8, maxbytes is 134217728, iters is 20, warmup_iters is 5
data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:
8                 | 43.10          | 0.00019              | success
134217728         | 1024.40        | 131.02082            | {result}
"""
HCCL_ERROR = (
    "hccl interface return err ./opbase_test/hccl_allreduce_rootinfo_test.cc:172, retcode: 4"
)


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """An installation whose program prints how it was started, and then its table."""
    tools = only_tools_of(tmp_path / "tools", monkeypatch)
    install(tools, "mpirun", 'printf "%s\n" "$*" >> "$0.started"; shift 2; exec "$@"')
    programs = tmp_path / "cann/tools/hccl_test/bin"
    programs.mkdir(parents=True)
    install(programs, "all_reduce_test", f"cat << END\n{TABLE.format(result='success')}END")
    return tmp_path / "cann"


def check(cann, slots=8):
    (only,) = check_links(slots, {"ASCEND_HOME_PATH": str(cann)}, timeout_s=240)
    return only


def test_all_devices_of_the_node_take_part_and_the_best_bandwidth_is_reported(cann):
    link_check = check(cann)
    assert (link_check.outcome, link_check.seen) == (
        CheckOutcome.OK,
        "8 devices, 131.0 GB/s for up to 128 MiB",
    )
    assert link_check.figures == {"algorithm_bandwidth_gb_s": 131.02082}
    started = (cann.parent / "tools/mpirun.started").read_text()
    program = cann / "tools/hccl_test/bin/all_reduce_test"
    assert started == f"-n 8 {program} -b 8 -e 128M -f 2 -d fp32 -o sum -p 8\n"


def test_root_may_start_it_under_open_mpi(cann):
    install(cann.parent / "tools", "mpirun", 'test "$OMPI_ALLOW_RUN_AS_ROOT" = 1 || echo no root')
    assert "no root" not in check(cann).seen


@pytest.mark.parametrize(
    ("printed", "outcome", "words"),
    [
        (TABLE.format(result="failed"), CheckOutcome.FAILED,
         "wrong sums over 8 devices of 134217728 B"),
        (TABLE.format(result="NULL"), CheckOutcome.OK, "131.0 GB/s"),
        (f"{TABLE.format(result='success')}{HCCL_ERROR} \n", CheckOutcome.FAILED, HCCL_ERROR),
        ("libmpi.so.12: cannot open shared object file\n", CheckOutcome.WARNING,
         "no result: libmpi.so.12: cannot open"),
        ("", CheckOutcome.WARNING, "no result: nothing was printed"),
    ],
)  # fmt: skip
def test_a_wrong_sum_and_an_error_of_hccl_fail_but_a_program_that_does_not_start_warns(
    printed, outcome, words
):
    check = judge_links(printed, 8)
    assert check.outcome is outcome
    assert words in check.seen


def test_devices_that_never_answer_fail(cann):
    def never(command, *, timeout_s):
        raise NoAnswer(f"{command} after {timeout_s}")

    (check,) = check_links(8, {"ASCEND_HOME_PATH": str(cann)}, timeout_s=60, ask_tool=never)
    assert (check.outcome, check.seen) == (
        CheckOutcome.FAILED,
        "8 devices: no result within 60 s",
    )


def test_what_is_missing_is_named_and_nothing_is_said_where_there_is_no_cann(cann):
    assert check_links(8, {}, timeout_s=240) == ()
    assert check_links(1, {"ASCEND_HOME_PATH": str(cann)}, timeout_s=240) == ()
    (cann.parent / "tools/mpirun").unlink()
    if os.access("/usr/bin/mpirun", os.X_OK):
        pytest.skip("this machine has an mpirun of its own")
    assert check(cann).seen == "mpirun is not in PATH"
    (cann / "tools/hccl_test/bin/all_reduce_test").unlink()
    link_check = check(cann)
    assert link_check.outcome is CheckOutcome.SKIPPED
    assert link_check.seen.startswith("not built: there is no ")


def test_the_check_of_a_node_has_it(cann, tmp_path):
    job = small_job(
        tmp_path,
        worker={"command": ["true"]},
        engine={"nodes": 1, "slots_per_node": 2},
        preflight={"burn_in_s": 0.0, "timeout_s": 100, "gang": False},
    )
    environment = {**os.environ, "ASCEND_HOME_PATH": str(cann)}
    check = check_this_machine(job, state_bytes=None, environment=environment)
    assert [check.seen for check in check if check.name == "hccl_test"] == [
        "2 devices, 131.0 GB/s for up to 128 MiB"
    ]
