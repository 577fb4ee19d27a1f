"""What the prefix of a line says: time, rank, node, device, code and level."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.diagnosis.lines import (
    code_of,
    is_low_level,
    is_progress,
    origin_of,
    severity_of,
    time_of,
)

YEAR = 2026


def at(*moment: int, fraction: float = 0.0) -> float:
    return datetime(*moment, tzinfo=UTC).timestamp() + fraction  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            "[ERROR] HCCL(4711,python):2025-11-21-13:18:47.639.860 [a.cc:9][4711]Notify timeout",
            at(2025, 11, 21, 13, 18, 47, fraction=0.63986),
            id="plog",
        ),
        pytest.param("2025-11-21T13:18:47Z step", at(2025, 11, 21, 13, 18, 47), id="iso"),
        pytest.param(
            "2025-11-21T13:18:47.25+08:00 step",
            at(2025, 11, 21, 13, 18, 47, fraction=0.25),
            id="iso-with-zone",
        ),
        pytest.param(
            "2025-11-21 13:18:47,639 - INFO - step",
            at(2025, 11, 21, 13, 18, 47, fraction=0.639),
            id="python-logging",
        ),
        pytest.param("[2025/11/21 13:18:47] step", at(2025, 11, 21, 13, 18, 47), id="slashes"),
        pytest.param(
            "E1121 02:07:08.408271257 4711 ProcessGroup.cpp:62] x",
            at(YEAR, 11, 21, 2, 7, 8, fraction=0.408271257),
            id="glog",
        ),
        pytest.param(
            "[rank1]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:629] x",
            at(YEAR, 3, 21, 2, 7, 8, fraction=0.408271257),
            id="c10-with-unpadded-month",
        ),
        pytest.param(
            "W0809 10:11:12.131415       1 kubelet.go:10] x",
            at(YEAR, 8, 9, 10, 11, 12, fraction=0.131415),
            id="klog",
        ),
        pytest.param("Aug  1 08:38:31 host3 kernel: x", at(YEAR, 8, 1, 8, 38, 31), id="syslog"),
        pytest.param("[Mon Aug  1 08:38:31 2022] x", at(2022, 8, 1, 8, 38, 31), id="dmesg"),
        pytest.param("ERROR 06-09 06:57:48 engine.py:7] x", at(YEAR, 6, 9, 6, 57, 48), id="ray"),
        pytest.param("2024-02-29 00:00:00 x", at(2024, 2, 29), id="leap-day"),
    ],
)
def test_every_format_of_time_is_read(line, expected):
    stamp = time_of(line, year=YEAR)
    assert stamp == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no time at all",
        "13:18:47 without a date",
        "2025-13-01 10:00:00 month 13",
        "2025-00-10 10:00:00 month 0",
        "2025-01-00 10:00:00 day 0",
        "2025-01-32 10:00:00 day 32",
        "2025-01-01 24:00:00 hour 24",
        "2025-01-01 10:60:00 minute 60",
        "2025-01-01 10:00:60 second 60",
        "E1301 10:00:00.1 month 13",
        "Foo  1 08:38:31 host3 kernel: x",
        "took 12:34:56",
        "aa:bb:cc",
    ],
)
def test_a_nonsense_date_is_no_time(line):
    assert time_of(line, year=YEAR) is None


@given(st.text(max_size=300), st.integers(1970, 2100))
def test_reading_a_line_never_fails(line, year):
    origin_of(line, year=year)
    is_low_level(line)
    is_progress(line)


@given(st.from_regex(r"[EW]?[0-9/: .,-]{0,12}[0-9]:[0-5][0-9]:[0-5][0-9][.0-9]{0,8}"))
def test_anything_that_resembles_a_time_is_read_or_left_alone(line):
    stamp = time_of(line, year=YEAR)
    assert stamp is None or stamp > 0


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("[rank3]: TypeError: x", "rank", 3),
        ("[rank: 12] TypeError: x", "rank", 12),
        ("[PG ID 1 PG GUID 3(TP) Rank 5] Watchdog", "rank", 5),
        ("[Rank 7] Watchdog", "rank", 7),
        ("rankId[9], index[21]", "rank", 9),
        ("RankID: 4 failed", "rank", 4),
        ("[1,6]<stderr>:TypeError: x", "rank", 6),
        ("rank=8 died", "rank", 8),
        ("ranks agree", "rank", None),
        ("device_id=3 failed", "device", 3),
        ("deviceId[5] failed", "device", 5),
        ("devId:2, x", "device", 2),
        ("(PID:4211, Device:3, RankID:5) ERR02200 DIST", "device", 3),
        ("(PID:4211, Device:3, RankID:5) ERR02200 DIST", "rank", 5),
        ("(PID:4211, Device:3, RankID:-1) ERR00100 PTA", "rank", None),
        ("[ERROR] DRV(77,python): open device 2 failed, ret=87", "device", 2),
        ("opening device 6 failed", "device", 6),
        ("Device ID: 4, rankId: 7", "device", 4),
        ("[drvDeviceOpen] devid 1 open fail", "device", 1),
        ("RuntimeError: npu:6 is lost", "device", 6),
        ("tensor on cuda:1", "device", 1),
        ("GPU 7 has 80 GiB", "device", 7),
        ("[default2]:TypeError: x", "device", None),
        ("node-1:5776:5902 [4] NCCL WARN x", "device", 4),
        ("local_rank: 1 failed to open its device", "device", 1),
        ("failed (exitcode: -6) local_rank: 1 (pid: 4711) of binary: python", "device", None),
        ("  rank      : 9 (local_rank: 1)", "device", None),
        ("no device named", "device", None),
        ("node-1:5776:5902 [0] NCCL WARN x", "node", "node-1"),
        ("Aug  1 08:38:31 host3 kernel: x", "node", "host3"),
        ("[worker-2:1] x", "node", "worker-2"),
        ("process died on node 'gpu-17'", "node", "gpu-17"),
        ("  host      : trn-04", "node", "trn-04"),
        ("2025-11-21 13:18:47 x", "node", None),
    ],
)
def test_rank_device_and_node_are_read_from_each_stacks_prefix(line, field, value):
    assert getattr(origin_of(line, year=YEAR), field) == value


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("EI0002: [PID: 1] x", "EI0002"),
        ("E19999: Inner Error!", "E19999"),
        ("x, error code is 507054", "507054"),
        ("call f failed, errCode=507010", "507010"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1", "79"),
        ("event_id:0x80e01801", "80E01801"),
        ("OSError: [Errno 28] No space left on device", "28"),
        ("ERR02200 DIST call hccl api failed.", "ERR02200"),
        ("exit code 1", None),
    ],
)
def test_the_code_is_read_as_each_stack_prints_it(line, code):
    assert code_of(line) == code


@pytest.mark.parametrize(
    ("line", "is_low"),
    [
        ("[INFO] RuntimeError: x", True),
        ("2025-11-21 13:18:47,639 - WARNING - x", True),
        ("INFO: x", True),
        ("W0809 10:11:12.1 1 x.go:1] x", True),
        ("[rank0]:[W321 02:07:08.4 x.cpp:1] x", True),
        ("level=warning msg=x", True),
        ("/a/b.py:3: FutureWarning: x", True),
        ("[W compiler_depend.ts:5] x", True),
        ("", False),
        ("[ERROR] HCCL(1,python): x", False),
        ("2025-11-21 13:18:47,639 - ERROR - x", False),
        ("E0809 10:11:12.1 1 x.go:1] x", False),
        ("node-1:1:2 [0] x.cc:60 NCCL WARN x", False),
        ("CRITICAL: x", False),
        ("TypeError: INFORMATION missing", False),
    ],
)
def test_information_and_warnings_are_low_level_and_errors_and_plain_lines_are_not(line, is_low):
    assert is_low_level(line) is is_low


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (" iteration      100/    1000 | lm loss: 2.3E+00 |", True),
        ("step 12 loss 3.4", True),
        ("{'loss': 1.42, 'grad_norm': 0.53}", True),
        ("100%|####| 8/8 [00:12<00:00,  1.51s/it]", True),
        ("loss: 2.31 lr: 0.1", True),
        ("loss function: cross entropy", False),
        ("[rank0] waiting", False),
    ],
)
def test_lines_that_training_prints_because_it_goes_on_are_progress(line, progress):
    assert is_progress(line) is progress


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("event_id:0x80e01801 severity: 3 assertion: occur", 3),
        ("EventID=80C98000, Severity=Minor", 1),
        ("alarm level: major", 2),
        ("fault severity: \u63d0\u793a", 0),
        ("severity: 7", None),
        ("no word about it", None),
    ],
)
def test_the_drivers_severity_is_read_as_number_or_name(line, severity):
    assert severity_of(line) == severity
