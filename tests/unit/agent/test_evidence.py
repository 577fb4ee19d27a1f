"""What an agent collects about a failure beside its workers' output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.training.agent import evidence
from perdure.training.agent.evidence import (
    NO_ANSWER,
    read_device_health,
    read_device_logs,
)
from perdure.training.agent.worker_output import ascend_folder
from perdure.training.telemetry.npu_smi import parse_table
from perdure.training.telemetry.sampling import health_command, link_commands
from perdure.training.wire.agent import EvidenceQuery
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of


@pytest.fixture
def tools(tmp_path, monkeypatch):
    return only_tools_of(tmp_path / "bin", monkeypatch)


def test_device_logs_of_every_rank_that_has_some_are_read_from_their_ends(tmp_path):
    for rank in (2, 3):
        plog = ascend_folder(tmp_path, f"rank-{rank}") / "debug" / "plog"
        plog.mkdir(parents=True)
        (plog / f"plog-{rank}.log").write_text(f"{'x' * 100}end of {rank}")
    texts = list(read_device_logs({ascend_folder(tmp_path, f"rank-{n}"): n for n in (1, 2, 3)}, 8))
    assert [(text.rank, text.text) for text in texts] == [(2, "end of 2"), (3, "end of 3")]


def test_only_the_newest_device_logs_of_a_rank_are_read(tmp_path):
    plog = ascend_folder(tmp_path, "rank-0")
    plog.mkdir()
    for number in range(9):
        (plog / f"{number}.log").write_text(str(number))
        os.utime(plog / f"{number}.log", (number, number))
    assert [text.text for text in read_device_logs({plog: 0}, 100)] == ["5", "6", "7", "8"]


def test_every_device_is_asked_about_by_card_and_chip(tools):
    table = SAMPLES / "npu-smi-info.txt"
    install(tools, "npu-smi", f'[ "$*" = info ] && cat {table} || echo "asked: $*"')
    install(tools, "hccn_tool", 'echo "asked: $*"')
    chips = parse_table(table.read_text())
    first, *texts = read_device_health([0, 1])
    assert (first.device, first.text) == (None, table.read_text())
    assert [(text.device, text.text) for text in texts] == [
        (device, f"asked: {' '.join(command[1:])}\n")
        for device, chip in enumerate(chips[:2])
        for command in (health_command(chip), *link_commands(chip))
    ]
    assert len(texts) == 6


@pytest.mark.parametrize(
    ("npu_smi", "texts"),
    [
        (None, []),
        ('echo "asked: $*"', ["asked: info\n"]),  # a table without any device
        ('echo "Invalid card id." >&2; exit 3', ["Invalid card id.\n"]),
    ],
)
def test_what_a_tool_prints_is_kept_and_devices_outside_of_its_table_are_left_out(
    tools, npu_smi, texts
):
    if npu_smi is not None:
        install(tools, "npu-smi", npu_smi)
    assert [text.text for text in read_device_health([0, 1])] == texts


def test_a_driver_that_does_not_answer_is_asked_no_more(tools, monkeypatch):
    monkeypatch.setattr(evidence, "COMMAND_TIMEOUT_S", 0.2)
    install(tools, "npu-smi", "exec sleep 60")
    (text,) = read_device_health([0, 1, 2])
    assert text.text.startswith(NO_ANSWER)


def test_the_agent_hands_over_what_its_workers_left(shared):
    folder = "$ASCEND_PROCESS_LOG_PATH/plog"
    program = f'mkdir -p "{folder}" && echo logged > "{folder}/a.log"'
    shared.finish("sh", "-c", program)
    texts = shared.call(EvidenceQuery(tail_bytes=1000)).texts
    assert [(text.rank, text.text) for text in texts if text.name.endswith("a.log")] == [
        (None, "logged\n")
    ]


def test_logs_below_a_folder_that_was_set_are_handed_over_each_as_its_own(shared, tmp_path):
    """A folder of the job's is that of every attempt: what others left there is not taken."""
    folder = tmp_path / "of-the-job"
    (folder / "plog").mkdir(parents=True)
    (folder / "plog" / "old.log").write_text("of an earlier attempt\n")
    program = 'mkdir -p "$ASCEND_PROCESS_LOG_PATH" && echo new > "$ASCEND_PROCESS_LOG_PATH/a.log"'
    shared.finish("sh", "-c", program, variables={"ASCEND_PROCESS_LOG_PATH": str(folder)})
    texts = shared.call(EvidenceQuery(tail_bytes=1000)).texts
    of_cann = [(Path(text.name), text.text) for text in texts if text.name.endswith(".log")]
    assert [text for _, text in of_cann] == ["new\n"]
    assert of_cann[0][0].is_relative_to(folder)


def test_the_agent_reports_a_retry_of_hccl_that_succeeded(shared, tmp_path):
    states = ("AGENT_RUNNING", "RESP_AICPU_ERR", "RESP_AICPU_RETRYEND", "AGENT_RUNNING")
    line = "[INFO] HCCL(7,python): [OpRetry][Agent]State Transfer, cur state {}, next state {}\n"
    names = [f"RETRY_STATE_{state}" for state in states]
    log = tmp_path / "log"
    log.write_text("".join(map(line.format, names, names[1:])))
    folder = "$ASCEND_PROCESS_LOG_PATH/run/plog"
    status = shared.finish("sh", "-c", f'mkdir -p "{folder}" && cp {log} "{folder}/plog-7.log"')
    assert status.mended_retries == {1: 1}
