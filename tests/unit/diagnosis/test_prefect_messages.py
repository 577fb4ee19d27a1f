"""Prefect's own messages: why a flow process was ended, or never started."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.cause import choose_cause
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.sources import read_scan
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

LEASE = (
    "Concurrency lease renewal failed - slots are no longer reserved. Terminating execution to "
    "prevent over-allocation. Lease ID: 6b1c, exception: Client error '410 Gone' for url "
    "'http://127.0.0.1:4200/api/v2/concurrency_limits/leases/6b1c/renew'"
)
CRASH = "Crash detected! Execution was "
NOT_FOUND = (
    "prefect.exceptions.ObjectNotFound: Client error '404 Not Found' for url "
    "'http://127.0.0.1:4200/api/work_pools/p/workers/w' - Response: {'detail': 'Worker not found.'}"
)
STAMP = "10:00:00.123 | ERROR   | Flow run 'bold-owl' - "


@pytest.mark.parametrize(
    ("line", "fault_class", "code", "advice"),
    [
        (LEASE, FaultClass.PREEMPTED, "LEASE_LOST", "concurrency limit"),
        (f"{CRASH}aborted by a termination signal.", FaultClass.PREEMPTED, "SIGTERM", "signal"),
        (f"{CRASH}aborted by an interrupt signal.", FaultClass.PREEMPTED, "SIGINT", ""),
        (f"{CRASH}cancelled by the runtime environment.", FaultClass.PREEMPTED, None, "lease"),
        (f"{CRASH}aborted by Python system exit call.", FaultClass.UNKNOWN, None, "before it"),
        (
            ("Crash detected! Request to http://127.0.0.1:4200/api/task_runs/ failed: "
            "ConnectError: All connection attempts failed."),
            FaultClass.STORAGE_ERROR, "API_UNREACHABLE", "PREFECT_API_URL",
        ),
        (
            "RuntimeError: Cannot create flow run. Failed to reach API at http://10.0.0.1:4200/api/.",
            FaultClass.STORAGE_ERROR, "API_UNREACHABLE", "NO_PROXY",
        ),
        (
            ("Aborted submission of flow run '0b6a'. Server sent an abort signal: This run has "
            "already terminated."),
            FaultClass.PREEMPTED, "SUBMISSION_ABORTED", "states of the flow run",
        ),
        (
            "Aborted submission of flow run '0b6a': Server returned a non-pending state 'RUNNING'",
            FaultClass.PREEMPTED, "SUBMISSION_ABORTED", "states of the flow run",
        ),
        (NOT_FOUND, FaultClass.LAUNCH_MISCONFIGURED, "WORKER_NOT_FOUND", "Start the worker again"),
        (
            ("prefect.exceptions.PrefectHTTPStatusError: Client error '410 Gone' for url "
            "'http://127.0.0.1:4200/api/v2/concurrency_limits/leases/6b1c/renew'"),
            FaultClass.PREEMPTED, "LEASE_LOST", "concurrency limit",
        ),
        (
            "Client error '410 Gone' for url 'http://127.0.0.1:4200/api/flow_runs/1'",
            FaultClass.STORAGE_ERROR, "HTTP_410", "Start the flow run again",
        ),
    ],
)  # fmt: skip
def test_a_message_of_prefect_has_a_class_and_advice(line, fault_class, code, advice):
    text = f"10:00:00.000 | INFO    | Flow run 'bold-owl' - training\n{STAMP}{line}\n"
    log = read_scan("flow.log", scan_text(text, year=2026), order=0, year=2026)
    fault = not_none(choose_cause([log.source], at_s=0.0)).fault
    assert (fault.fault_class, fault.code) == (fault_class, code)
    assert advice in fault.action
    assert fault.hardware_fault is False


def test_a_lost_lease_explains_the_crash_that_follows_it():
    crash = f"{CRASH}cancelled by the runtime environment."
    for lines in ((LEASE, crash), (crash, LEASE)):
        text = "\n".join(f"{STAMP}{line}" for line in lines)
        log = read_scan("flow.log", scan_text(text, year=2026), order=0, year=2026)
        assert not_none(choose_cause([log.source], at_s=0.0)).fault.code == "LEASE_LOST"


@pytest.mark.parametrize(
    "line",
    [
        (
            "10:00:00.000 | WARNING | Flow run 'bold-owl' - Concurrency lease renewal failed - "
            "slots are no longer reserved. Execution will continue, but concurrency limits may be "
            "exceeded."
        ),
        "10:00:00.000 | INFO    | prefect.runner - Process for flow run 'bold-owl' exited cleanly.",
        "10:00:00.000 | INFO    | Flow run 'bold-owl' - Finished in state Completed()",
    ],
)
def test_a_flow_that_goes_on_is_no_failure(line):
    log = read_scan("flow.log", scan_text(line, year=2026), order=0, year=2026)
    assert choose_cause([log.source], at_s=0.0) is None
