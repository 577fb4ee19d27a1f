"""Files and folders of output: which are read, what their paths say, what cannot be read."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.sources import (
    PathDiagnosis,
    diagnose_files,
    list_logs,
    read_context,
    read_scan,
)
from perdure.training.errors import InputError
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

YEAR = 2026
AT_S = 99.0
TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'targets'"
FRAME = '  File "/w/train.py", line 3, in f'
FAILED = f"Traceback (most recent call last):\n{FRAME}\n    f()\n{TYPE_ERROR}\n"
WAITED = (
    "EI0002: [PID: 4711] 2026-03-21-02:07:08.639.860 Notify timeout: The wait execution of the "
    "Notify register times out.\n"
)
HEALTHY = "step 12 loss 3.4\n"


def write(folder: Path, **texts: str) -> Path:
    """Files below a folder; '__' stands for the slash in their names."""
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def case_of(path: Path) -> PathDiagnosis:
    return diagnose_files(str(path), list_logs(path), at_s=AT_S, year=YEAR)


def diagnosis_of(path: Path) -> Diagnosis:
    return not_none(case_of(path).diagnosis)


@pytest.mark.parametrize(
    ("name", "rank", "node", "device"),
    [
        ("rank_3.log", 3, None, None),
        ("rank-12/stderr.log", 12, None, None),
        ("logs/train.rank7.txt", 7, None, None),
        ("node-1/rank_9.log", 9, "node-1", None),
        ("node-1_rank_9.log", 9, "node-1", None),
        ("worker_3.log", 3, None, None),
        ("worker-1/rank_9.log", 9, None, None),
        ("node_10_0_0_1/out.log", None, "node_10_0_0_1", None),
        ("pod-train-7/out.log", None, "pod-train-7", None),
        ("host12.log", None, "host12", None),
        ("none_x8f/attempt_0/3/stderr.log", None, None, 3),
        ("node-2/none_x8f/attempt_0/11/stdout.log", None, "node-2", 11),
        ("node-2/debug/device-3/device-4711_20260321.log", None, "node-2", 3),
        ("node-2/debug/plog/plog-4711_20260321.log", None, "node-2", None),
        ("local_rank_5.log", None, None, 5),
        ("npu-6/out.log", None, None, 6),
        ("node-a/rank_9.log", 9, "node-a", None),
        ("logs/host-B/out.log", None, "host-B", None),
        ("node_c.log", None, "node_c", None),
        ("nodeA/out.log", None, "nodeA", None),
        ("node-logs/out.log", None, None, None),
        ("hosts/out.log", None, None, None),
        ("frank3.log", None, None, None),
        ("nodes.log", None, None, None),
        ("train.log", None, None, None),
    ],
)
def test_a_path_gives_rank_node_and_device(name, rank, node, device):
    source = read_scan(name, scan_text(HEALTHY, year=YEAR), order=0, year=YEAR).source
    assert (source.rank, source.node, source.device) == (rank, node, device)


def test_a_folder_is_one_attempt(tmp_path):
    folder = write(
        tmp_path,
        **{f"node-{rank // 8}__rank_{rank}.log": WAITED for rank in range(16) if rank != 11},
        **{"node-1__rank_11.log": FAILED},
    )
    case = case_of(folder)
    diagnosis = not_none(case.diagnosis)
    assert diagnosis.source == "node-1/rank_11.log"
    fault = diagnosis.fault
    assert (fault.evidence, fault.rank, fault.node) == (TYPE_ERROR, 11, "node-1")
    assert len(case.readings) == 16


def test_a_folder_with_one_log_shows_as_much_as_one_with_many(tmp_path):
    diagnosis = diagnosis_of(write(tmp_path, **{"node-1__rank_11.log": FAILED}))
    assert (diagnosis.source, diagnosis.fault.node) == ("node-1/rank_11.log", "node-1")


def test_a_file_that_is_named_itself_is_its_own_name(tmp_path):
    diagnosis = diagnosis_of(write(tmp_path, **{"rank_3.log": FAILED}) / "rank_3.log")
    assert (diagnosis.source, diagnosis.fault.rank) == ("rank_3.log", 3)


def test_clocks_of_nodes_are_merged_before_the_first_cause_is_chosen(tmp_path):
    def log(*, ahead_s: float, failed_s: float, line: str) -> str:
        def clock(at_s: float) -> str:
            return f"{datetime.fromtimestamp(1_780_000_000 + at_s, UTC):%Y-%m-%d %H:%M:%S}"

        steps = [f"{clock(10 * n + ahead_s)} iteration {n}/ 100 | lm loss: 2.0" for n in range(9)]
        return "\n".join([*steps, f"{clock(failed_s + ahead_s)} failed", line, ""])

    folder = write(
        tmp_path,
        **{
            "node-1.log": log(ahead_s=0, failed_s=100, line=FAILED),
            "node-2.log": log(ahead_s=300, failed_s=95, line=FAILED.replace("Type", "Key")),
        },
    )
    diagnosis = diagnosis_of(folder)
    assert (diagnosis.source, diagnosis.fault.at_s) == ("node-2.log", 1_780_000_095)


def test_a_healthy_attempt_has_no_diagnosis_but_its_readings(tmp_path):
    case = case_of(write(tmp_path, a=HEALTHY, b=HEALTHY * 2))
    assert case.diagnosis is None
    assert [r.size_bytes for r in case.readings] == [len(HEALTHY), 2 * len(HEALTHY)]
    assert all(r.is_text for r in case.readings)


def test_a_run_whose_loss_jumps_is_diagnosed_with_the_line(tmp_path):
    losses = [2.0] * 20 + [7.0] * 5
    lines = [f"iteration {n}/ 100 | lm loss: {loss}\n" for n, loss in enumerate(losses)]
    fault = diagnosis_of(write(tmp_path, a="".join(lines))).fault
    assert fault.fault_class is FaultClass.NUMERIC_ANOMALY
    assert fault.evidence == lines[20].strip()


def test_a_stack_dump_alone_is_a_hang(tmp_path):
    text = 'Thread 1 (idle): "MainThread"\n    synchronize (torch/npu/streams.py:12)\n'
    assert diagnosis_of(write(tmp_path, a=text)).fault.fault_class is FaultClass.HANG


def test_a_compressed_log_is_read_whatever_its_name(tmp_path):
    for name in ("train.log.gz", "train.log"):
        (tmp_path / name).write_bytes(gzip.compress(FAILED.encode()))
        assert diagnosis_of(tmp_path / name).fault.evidence == TYPE_ERROR
        assert read_context(tmp_path / name, TYPE_ERROR, radius=1) == ["    f()", TYPE_ERROR]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_log_in_utf_16_is_read_as_text(tmp_path, encoding, pack):
    mark = "" if encoding == "utf-16" else "\ufeff"
    text = mark + "époque 1\r\n" * 200_000 + FAILED
    file = tmp_path / "train.log"
    file.write_bytes(pack(text.encode(encoding)))
    diagnosis = diagnosis_of(file)
    assert diagnosis.fault.evidence == TYPE_ERROR
    assert read_context(file, TYPE_ERROR, radius=1, near=diagnosis.offset) == [
        "    f()",
        TYPE_ERROR,
    ]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_compressed_log_is_named(tmp_path, damage):
    data = bytearray(gzip.compress(FAILED.encode() * 50))
    if damage == "cut":
        data = data[: len(data) // 2]
    else:
        data[20:30] = b"\xff" * 10
    file = tmp_path / "train.log.gz"
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"train\.log\.gz"):
        case_of(file)
    with pytest.raises(InputError, match=r"train\.log\.gz"):
        read_context(file, "not in it", radius=1)


def test_files_that_are_no_logs_are_left_out_unless_named(tmp_path):
    write(tmp_path, **{"a.log": HEALTHY, "job.yaml": FAILED, "b__model.pt": FAILED, ".hid": FAILED})
    assert list_logs(tmp_path) == [tmp_path / "a.log"]
    assert list_logs(tmp_path / "job.yaml") == [tmp_path / "job.yaml"]


def test_files_come_in_the_order_of_their_names(tmp_path):
    write(tmp_path, **{"b.log": "", "a__z.log": "", "a__c.log": "", "c": ""})
    names = [str(file.relative_to(tmp_path)) for file in list_logs(tmp_path)]
    assert names == ["a/c.log", "a/z.log", "b.log", "c"]


def test_a_folder_without_logs_and_a_missing_path_are_wrong_input(tmp_path):
    with pytest.raises(InputError, match="holds no logs"):
        list_logs(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        list_logs(tmp_path / "missing")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        list_logs(Path("/dev/null"))


def test_the_context_of_a_line_is_what_is_around_it(tmp_path):
    file = write(tmp_path, a="".join(f"line {n}\n" for n in range(9))) / "a"
    assert read_context(file, "line 4", radius=2) == [f"line {n}" for n in (2, 3, 4, 5, 6)]
    assert read_context(file, "line 0", radius=2) == ["line 0", "line 1", "line 2"]
    assert read_context(file, "line 8", radius=2) == ["line 6", "line 7", "line 8"]
    assert read_context(file, "line 9", radius=2) == []


def test_the_context_of_a_line_behind_a_progress_bar_has_neither_colours_nor_returns(tmp_path):
    file = write(tmp_path, a=f" 3%\r 4%\r\x1b[31m{TYPE_ERROR}\x1b[0m\r\nend") / "a"
    assert read_context(file, TYPE_ERROR, radius=1) == [" 4%", TYPE_ERROR, "end"]


def test_the_context_of_a_missing_file_is_wrong_input(tmp_path):
    with pytest.raises(InputError, match="missing"):
        read_context(tmp_path / "missing", "x", radius=1)
